// One mixture-of-experts layer from bit planes in arena pages, with the row tables in shared memory: the plain
// version for every width 2..8, baseline and fallback. Width and page lists are read from device arrays, grids do not
// depend on data, nothing is summed by atomics: a captured graph replays with new routing and new widths, and equal
// inputs give equal bits.
//
//   route_slots -> moe_gate_up -> moe_down -> combine_slots
//
// Block id of (expert, module): first_block + 2 * expert + module; module 0 gate_up [2 I, H], 1 down [H, I].
// A width outside 2..8 or without its table makes NaN, never a quiet 0.
#include "shared_table_route.cuh"
#include "shared_table_tile.cuh"

#ifndef WIDTHS  // bit q: width q is compiled in
#define WIDTHS 0x1FC
#endif

// What every expert kernel is told: routing, pages, shapes.
#define EXPERT_PARAMETERS                                                                                       \
  const int *__restrict__ expert_offsets, const int *__restrict__ sorted_slots,                                 \
      const int *__restrict__ active_experts, const unsigned char *__restrict__ arena, const int *__restrict__ bits, \
      const int *__restrict__ plane_pages, const int *__restrict__ table_pages, int parent_bits, int min_bits,  \
      int plane_list, int table_list, int page_shift, int first_block

template <int N>
__device__ __forceinline__ void missing(float (&acc)[N][4]) {
#pragma unroll
  for (int i = 0; i < 4 * N; ++i) acc[i / 4][i % 4] = __int_as_float(0x7FFFFFFF);
}

// EPILOGUE(slot, row, tile 0 sum, tile 1 sum): row counts from the first row of tile 0.
template <class Epilogue>
__device__ __forceinline__ void run_tiles(TileWork& w, int module, int expert, const int* offsets, const int* sorted,
                                          int first_block, Epilogue epilogue) {
  extern __shared__ __align__(16) unsigned char tile_shared[];
  __shared__ int slots[TOKEN_GROUP];
  const int block = first_block + 2 * expert + module;
  const int begin = offsets[expert], total = offsets[expert + 1] - begin;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const PageView& v = w.view;
  w.bits = v.bits[block];
  w.slots = slots;
  w.words = (w.columns + 31) / 32;
  w.planes = v.plane_pages + (size_t)block * v.parent_bits * v.plane_list;
  w.table = reinterpret_cast<__half*>(tile_shared);
  w.table_size = 16 << v.parent_bits;
  w.scratch = reinterpret_cast<float*>(w.table + 2 * w.table_size);
  const bool known = w.bits >= max(2, v.min_bits) && w.bits <= min(8, v.parent_bits);
  if (known) {
    const int* pages = v.table_pages + ((size_t)block * (v.parent_bits - v.min_bits + 1) + w.bits - v.min_bits) * v.table_list;
    load_table(v, pages, w.table, w.first_row, w.first_end, w.bits, threadIdx.x, TILE_THREADS);
    load_table(v, pages, w.table + w.table_size, w.second_row, w.second_end, w.bits, threadIdx.x, TILE_THREADS);
  }
  for (int base = 0; base < total; base += TOKEN_GROUP) {
    const int count = min(TOKEN_GROUP, total - base);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += TILE_THREADS) slots[i] = sorted[begin + base + i];
    __syncthreads();
    if (count <= FEW_TOKENS) {
      float acc[2][4] = {};
      switch (known ? w.bits : 0) {
#define FEW_TOKENS_CASE(q) case q: if constexpr (WIDTHS >> q & 1) few_tokens<q>(w, count, acc); else missing(acc); break;
        FEW_TOKENS_CASE(2) FEW_TOKENS_CASE(3) FEW_TOKENS_CASE(4) FEW_TOKENS_CASE(5)
        FEW_TOKENS_CASE(6) FEW_TOKENS_CASE(7) FEW_TOKENS_CASE(8)
        default: missing(acc);
      }
      reduce_few(acc, w.scratch);
      for (int i = threadIdx.x; i < 16 * count; i += TILE_THREADS) {
        const int row = i & 15, token = i >> 4;
        const float* sum = w.scratch + row * FEW_TOKENS + token;
        if (w.first_row + row < w.first_end) epilogue(slots[token], row, sum[0], sum[16 * FEW_TOKENS]);
      }
    } else {
      float acc[2][4][4] = {};
      if (known) many_tokens(w, count, acc);
      else for (auto& tile : acc) missing(tile);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = (lane >> 2) + (i >> 1) * 8, token = 32 * warp + n * 8 + (lane & 3) * 2 + (i & 1);
          if (token < count && w.first_row + row < w.first_end) epilogue(slots[token], row, acc[0][n][i], acc[1][n][i]);
        }
    }
  }
}

// hidden[slot] = act(gate x) * (up x). Grid: (ceil(I / 16), min(experts, slots)).
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)
moe_gate_up(const void* __restrict__ tokens,  // [T, H] of token_type (NumberType)
            float* __restrict__ hidden,       // [slots, I]
            EXPERT_PARAMETERS, int hidden_size, int intermediate, int top_k, int is_gelu, int token_type) {
  if ((int)blockIdx.y >= active_experts[0]) return;
  TileWork w;
  w.view = PageView{arena, bits, plane_pages, table_pages, parent_bits, min_bits, plane_list, table_list, page_shift};
  w.input = tokens;
  w.input_type = token_type;
  w.columns = hidden_size;
  w.input_divisor = top_k;
  const int row0 = blockIdx.x * 16;
  w.first_row = row0;
  w.first_end = intermediate;
  w.second_row = intermediate + row0;
  w.second_end = 2 * intermediate;
  run_tiles(w, 0, active_experts[1 + blockIdx.y], expert_offsets, sorted_slots, first_block,
            [&](int slot, int row, float gate, float up) {
              hidden[(size_t)slot * intermediate + row0 + row] = activate(gate, is_gelu) * up;
            });
}

// slot_output[slot] = gate weight * expert scale * (down hidden[slot]). Grid: (ceil(H / 32), min(experts, slots)).
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 4)
moe_down(const float* __restrict__ hidden,        // [slots, I]
         float* __restrict__ slot_output,         // [slots, H]
         const float* __restrict__ gate_weight,   // [slots]
         const float* __restrict__ expert_scale,  // [experts], or null for 1
         EXPERT_PARAMETERS, int hidden_size, int intermediate) {
  if ((int)blockIdx.y >= active_experts[0]) return;
  const int expert = active_experts[1 + blockIdx.y], row0 = blockIdx.x * 32;
  const float scale = expert_scale ? expert_scale[expert] : 1.f;
  TileWork w;
  w.view = PageView{arena, bits, plane_pages, table_pages, parent_bits, min_bits, plane_list, table_list, page_shift};
  w.input = hidden;
  w.input_type = FLOAT32;
  w.columns = intermediate;
  w.input_divisor = 1;
  w.first_row = row0;
  w.second_row = row0 + 16;
  w.first_end = w.second_end = hidden_size;
  run_tiles(w, 1, expert, expert_offsets, sorted_slots, first_block,
            [&](int slot, int row, float first, float second) {
              const float weight = gate_weight[slot] * scale;
              float* to = slot_output + (size_t)slot * hidden_size + row0 + row;
              to[0] = weight * first;
              if (row0 + row + 16 < hidden_size) to[16] = weight * second;
            });
}

// out[t] = the outputs of the token's slots, summed in the order of its choices. Grid: any.
extern "C" __global__ void __launch_bounds__(256)
combine_slots(const float* __restrict__ slot_output, const int* __restrict__ expert_index, void* __restrict__ out,
              int num_tokens, int hidden_size, int top_k, int num_experts, int out_type) {
  const long long size = (long long)num_tokens * hidden_size, stride = (long long)gridDim.x * blockDim.x;
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += stride) {
    const int token = (int)(i / hidden_size), column = (int)(i - (long long)token * hidden_size);
    float sum = 0.f;
    for (int j = 0; j < top_k; ++j) {
      const int slot = token * top_k + j, expert = expert_index[slot];
      if (expert >= 0 && expert < num_experts) sum += slot_output[(size_t)slot * hidden_size + column];
    }
    write_number(out, i, out_type, sum);
  }
}
