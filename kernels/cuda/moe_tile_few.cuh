// moe_tile_few.cuh: up to 16 tokens an expert. Each weight is decoded in registers and meets all tokens there.
#pragma once
#include "moe_tile_stream.cuh"

constexpr int kTableBytes = 32768;  // of all row tiles at work: one copy per lane of 256 entries
constexpr int kTokenStride = 24;    // floats of one token's 16 rows in shared memory, without bank conflicts

// Log2 of the warps that must share a row tile so that the tables fit.
TILE_INLINE int least_split_log2(int bits) { return in_registers(bits) ? 0 : bits - 5; }
static_assert((128 << 5) * kWarps == kTableBytes, "tables of 5 bits for a row tile each warp");

// How the warps of a block share its row tiles: 2^split_log2 warps a row tile, each a run of units.
struct Share {
  int split_log2, slots, slot, first, count;
  TILE_INLINE Share of(const Layer& l, int bits) {
    const int warp = opaque(threadIdx.x) >> 5, units = units_of(l);
    Share s;
    s.split_log2 = max(l.split_log2, least_split_log2(bits));
    s.slots = kWarps >> s.split_log2;
    s.slot = warp >> s.split_log2;
    const int part = s.part();
    s.first = units * part >> s.split_log2;
    s.count = (units * (part + 1) >> s.split_log2) - s.first;
    return s;
  }
  __device__ __forceinline__ int row_tile(const Layer& l, int group, int pass) const {
    return group * l.item_tiles + pass * slots + slot;
  }
  __device__ __forceinline__ int part() const { return ((int)threadIdx.x >> 5) & ((1 << split_log2) - 1); }
};

// One step of a tile for all token blocks: b[block][step of its pair][2].
template <int Q, int NB, int A, class D>
TILE_INLINE void multiply_step(const D& decoder, const unsigned planes[2][Q], const unsigned b[NB][2][2],
                               int acc[NB][table_terms(Q)][4], int blocks) {
  unsigned a[table_terms(Q)][4];
  D::template step<A>(decoder, planes, a);
#pragma unroll
  for (int nb = 0; nb < NB; ++nb)
    if (NB < 4 || nb < blocks)
#pragma unroll
      for (int term = 0; term < table_terms(Q); ++term) ptx_mma_m16n8k32_s8(acc[nb][term], a[term], b[nb][A & 1]);
}
// Two steps, PAIR = 0 or 1; x[block] is this lane's place in the tile's activations.
template <int Q, int NB, int PAIR, class D>
TILE_INLINE void multiply_pair(const D& decoder, const unsigned planes[2][Q], const signed char* const x[NB],
                               int acc[NB][table_terms(Q)][4], int blocks) {
  unsigned b[NB][2][2];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb)
    if (NB < 4 || nb < blocks) load_pair(x[nb] + PAIR * 128, b[nb]);
    else b[nb][0][0] = b[nb][0][1] = b[nb][1][0] = b[nb][1][1] = 0;
  multiply_step<Q, NB, 2 * PAIR>(decoder, planes, b, acc, blocks);
  multiply_step<Q, NB, 2 * PAIR + 1>(decoder, planes, b, acc, blocks);
}

// result[block][row g or g + 8] of token 4 block + t over this warp's share of one row tile, without row scales.
// Not touched past the last row tile. The first units of the share must be under way (Stream::prologue).
template <int MODULE, int Q, int NB, int RING>
TILE_INLINE void few_tokens(const Layer& l, const Work& w, const Plan& plan, Stream& stream, unsigned char* tables, int pass,
                            float result[NB][2]) {
  constexpr int kStages = ring_stages(Q, RING);
  constexpr bool kBothTiles = NB == 1 || (NB == 2 && Q < 7);  // as registers allow
  typedef Decoder<Q, 128> D;
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2, t = lane & 3, units = units_of(l), blocks = (w.tokens + 3) / 4;
  const Share share = Share::of(l, Q);
  const int row_tile = share.row_tile(l, w.group, pass);
  const bool live = row_tile < l.row_tiles;
  D decoder;
  if constexpr (in_registers(Q)) {
    if (!live) return;
    D::load(decoder, row_table(l, w, Q, row_tile * 16 + g), row_table(l, w, Q, row_tile * 16 + g + 8));
  } else {
    D::place(decoder, tables, share.slot, lane);
    if (live)
      D::fill(decoder, tables, row_table(l, w, Q, row_tile * 16 + g), row_table(l, w, Q, row_tile * 16 + g + 8), share.part(),
              1 << share.split_log2);
    __syncthreads();
    if (!live) return;
  }
  int x_unit[NB], scale_unit[NB];  // index of the current unit of this lane's token
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) {
    x_unit[nb] = activation_row<MODULE>(l, w, plan, 4 * nb + (g >> 1)) * units + share.first;
    scale_unit[nb] = activation_row<MODULE>(l, w, plan, 4 * nb + t) * units + share.first;
  }
  const signed char* x = l.x + t * 32 + (g & 1) * 16;
  float sum[NB][2];
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) sum[nb][0] = sum[nb][1] = 0.0f;
  stream.page = ~0u;  // looked up again, rather than kept in a register by all widths
  int stage = 0;
  for (int i = 0; i < share.count; ++i) {
    const int unit = share.first + i;
    const bool half = unit >= l.full_units;
    ptx_cp_async_wait<kStages - 1>();
    __syncwarp();  // page ids of the last copies have been read by all
    unsigned planes[2][2][Q];
    if constexpr (kBothTiles) Stream::read<Q>(stream, stage, planes);
    int acc[NB][table_terms(Q)][4];
#pragma unroll
    for (int j = 0; j < NB * table_terms(Q) * 4; ++j) (&acc[0][0][0])[j] = 0;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      if constexpr (!kBothTiles) Stream::read_tile<Q>(stream, stage, tile, planes[tile]);
      if (tile == (kBothTiles ? 0 : 1)) {  // the ring's place is free: a lane reads what it copied itself
        if (i + kStages < share.count) Stream::issue(stream, l, Constant<Q>(), w.block, row_tile, unit + kStages, stage);
        ptx_cp_async_commit();
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
      if (tile == 1 && half) break;
      const signed char* from[NB];
#pragma unroll
      for (int nb = 0; nb < NB; ++nb) from[nb] = x + (size_t)(x_unit[nb] + i) * kActivationBytes + tile * 256;
      multiply_pair<Q, NB, 0>(decoder, planes[tile], from, acc, blocks);
      multiply_pair<Q, NB, 1>(decoder, planes[tile], from, acc, blocks);
    }
#pragma unroll
    for (int nb = 0; nb < NB; ++nb) {
      const float x_scale = NB < 4 || nb < blocks ? l.x_scales[scale_unit[nb] + i] : 0.0f;
      sum[nb][0] += x_scale * whole<table_terms(Q)>(acc[nb], 0);
      sum[nb][1] += x_scale * whole<table_terms(Q)>(acc[nb], 1);
    }
  }
#pragma unroll
  for (int nb = 0; nb < NB; ++nb) {
    result[nb][0] = sum[nb][0];
    result[nb][1] = sum[nb][1];
  }
}
