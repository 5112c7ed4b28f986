// Two tiles of 16 weight rows times the tokens of one expert, on tf32 tensor cores (table values are halves, and
// halves fit into tf32 whole). A block has 4 warps. K is permuted at will: a product sum does not care.
#pragma once
#include "ptx_compat.h"
#include "shared_table_activation.cuh"
#include "shared_table_decode.cuh"

#define TILE_THREADS 128
#define FEW_TOKENS 16     // up to here weights go from the table to the tensor core at once
#define TOKEN_GROUP 128   // above, a decoded tile in shared memory serves this many tokens
#define CHUNK 128         // columns decoded at a time for them
#define WEIGHT_STRIDE (CHUNK + 8)
#define STAGE_COLUMNS 32
#define STAGE_STRIDE (STAGE_COLUMNS + 4)

// What one block works on.
struct TileWork {
  PageView view;
  const int* planes;    // page lists of this block's planes
  const void* input;    // rows of `columns` activations
  int input_type;       // NumberType
  const int* slots;     // in shared memory: input row and output row of each token of the current group
  int first_row, second_row;  // of the two tiles
  int first_end, second_end;  // rows from here on do not belong to the tile
  int columns, words, bits;
  int input_divisor;    // input row = slot / input_divisor
  __half* table;        // in shared memory, of the first tile; that of the second follows
  int table_size;       // halves of one tile's table
  float* scratch;       // in shared memory: FEW_TOKENS * 512 floats, or a decoded tile and staged tokens
  __device__ __forceinline__ int row_of(int tile, int row) const { return (tile ? second_row : first_row) + row; }
  __device__ __forceinline__ bool holds(int tile, int row) const { return row_of(tile, row) < (tile ? second_end : first_end); }
};

// A float is two tf32 numbers to 2^-21; the lower one of a half or a bfloat16 is zero. Both are always multiplied: a
// branch costs more than the tensor core, which waits for the decoding anyway.
__device__ __forceinline__ void mma_terms(float (&d)[4], const unsigned (&a)[4], float b0, float b1) {
  const unsigned high[2] = {__float_as_uint(b0) & 0xFFFFE000u, __float_as_uint(b1) & 0xFFFFE000u};
  const unsigned low[2] = {__float_as_uint(b0 - __uint_as_float(high[0])), __float_as_uint(b1 - __uint_as_float(high[1]))};
  ptx_mma_m16n8k8_tf32(d, a, low);
  ptx_mma_m16n8k8_tf32(d, a, high);
}

// ---------------------------------------------------------------- up to FEW_TOKENS
// Warp w: tile w & 1, half (w >> 1) of each 512 columns. Lane 4 g + t holds columns 64 t .. 64 t + 63 of its half.
// In step (v, s, j) it multiplies columns 32 v + 16 j + s and + 8 of these. Staged tokens lie in that order:
// float2 [token tile][half][step][lane ^ step], so that neither the writes nor the reads meet in a bank.
__device__ __forceinline__ void stage_few(const TileWork& w, int count, int column0) {
  for (int n = 0; n < count; ++n) {
    const size_t row = (size_t)(w.slots[n] / w.input_divisor) * w.columns;
    for (int c = threadIdx.x; c < 512; c += TILE_THREADS) {
      const float x = column0 + c < w.columns ? read_number(w.input, row + column0 + c, w.input_type) : 0.f;
      const int t = c >> 6 & 3, v = c >> 5 & 1, byte = c >> 3 & 3, s = c & 7;
      const int step = v * 16 + s * 2 + (byte >> 1), lane = (n & 7) * 4 + t;
      w.scratch[((((n >> 3) * 2 + (c >> 8)) * 32 + step) * 32 + (lane ^ step)) * 2 + (byte & 1)] = x;
    }
  }
}
template <int Q>
__device__ __forceinline__ void few_tokens(const TileWork& w, int count, float (&acc)[2][4]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int tile = warp & 1, half = warp >> 1;
  const unsigned short* table = reinterpret_cast<const unsigned short*>(w.table) + tile * w.table_size + g;
  const float2* staged = reinterpret_cast<const float2*>(w.scratch) + half * 1024;
  const bool second = count > 8;
  for (int i = threadIdx.x; i < FEW_TOKENS * 512; i += TILE_THREADS) w.scratch[i] = 0.f;
  for (int column0 = 0; column0 < w.columns; column0 += 512) {
    const bool any = column0 + half * 256 < w.columns;
    unsigned now[2][Q], next[2][Q];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      load_two_words<Q>(w.view, w.planes, w.row_of(tile, g + 8 * r), w.words, any && w.holds(tile, g + 8 * r),
                        column0 / 32 + half * 8 + 2 * t, now[r], next[r]);
    __syncthreads();
    stage_few(w, count, column0);
    __syncthreads();
    if (!any) continue;
#pragma unroll 1
    for (int v = 0; v < 2; ++v) {
#pragma unroll 1
      for (int s = 0; s < 8; ++s) {
        const unsigned codes[2] = {four_codes<Q>(now[0], s), four_codes<Q>(now[1], s)};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          unsigned a[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // rows g, g + 8, g, g + 8; the second column is 8 above the first
            const unsigned code = codes[i & 1] >> (16 * j + 8 * (i >> 1)) & 0xFF;
            a[i] = __float_as_uint(__half2float(__ushort_as_half(table[code * 8 + (i & 1) * (8 << Q)])));
          }
          const int step = v * 16 + s * 2 + j;
          const float2 b = staged[step * 32 + (lane ^ step)];
          mma_terms(acc[0], a, b.x, b.y);
          if (second) {
            const float2 b2 = staged[2048 + step * 32 + (lane ^ step)];
            mma_terms(acc[1], a, b2.x, b2.y);
          }
        }
      }
#pragma unroll
      for (int p = 0; p < Q; ++p) { now[0][p] = next[0][p]; now[1][p] = next[1][p]; }
    }
  }
}
// Both halves of K summed, in order: result[tile][row][token] in shared memory, over the staged tokens.
__device__ __forceinline__ void reduce_few(const float (&acc)[2][4], float* result) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int half = 0; half < 2; ++half) {
    __syncthreads();
    if (warp >> 1 == half)
      for (int n = 0; n < 2; ++n)
        for (int i = 0; i < 4; ++i) {
          const int row = (lane >> 2) + (i >> 1) * 8, token = n * 8 + (lane & 3) * 2 + (i & 1);
          float* to = result + ((warp & 1) * 16 + row) * FEW_TOKENS + token;
          *to = half ? *to + acc[n][i] : acc[n][i];
        }
  }
  __syncthreads();
}

// ---------------------------------------------------------------- more tokens: decode once, multiply many times
// Thread (row, word) of the 32 x CHUNK tile turns one word of every plane into 32 halves in shared memory.
__device__ __forceinline__ void decode_chunk(const TileWork& w, __half* weights, int column0) {
  const int row = threadIdx.x >> 2, word = threadIdx.x & 3, tile = row >> 4;
  const int at = column0 / 32 + word;
  const bool ok = at < w.words && w.holds(tile, row & 15);
  const size_t place = (size_t)w.row_of(tile, row & 15) * w.words + at;
  unsigned planes[8];
#pragma unroll
  for (int p = 0; p < 8; ++p)
    planes[p] = p < w.bits && ok ? plane_word(w.view, w.planes + p * w.view.plane_list, place) : 0u;
  const __half* table = w.table + tile * w.table_size;
  __half* to = weights + row * WEIGHT_STRIDE + word * 32;
#pragma unroll 1
  for (int s = 0; s < 8; ++s) {
    unsigned codes = 0;
#pragma unroll
    for (int p = 0; p < 8; ++p)
      if (p < w.bits) codes = codes << 1 | (planes[p] >> s & 0x01010101u);
#pragma unroll
    for (int j = 0; j < 4; ++j) to[s + 8 * j] = table[table_place(row & 15, codes >> 8 * j & 0xFF, w.bits)];
  }
}
// Warp `warp` owns tokens 32 warp .. 32 warp + 31 of the group: acc[tile][8 tokens each][4].
__device__ __forceinline__ void many_tokens(const TileWork& w, int count, float (&acc)[2][4][4]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  __half* weights = reinterpret_cast<__half*>(w.scratch);
  float* stage = w.scratch + 32 * WEIGHT_STRIDE / 2 + warp * 32 * STAGE_STRIDE;
  const int mine = max(0, min(32, count - 32 * warp)), tiles = (mine + 7) / 8;
  for (int column0 = 0; column0 < w.columns; column0 += CHUNK) {
    __syncthreads();
    decode_chunk(w, weights, column0);
    __syncthreads();
    for (int sub = 0; sub < CHUNK && mine && column0 + sub < w.columns; sub += STAGE_COLUMNS) {
      const int column = column0 + sub + lane;
      __syncwarp();
      for (int n = 0; n < tiles * 8; ++n) {
        float x = 0.f;
        if (n < mine && column < w.columns)
          x = read_number(w.input, (size_t)(w.slots[32 * warp + n] / w.input_divisor) * w.columns + column, w.input_type);
        stage[n * STAGE_STRIDE + lane] = x;
      }
      __syncwarp();
#pragma unroll 1
      for (int k = 0; k < STAGE_COLUMNS; k += 8) {
        unsigned a[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // lane t: columns 2 t (first) and 2 t + 1 (second) of these 8
          const __half2 pair = *reinterpret_cast<const __half2*>(weights + (g + 8 * i) * WEIGHT_STRIDE + sub + k + 2 * t);
          a[i >> 1][i & 1] = __float_as_uint(__low2float(pair));
          a[i >> 1][2 + (i & 1)] = __float_as_uint(__high2float(pair));
        }
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          if (n >= tiles) continue;
          const float2 b = *reinterpret_cast<const float2*>(stage + (n * 8 + g) * STAGE_STRIDE + k + 2 * t);
          mma_terms(acc[0][n], a[0], b.x, b.y);
          mma_terms(acc[1][n], a[1], b.x, b.y);
        }
      }
    }
  }
}
