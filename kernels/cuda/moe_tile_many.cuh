// moe_tile_many.cuh: any number of tokens an expert. The block decodes one unit of 8 row tiles into shared memory,
// once, and all tokens meet it there, 64 at a time.
#pragma once
#include "moe_tile_finish.cuh"

constexpr int kManyTiles = 8;                            // row tiles of an item: one a warp
constexpr int kManyBlocks = 2;                           // token blocks of four a warp holds at a time
constexpr int kManyTokens = kWarps * kManyBlocks * 4;    // of a round
constexpr int kManyTableBytes = kManyTiles * 32 * 256;   // with one copy per row pair
constexpr int kManyFragmentBytes = kManyTiles * 8 * 512 * 2;

// Tokens of this warp in one round.
struct Round {
  int first, tokens;  // of the warp; of the expert
  TILE_INLINE Round of(const Work& w, int round) { return Round{round * kManyTokens + ((int)threadIdx.x >> 5) * kManyBlocks * 4, w.tokens}; }
  __device__ __forceinline__ bool busy() const { return first < tokens; }
  __device__ __forceinline__ int token(int nb, int column) const { return first + 4 * nb + column; }
};

// One unit of this warp's row tile, decoded into fragments [row tile][step][term][lane].
// Tables in shared memory are filled with the first unit; those in registers are made anew with every unit.
template <int Q, int RING>
TILE_INLINE void decode_unit(const Layer& l, const Work& w, Stream& stream, unsigned char* tables, int row_tile, int unit, uint4* fragments) {
  constexpr int kTerms = table_terms(Q), kStages = ring_stages(Q, RING);
  typedef Decoder<Q, 32> D;
  const int lane = opaque(threadIdx.x) & 31, warp = threadIdx.x >> 5, g = lane >> 2, stage = unit % kStages;
  D decoder;
  if constexpr (in_registers(Q)) {
    D::load(decoder, row_table(l, w, Q, row_tile * 16 + g), row_table(l, w, Q, row_tile * 16 + g + 8));
  } else {
    D::place(decoder, tables, warp, lane);
    if (unit == 0)
      D::fill(decoder, tables, row_table(l, w, Q, row_tile * 16 + g), row_table(l, w, Q, row_tile * 16 + g + 8), 0, 1);
  }
  ptx_cp_async_wait<kStages - 1>();
  __syncwarp();  // tables are filled; page ids of the last copies have been read by all
  unsigned planes[2][2][Q];
  Stream::read<Q>(stream, stage, planes);
  if (unit + kStages < units_of(l)) Stream::issue(stream, l, Constant<Q>(), w.block, row_tile, unit + kStages, stage);
  ptx_cp_async_commit();
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    if (tile == 1 && unit >= l.full_units) break;
    unsigned a[4][kTerms][4];
    D::template step<0>(decoder, planes[tile], a[0]);
    D::template step<1>(decoder, planes[tile], a[1]);
    D::template step<2>(decoder, planes[tile], a[2]);
    D::template step<3>(decoder, planes[tile], a[3]);
#pragma unroll
    for (int s = 0; s < 4; ++s)
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
        fragments[((warp * 8 + 4 * tile + s) * kTerms + term) * 32 + lane] =
            make_uint4(a[s][term][0], a[s][term][1], a[s][term][2], a[s][term][3]);
  }
}

// The decoded unit times this warp's tokens of one round, added to sum[row tile][block][row g or g + 8].
template <int MODULE, int TERMS>
TILE_INLINE void multiply_unit(const Layer& l, const Work& w, const Plan& plan, const Round& round, const uint4* fragments,
                               int unit, bool half, float sum[kManyTiles][kManyBlocks][2]) {
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2, t = lane & 3, units = units_of(l);
  unsigned b[kManyBlocks][8][2];
  float x_scale[kManyBlocks];
#pragma unroll
  for (int nb = 0; nb < kManyBlocks; ++nb) {
    const int row = activation_row<MODULE>(l, w, plan, round.token(nb, g >> 1));
    x_scale[nb] = l.x_scales[(size_t)activation_row<MODULE>(l, w, plan, round.token(nb, t)) * units + unit];
    const signed char* x = l.x + ((size_t)row * units + unit) * kActivationBytes + t * 32 + (g & 1) * 16;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) load_pair(x + pair * 128, b[nb] + 2 * pair);
  }
#pragma unroll
  for (int r = 0; r < kManyTiles; ++r) {
    if (w.group * kManyTiles + r >= l.row_tiles) break;
    int acc[kManyBlocks][TERMS][4];
#pragma unroll
    for (int j = 0; j < kManyBlocks * TERMS * 4; ++j) (&acc[0][0][0])[j] = 0;
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step == 4 && half) break;
#pragma unroll
      for (int term = 0; term < TERMS; ++term) {
        const uint4 v = fragments[((r * 8 + step) * TERMS + term) * 32 + lane];
        const unsigned a[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int nb = 0; nb < kManyBlocks; ++nb) ptx_mma_m16n8k32_s8(acc[nb][term], a, b[nb][step]);
      }
    }
#pragma unroll
    for (int nb = 0; nb < kManyBlocks; ++nb) {
      sum[r][nb][0] += x_scale[nb] * whole<TERMS>(acc[nb], 0);
      sum[r][nb][1] += x_scale[nb] * whole<TERMS>(acc[nb], 1);
    }
  }
}

// Sums of one round wait in l.partial [slot][16 row_tiles] where there is more than one round.
template <bool STORE>
TILE_INLINE void swap_partial(const Layer& l, const Work& w, const Round& round, float sum[kManyTiles][kManyBlocks][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int nb = 0; nb < kManyBlocks; ++nb) {
    const int token = round.token(nb, t);
    if (token >= w.tokens) continue;
    float* row = l.partial + ((size_t)(w.first_slot + token) * l.row_tiles + w.group * kManyTiles) * 16 + g;
#pragma unroll
    for (int r = 0; r < kManyTiles; ++r) {
      if (w.group * kManyTiles + r >= l.row_tiles) break;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (STORE) row[r * 16 + 8 * half] = sum[r][nb][half];
        else sum[r][nb][half] = row[r * 16 + 8 * half];
      }
    }
  }
}

template <int MODULE>
TILE_INLINE void finish_round(const Layer& l, const Work& w, const Plan& plan, const Round& round,
                              float sum[kManyTiles][kManyBlocks][2]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int r = 0; r < kManyTiles; ++r) {
    const int tile = w.group * kManyTiles + r;
    if (tile >= l.row_tiles) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = g + 8 * half;
      const float scale = row_scale(l, w, tile * 16 + row);
#pragma unroll
      for (int nb = 0; nb < kManyBlocks; ++nb) {
        const int token = round.token(nb, t), slot = w.first_slot + token;
        const float y = scale * sum[r][nb][half];
        if constexpr (MODULE == GATE_UP) {
          if (!(r & 1)) sum[r][nb][half] = y;
          else if (token < w.tokens) store_gate_up(l, slot, tile / 2 * 16 + row, sum[r - 1][nb][half], y);
        } else {
          if (token < w.tokens) store_down(l, w, plan, slot, tile * 16 + row, y);
        }
      }
    }
  }
}

template <int MODULE, int RING>
TILE_INLINE void many_tokens(const Layer& l, const Work& w, const Plan& plan, Stream& stream, unsigned char* tables) {
  const int units = units_of(l), rounds = (w.tokens + kManyTokens - 1) / kManyTokens;
  const int row_tile = w.group * kManyTiles + ((int)threadIdx.x >> 5);
  uint4* fragments = (uint4*)(tables + kManyTableBytes);
  float sum[kManyTiles][kManyBlocks][2];
  auto clear = [&] {
#pragma unroll
    for (int i = 0; i < kManyTiles * kManyBlocks * 2; ++i) (&sum[0][0][0])[i] = 0.0f;
  };
  clear();
#pragma unroll 1
  for (int unit = 0; unit < units; ++unit) {
    const bool half = unit >= l.full_units;
    if (row_tile < l.row_tiles) {
#define DECODE_UNIT(Q) if constexpr ((WIDTHS >> Q) & 1) decode_unit<Q, RING>(l, w, stream, tables, row_tile, unit, fragments)
      EACH_WIDTH(w.bits, DECODE_UNIT)
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
      const Round round = Round::of(w, i);
      if (!round.busy()) break;
      if (rounds > 1) {
        if (unit > 0) swap_partial<false>(l, w, round, sum);
        else clear();
      }
      if (table_terms(w.bits) == 2) multiply_unit<MODULE, 2>(l, w, plan, round, fragments, unit, half, sum);
      else multiply_unit<MODULE, 1>(l, w, plan, round, fragments, unit, half, sum);
      if (rounds > 1) swap_partial<true>(l, w, round, sum);
    }
    __syncthreads();
  }
#pragma unroll 1
  for (int i = 0; i < rounds; ++i) {
    const Round round = Round::of(w, i);
    if (!round.busy()) break;
    if (rounds > 1) swap_partial<false>(l, w, round, sum);
    finish_round<MODULE>(l, w, plan, round, sum);
  }
}
