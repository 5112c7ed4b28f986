// moe_tile_finish.cuh: from sums to the rows of a slot, and what the last block to come does for all.
#pragma once
#include "moe_tile_few.cuh"

TILE_INLINE float activate(float z, int gelu) {
  if (gelu) return 0.5f * z * (1.0f + tanhf(0.7978845608028654f * (z + 0.044715f * (z * z * z))));
  return z / (1.0f + __expf(-z));
}
TILE_INLINE void store_gate_up(const Layer& l, int slot, int row, float gate, float up) {
  if (row < l.columns_out) l.rows[(size_t)slot * l.groups * kUnitColumns + row] = activate(gate, l.gelu) * up;
}
TILE_INLINE void store_down(const Layer& l, const Work& w, const Plan& plan, int slot, int row, float y) {
  if (row >= l.columns_out) return;
  const float weight = l.gate_weight[plan.source()[slot]];
  l.rows[(size_t)slot * l.columns_out + row] = (l.expert_scale ? weight * l.expert_scale[w.expert] : weight) * y;
}

// Add the parts of each row tile in order and write the rows of this pass.
//   sums [warp][token NB * 4][kTokenStride], gates [token][16]: kept from the pass of a lone gate tile to its up tile
template <int MODULE, int NB>
TILE_INLINE void finish_pass(const Layer& l, const Work& w, const Plan& plan, const float* sums, float* gates, int pass) {
  const Share share = Share::of(l, w.bits);
  const int first = w.group * l.item_tiles + pass * share.slots;
  auto total = [&](int slot, int token, int row) {
    const float* part = sums + ((slot << share.split_log2) * NB * 4 + token) * kTokenStride + row;
    float sum = part[0];
#pragma unroll 1
    for (int i = 1; i < 1 << share.split_log2; ++i) sum += part[i * NB * 4 * kTokenStride];
    return sum;
  };
  const bool pairs = MODULE == GATE_UP && share.slots > 1;
  const int tiles_log2 = 3 - share.split_log2 - (pairs ? 1 : 0), tiles = 1 << tiles_log2;
#pragma unroll 1
  for (int i = threadIdx.x; i < w.tokens * 16 * tiles; i += kThreads) {
    const int row = i & 15, slot = (i >> 4) & (tiles - 1), token = i >> 4 >> tiles_log2;
    const int to = w.first_slot + token;
    if constexpr (MODULE == DOWN) {
      store_down(l, w, plan, to, (first + slot) * 16 + row, total(slot, token, row));
    } else {
      const float gate = pairs || !(first & 1) ? total(pairs ? 2 * slot : 0, token, row) : gates[i];
      if (!pairs && !(first & 1)) {
        gates[i] = gate;  // read by the same thread in the next pass
      } else {
        store_gate_up(l, to, (first / 2 + slot) * 16 + row, gate, total(pairs ? 2 * slot + 1 : 0, token, row));
      }
    }
  }
}

// Whether this block is the last of `expected` to come to a ticket; its threads then see what all have written.
TILE_INLINE bool last_to_come(int* ticket, int expected) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(ticket, 1) == expected - 1;
  __syncthreads();
  if (!last) return false;
  __threadfence();
  return true;
}

// A token's sum over its experts of one column, in order of choice.
TILE_INLINE float combined(const float* rows, const Plan& plan, int top_k, int token, int columns, int column) {
  float sum = 0.0f;
#pragma unroll 4
  for (int choice = 0; choice < top_k; ++choice) {
    const int slot = plan.slot()[token * top_k + choice];
    if (slot >= 0) sum += __ldcg(rows + (size_t)slot * columns + column);
  }
  return sum;
}

// The last item of 256 values of h turns them to int8 terms; the last item of a group of rows adds the slots up.
// items: of one expert.
template <int MODULE> TILE_INLINE void finish_item(const Layer& l, const Work& w, int items) {
  const Plan plan{l.plan, opaque(l.experts), l.max_slots, opaque(l.groups)};  // offsets made here, not kept over the item
  if constexpr (MODULE == GATE_UP) {
    const int per_group = 32 / opaque(l.item_tiles), group = w.group / per_group;
    int* ticket = plan.group_tickets() + w.expert * l.groups + group;
    if (!last_to_come(ticket, min(per_group, items - group * per_group))) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll 1
    for (int slot = w.first_slot + warp; slot < w.first_slot + w.tokens; slot += kWarps) {
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int k = group * kUnitColumns + (j >> 2) * 128 + 4 * lane + (j & 3);
        v[j] = k < l.columns_out ? __ldcg(l.rows + (size_t)slot * l.groups * kUnitColumns + k) : 0.0f;
      }
      const size_t unit = (size_t)slot * l.groups + group;
      store_unit(v, l.next_x + unit * kActivationBytes, l.next_scales + unit);
    }
  } else if (l.combine) {
    if (!last_to_come(plan.row_tickets() + w.group, *plan.active())) return;
    const int columns = l.item_tiles * 16;
#pragma unroll 1
    for (int i = threadIdx.x; i < l.num_tokens * columns; i += kThreads) {
      const int token = i / columns, column = w.group * columns + i % columns;
      if (column < l.columns_out)
        l.out[(size_t)token * l.columns_out + column] = combined(l.rows, plan, l.top_k, token, l.columns_out, column);
    }
  }
}
