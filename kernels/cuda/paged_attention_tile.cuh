// One chunk of keys folded into the query rows of a tile: scores, softmax, weighted values; 4 warps.
//
// Scores: each warp takes 64 of the 256 keys of a unit. Values: each warp takes a quarter of the head's numbers over all
// 256 keys. Keys and values go from pages straight into the fragments of the tensor instructions: the order of the
// summed dimension and of the output columns is free, so each lane loads neighbouring numbers, and eight lanes a run.
#pragma once
#include "paged_attention_pages.cuh"
#include "ptx_compat.h"

#define ATTENTION_THREADS 128
#define UNIT_KEYS 256
#define NO_SCORE __int_as_float(0xFF800000)  // minus infinity
#define SCORE_STRIDE (UNIT_KEYS + 4)  // floats between rows: 4 banks on

// What a block works on: rows [0, rows) are (token, head) with heads fastest; keys [low, high) are seen by some row.
struct Tile {
  int first, rows, group, heads, head0, kv_head, window, low, high, slot;
  const int* positions;
  __device__ __forceinline__ int position(int row) const { return positions[first + min(row, rows - 1) / heads]; }
};

template <int TYPE> __device__ __forceinline__ unsigned pack_pair(float low, float high) {
  return TYPE == FLOAT16 ? ptx_cvt_f16x2(low, high) : ptx_cvt_bf16x2(low, high);
}
template <int TYPE> __device__ __forceinline__ float rounded(float x) {
  if (TYPE == FLOAT16) return __half2float(__float2half_rn(x));
  if (TYPE == BFLOAT16) return __bfloat162float(__float2bfloat16_rn(x));
  return x;
}
template <int TYPE>
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  if constexpr (TYPE == FLOAT16) ptx_mma_m16n8k16_f16(d, a, b);
  else ptx_mma_m16n8k16_bf16(d, a, b);
}

// COUNT neighbouring 16-bit numbers as pairs; one alone in the lower half. All of them or none are there.
template <int COUNT>
__device__ __forceinline__ void load_numbers(const unsigned char* from, bool ok, unsigned (&to)[(COUNT + 1) / 2]) {
#pragma unroll
  for (auto& word : to) word = 0u;
  if (!ok) return;
  if constexpr (COUNT == 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
  } else if constexpr (COUNT == 4) {
    const uint2 v = *reinterpret_cast<const uint2*>(from);
    to[0] = v.x; to[1] = v.y;
  } else if constexpr (COUNT == 2) {
    to[0] = *reinterpret_cast<const unsigned*>(from);
  } else {
    to[0] = *reinterpret_cast<const unsigned short*>(from);
  }
}

// DIM: numbers of a head, rounded up to 32. ROWS: 16, or 32 with 16-bit numbers.
template <int TYPE, int DIM, int ROWS>
struct Fold {
  static constexpr bool IS_FLOAT = TYPE == FLOAT32;
  static constexpr int TILES = ROWS / 16, OWN = DIM / 4;                   // OWN: output columns of a warp
  static constexpr int LANE_DIMS = OWN / 8;                                // of a group of four lanes
  static constexpr int VECTOR = LANE_DIMS % 8 == 0 ? 8 : LANE_DIMS % 4 == 0 ? 4 : LANE_DIMS % 2 == 0 ? 2 : 1;
  static constexpr int SPANS = LANE_DIMS / VECTOR, FLOAT_DIMS = (OWN + 31) / 32;
  static constexpr int SUMS = IS_FLOAT ? FLOAT_DIMS * ROWS : LANE_DIMS * TILES * 4;

  unsigned char* queries;  // [ROWS, DIM] of TYPE
  float* score;            // [ROWS, SCORE_STRIDE]; then the weights, of TYPE, in the same rows
  long long* place;        // [UNIT_KEYS] byte of a key in the arena, below 0 for none
  float *largest, *sum, *factor;  // [ROWS]
  float acc[SUMS];
  int lane, warp;

  __device__ __forceinline__ explicit Fold(unsigned char* shared) {
    place = reinterpret_cast<long long*>(shared);
    score = reinterpret_cast<float*>(place + UNIT_KEYS);
    largest = score + ROWS * SCORE_STRIDE;
    sum = largest + ROWS;
    factor = sum + ROWS;
    queries = reinterpret_cast<unsigned char*>(factor + ROWS);
    lane = threadIdx.x & 31;
    warp = threadIdx.x >> 5;
#pragma unroll
    for (float& x : acc) x = 0.f;
    if (threadIdx.x < ROWS) {
      largest[threadIdx.x] = NO_SCORE;
      sum[threadIdx.x] = 0.f;
    }
  }

  __device__ __forceinline__ void load_queries(const void* from, int type, long long stride, const Tile& t, int dim) {
    for (int i = threadIdx.x; i < ROWS * DIM; i += ATTENTION_THREADS) {
      const int row = i / DIM, d = i % DIM;
      float x = 0.f;
      if (row < t.rows && d < dim)
        x = read_number(from, (t.first + row / t.heads) * stride + (long long)(t.head0 + row % t.heads) * dim + d, type);
      write_number(queries, i, TYPE, x);
    }
  }

  __device__ __forceinline__ void find_keys(const PagedKeys& k, const Tile& t, int unit) {
    const int head_bytes = k.head_dim * (IS_FLOAT ? 4 : 2);
    __syncthreads();  // the unit before is done with
    for (int i = threadIdx.x; i < UNIT_KEYS; i += ATTENTION_THREADS) {
      const int key = unit + i;
      long long at = -1;
      if (key >= t.low && key < t.high) at = token_offset(k, t.slot, key);
      place[i] = at < 0 ? -1 : at + (long long)t.kv_head * head_bytes;
    }
    __syncthreads();
  }

  // score[row][key] = query . key, not scaled
  __device__ __forceinline__ void scores(const unsigned char* arena, int dim) {
    if constexpr (IS_FLOAT) float_scores(arena, dim);
    else half_scores(arena, dim);
  }
  __device__ __forceinline__ void half_scores(const unsigned char* arena, int dim) {
    const int g = lane >> 2, q = lane & 3;
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      float d[TILES][4][4] = {};
      long long at[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) at[n] = place[warp * 64 + half * 32 + n * 8 + g];
#pragma unroll 2
      for (int block = 0; block < DIM; block += 32) {
        unsigned key[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          load_numbers<8>(arena + at[n] + (block + 8 * q) * 2, at[n] >= 0 && block + 8 * q < dim, key[n]);
#pragma unroll
        for (int m = 0; m < TILES; ++m)
#pragma unroll
          for (int s = 0; s < 2; ++s) {
            const unsigned char* from = queries + ((m * 16 + g) * DIM + block + 8 * q + 4 * s) * 2;
            const uint2 upper = *reinterpret_cast<const uint2*>(from);
            const uint2 lower = *reinterpret_cast<const uint2*>(from + 8 * DIM * 2);
            const unsigned a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              const unsigned b[2] = {key[n][2 * s], key[n][2 * s + 1]};
              multiply<TYPE>(d[m][n], a, b);
            }
          }
      }
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float* to = score + (m * 16 + g) * SCORE_STRIDE + warp * 64 + half * 32 + n * 8 + 2 * q;
          *reinterpret_cast<float2*>(to) = make_float2(d[m][n][0], d[m][n][1]);
          *reinterpret_cast<float2*>(to + 8 * SCORE_STRIDE) = make_float2(d[m][n][2], d[m][n][3]);
        }
    }
    __syncthreads();
  }
  __device__ __forceinline__ void float_scores(const unsigned char* arena, int dim) {
    const float4* row_queries = reinterpret_cast<const float4*>(queries);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const long long at = place[warp * 64 + half * 32 + lane];
      float d[ROWS] = {};
#pragma unroll 1
      for (int i = 0; i < dim / 4; ++i) {
        float4 key = make_float4(0.f, 0.f, 0.f, 0.f);
        if (at >= 0) key = reinterpret_cast<const float4*>(arena + at)[i];
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const float4 x = row_queries[row * (DIM / 4) + i];
          d[row] = __fmaf_rn(x.w, key.w, __fmaf_rn(x.z, key.z, __fmaf_rn(x.y, key.y, __fmaf_rn(x.x, key.x, d[row]))));
        }
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) score[row * SCORE_STRIDE + warp * 64 + half * 32 + lane] = d[row];
    }
    __syncthreads();
  }

  // scores become weights below the largest score so far, in place; a warp has every fourth row
  __device__ __forceinline__ void weights(const Tile& t, int unit, float scale) {
#pragma unroll 1
    for (int row = warp; row < ROWS; row += 4) {
      const int position = t.position(row), oldest = t.window ? position + 1 - t.window : 0;
      float x[UNIT_KEYS / 32];
      float most = largest[row];
      const float before = most;
#pragma unroll
      for (int i = 0; i < UNIT_KEYS / 64; ++i)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = i * 64 + lane * 2 + j, key = unit + at;
          const bool seen = key <= position && key >= oldest && place[at] >= 0;
          x[2 * i + j] = seen ? __fmul_rn(score[row * SCORE_STRIDE + at], scale) : NO_SCORE;
          // a score that is no number must not vanish in the maximum
          most = x[2 * i + j] > most || x[2 * i + j] != x[2 * i + j] ? x[2 * i + j] : most;
        }
#pragma unroll
      for (int d = 16; d; d >>= 1) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, most, d);
        most = other > most || other != other ? other : most;
      }
      const float below = most == NO_SCORE ? 0.f : most;
      float part = 0.f;
#pragma unroll
      for (float& each : x) {
        each = rounded<TYPE>(exp2f(__fadd_rn(each, -below)));
        part = __fadd_rn(part, each);
      }
#pragma unroll
      for (int d = 16; d; d >>= 1) part = __fadd_rn(part, __shfl_xor_sync(0xFFFFFFFFu, part, d));
      __syncwarp();  // the row has been read
      float* to = score + row * SCORE_STRIDE;
#pragma unroll
      for (int i = 0; i < UNIT_KEYS / 64; ++i) {
        if constexpr (IS_FLOAT) reinterpret_cast<float2*>(to)[i * 32 + lane] = make_float2(x[2 * i], x[2 * i + 1]);
        else reinterpret_cast<unsigned*>(to)[i * 32 + lane] = pack_pair<TYPE>(x[2 * i], x[2 * i + 1]);
      }
      if (lane == 0) {
        const float shrink = exp2f(__fadd_rn(before, -below));
        factor[row] = shrink;
        sum[row] = __fmaf_rn(sum[row], shrink, part);
        largest[row] = most;
      }
    }
    __syncthreads();
  }

  // acc = acc * factor + weights x values
  __device__ __forceinline__ void add_values(const unsigned char* arena, int value_bytes, int dim) {
    if constexpr (IS_FLOAT) add_float_values(arena, value_bytes, dim);
    else add_half_values(arena, value_bytes, dim);
  }
  __device__ __forceinline__ void add_half_values(const unsigned char* arena, int value_bytes, int dim) {
    const int g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      const float upper = factor[m * 16 + g], lower = factor[m * 16 + 8 + g];
#pragma unroll
      for (int n = 0; n < LANE_DIMS; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[(m * LANE_DIMS + n) * 4 + i] *= i < 2 ? upper : lower;
    }
#pragma unroll 1
    for (int step = 0; step < UNIT_KEYS; step += 16) {
      long long at[4];
      bool any = false;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        at[i] = place[step + (i >> 1) * 8 + 2 * q + (i & 1)];
        any = any || at[i] >= 0;
      }
      if (!__any_sync(0xFFFFFFFFu, any)) continue;  // weights are 0 there
      unsigned a[TILES][4];
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* row = score + (m * 16 + g + (i & 1) * 8) * SCORE_STRIDE;
          a[m][i] = reinterpret_cast<const unsigned*>(row)[step / 2 + (i >> 1) * 4 + q];
        }
#pragma unroll
      for (int span = 0; span < SPANS; ++span) {
        const int d = warp * OWN + span * 8 * VECTOR + g * VECTOR;
        unsigned value[4][(VECTOR + 1) / 2];
#pragma unroll
        for (int i = 0; i < 4; ++i)
          load_numbers<VECTOR>(arena + at[i] + value_bytes + d * 2, at[i] >= 0 && d < dim, value[i]);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
          const unsigned selector = j & 1 ? 0x7632u : 0x5410u;  // upper or lower halves of both keys
          const unsigned b[2] = {ptx_prmt(value[0][j / 2], value[1][j / 2], selector),
                                 ptx_prmt(value[2][j / 2], value[3][j / 2], selector)};
#pragma unroll
          for (int m = 0; m < TILES; ++m)
            multiply<TYPE>(*reinterpret_cast<float(*)[4]>(acc + (m * LANE_DIMS + span * VECTOR + j) * 4), a[m], b);
        }
      }
    }
  }
  __device__ __forceinline__ void add_float_values(const unsigned char* arena, int value_bytes, int dim) {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int i = 0; i < FLOAT_DIMS; ++i) acc[row * FLOAT_DIMS + i] *= factor[row];
#pragma unroll 1
    for (int key = 0; key < UNIT_KEYS; ++key) {
      const long long at = place[key];
      if (at < 0) continue;  // weights are 0 there
      float value[FLOAT_DIMS];
#pragma unroll
      for (int i = 0; i < FLOAT_DIMS; ++i) {
        const int own = lane + 32 * i, d = warp * OWN + own;
        value[i] = own < OWN && d < dim ? reinterpret_cast<const float*>(arena + at + value_bytes)[d] : 0.f;
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int i = 0; i < FLOAT_DIMS; ++i) {
          float& x = acc[row * FLOAT_DIMS + i];
          x = __fmaf_rn(score[row * SCORE_STRIDE + key], value[i], x);
        }
    }
  }

  // to(row, dim, weighted sum, largest score, sum of weights), for every row and number this thread holds
  template <class To> __device__ __forceinline__ void finish(To to) {
    if constexpr (IS_FLOAT) {
#pragma unroll
      for (int row = 0; row < ROWS; ++row)
#pragma unroll
        for (int i = 0; i < FLOAT_DIMS; ++i)
          if (lane + 32 * i < OWN)
            to(row, warp * OWN + lane + 32 * i, acc[row * FLOAT_DIMS + i], largest[row], sum[row]);
    } else {
      const int g = lane >> 2, q = lane & 3;
#pragma unroll
      for (int m = 0; m < TILES; ++m)
#pragma unroll
        for (int n = 0; n < LANE_DIMS; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int row = m * 16 + g + (i >> 1) * 8, column = 2 * q + (i & 1);
            const int d = warp * OWN + n / VECTOR * 8 * VECTOR + column * VECTOR + n % VECTOR;
            to(row, d, acc[(m * LANE_DIMS + n) * 4 + i], largest[row], sum[row]);
          }
    }
  }
};
