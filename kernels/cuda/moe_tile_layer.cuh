// moe_tile_layer.cuh: the arguments of a launch, one work item, and where its streams lie.
#pragma once
#include "decode.cuh"
#include "moe_schedule_activation.cuh"
#include "moe_schedule_plan.cuh"

#define GATE_UP 0
#define DOWN 1
#ifndef WIDTHS  // bit q: build for q bits
#define WIDTHS 0x1fc
#endif
#define TILE_INLINE static __device__ __forceinline__

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;

// CALL(q) for the width `bits`, the same for the whole block.
#define EACH_WIDTH(bits, CALL)                \
  switch (bits) {                             \
    case 2: CALL(2); break;                   \
    case 3: CALL(3); break;                   \
    case 4: CALL(4); break;                   \
    case 5: CALL(5); break;                   \
    case 6: CALL(6); break;                   \
    case 7: CALL(7); break;                   \
    case 8: CALL(8); break;                   \
    default: __trap();                        \
  }

struct Layer {
  const unsigned char* arena;
  const int *bits, *plane_pages, *table_pages;
  const signed char* x;
  const float *x_scales, *gate_weight, *expert_scale;
  int* plan;
  float* rows;
  signed char* next_x;
  float *next_scales, *out, *partial;
  int first_block, planes, plane_list, tables, table_list, min_bits, page_shift;
  int experts, max_slots, groups, row_tiles, full_units, half_unit, item_tiles, split_log2;
  int top_k, num_tokens, columns_out, gelu, combine;
};

struct Work {  // one item, the same for the whole block
  int expert, block, bits, first_slot, tokens, group;
};

TILE_INLINE int units_of(const Layer& l) { return l.full_units + l.half_unit; }

// Place `byte` of a stream whose page ids begin at list[first].
TILE_INLINE const unsigned char* stream_at(const Layer& l, const int* list, unsigned first, unsigned byte) {
  const unsigned page = (unsigned)__ldg(list + (first + (byte >> l.page_shift)));
  return l.arena + (byte & ((1u << l.page_shift) - 1)) + (size_t)page * (1u << l.page_shift);
}
TILE_INLINE unsigned table_first(const Layer& l, int block, int bits) {
  return ((unsigned)block * l.tables + bits - l.min_bits) * l.table_list;
}
TILE_INLINE const unsigned char* row_table(const Layer& l, const Work& w, int bits, int row) {
  return stream_at(l, l.table_pages, table_first(l, w.block, bits), (unsigned)row * row_table_bytes(bits));
}
TILE_INLINE float row_scale(const Layer& l, const Work& w, int row) {
  const unsigned scales = (unsigned)l.row_tiles * 16 * row_table_bytes(w.bits);
  return *(const float*)stream_at(l, l.table_pages, table_first(l, w.block, w.bits), scales + 4 * row);
}

// Row of the activations of a token of the expert: the token's own for gate_up, the slot's for down.
template <int MODULE> TILE_INLINE int activation_row(const Layer& l, const Work& w, const Plan& plan, int token) {
  const int slot = w.first_slot + min(token, w.tokens - 1);
  return MODULE == GATE_UP ? plan.source()[slot] / l.top_k : slot;
}

// The decoder of a width: tables in registers, or in shared memory with STRIDE bytes from code to code.
template <int Q, int STRIDE, bool REGISTERS> struct DecoderOf { typedef SharedDecoder<Q, STRIDE> type; };
template <int Q, int STRIDE> struct DecoderOf<Q, STRIDE, true> { typedef RegisterDecoder<Q> type; };
template <int Q, int STRIDE> using Decoder = typename DecoderOf<Q, STRIDE, in_registers(Q)>::type;

// acc columns 2t, 2t + 1 are the high and low terms of token t; half 0 is row g, 1 is row g + 8
template <int TERMS> TILE_INLINE float whole(const int acc[TERMS][4], int half) {
  const float high = (float)(128 * acc[0][2 * half] + acc[0][2 * half + 1]);  // < 2^30 over 256 columns
  if constexpr (TERMS == 1) return high;
  else return 128.0f * high + (float)(128 * acc[1][2 * half] + acc[1][2 * half + 1]);
}

// Two steps of B fragments a load.
TILE_INLINE void load_pair(const signed char* x, unsigned b[2][2]) {
  const uint4 v = *(const uint4*)x;
  b[0][0] = v.x;
  b[0][1] = v.y;
  b[1][0] = v.z;
  b[1][1] = v.w;
}
