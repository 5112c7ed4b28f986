// moe_tile.cu: the experts of one layer on integer tensor cores, a different width for every block.
//
//   moe_tile<GATE_UP, ...>   rows = act(gate x) * (up x) of every slot, then their int8 terms
//   moe_tile<DOWN, ...>      rows = gate weight * down h of every slot, then each token's sum in order of choice
//
// Persistent blocks take work items (expert, group of row tiles), most work first; an item's expert names the width,
// the width picks the decoder, uniformly over the block. The first planes of the next item are on their way before the
// current one ends. Sums are whole numbers within 256 columns and float32 beyond, in an order that no race decides:
// the same input gives the same bits.
#if defined(CUEMU)
#pragma GCC optimize("O0")  // emulated shapes are small: compiling takes longer than running
#endif
#include "moe_tile_many.cuh"

// Ring of one warp: where one block has an SM for itself, decoded tiles need the room.
__host__ __device__ constexpr int ring_bytes(bool many) { return many ? 4096 : 8192; }

// Blocks that share an SM: with more than 8 tokens the registers of one are more than half of it.
__host__ __device__ constexpr int blocks_per_sm(int token_blocks, bool many) { return many || token_blocks > 2 ? 1 : 2; }

// What the whole block knows of its present item and of the next; in shared memory, for registers are dear.
struct Turn {
  unsigned ids[kWarps][8];  // page ids of a warp's planes, read 16 bytes at a time
  Work work;
  int next;                 // index of the next item
  int groups, items;        // items of one expert, of all
  int next_code[kWarps];    // of `order`, 0: there is no next item; a copy for each warp
  int pass[kWarps];         // of the present item, that each warp is at
};
constexpr int kTurnBytes = 512;  // keeps what follows aligned
static_assert(sizeof(Turn) <= kTurnBytes, "room of a turn");

TILE_INLINE void take(Turn& turn, const Layer& l, const Plan& plan, int module, int code, int item, int next) {
  const int expert = code >> kCodeShift, first_slot = plan.first_slot()[expert];
  const int tokens = plan.first_slot()[expert + 1] - first_slot;
  turn.work = Work{expert, l.first_block + 2 * expert + module, code & 15, first_slot, tokens, item % turn.groups};
  turn.next = next;
}

template <int MODULE, int NB, bool MANY> TILE_INLINE void all_items(const Layer& l, unsigned char* base) {
  constexpr int kRing = ring_bytes(MANY);
  Turn& turn = *(Turn*)base;
  unsigned char* shared = base + kTurnBytes;
  const Work& w = turn.work;
  const int warp = threadIdx.x >> 5;
  const Plan plan{l.plan, l.experts, l.max_slots, l.groups};
  unsigned char* tables = shared + kWarps * kRing;
  float* sums = (float*)(tables + kTableBytes);
  float* gates = sums + kWarps * NB * 4 * kTokenStride;
  Stream stream;
  stream.ring = shared + warp * kRing;
  stream.ids = turn.ids[warp];
  // Start the copies of this warp's first row tile of a pass.
  auto start = [&](int block, int bits, bool many, int group, int pass) {
    const Share share = Share::of(l, bits);
    const int row_tile = many ? group * kManyTiles + warp : share.row_tile(l, group, pass);
    const int count = row_tile < l.row_tiles ? (many ? units_of(l) : share.count) : 0;
    Stream::prologue(stream, l, bits, block, row_tile, many ? 0 : share.first, count, ring_stages(bits, kRing));
  };
  auto start_item = [&](int code, int item) {
    start(l.first_block + 2 * (code >> kCodeShift) + MODULE, code & 15, MANY && (code & kManyFlag), item % turn.groups, 0);
  };
  // The next item's code was asked for when this one began; its planes set out before this one's sums are added up.
  auto start_next = [&] {
    ptx_cp_async_wait_all();
    __syncwarp();
    if (turn.next_code[warp]) start_item(turn.next_code[warp], turn.next);
  };
  const int groups = (l.row_tiles + l.item_tiles - 1) / l.item_tiles, items = *plan.active() * groups;
  if ((int)blockIdx.x >= items) return;
  if ((threadIdx.x & 31) == 0) turn.pass[warp] = 0;
  if (threadIdx.x == 0) {
    turn.groups = groups;
    turn.items = items;
    take(turn, l, plan, MODULE, plan.order(MODULE)[blockIdx.x / groups], blockIdx.x, blockIdx.x + gridDim.x);
  }
  __syncthreads();
  start(w.block, w.bits, MANY && w.tokens > kFewTokens, w.group, 0);
  for (;;) {
    __syncthreads();
    if ((threadIdx.x & 31) == 0) {
      const bool more = turn.next < turn.items;
      ptx_cp_async4(turn.next_code + warp, plan.order(MODULE) + (more ? turn.next / turn.groups : 0), more);
    }
    if (MANY && w.tokens > kFewTokens) {
      if constexpr (MANY) {
        many_tokens<MODULE, kRing>(l, w, plan, stream, tables);
        start_next();
      }
    } else {
#pragma unroll 1
      for (bool last = false; !last;) {
        float sum[NB][2];
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) sum[nb][0] = sum[nb][1] = 0.0f;
#define FEW_TOKENS(Q) if constexpr ((WIDTHS >> Q) & 1) few_tokens<MODULE, Q, NB, kRing>(l, w, plan, stream, tables, turn.pass[warp], sum)
        EACH_WIDTH(w.bits, FEW_TOKENS)
        const int lane = opaque(threadIdx.x) & 31, pass = turn.pass[warp];
        const Share share = Share::of(l, w.bits);
        const int row_tile = share.row_tile(l, w.group, pass);
        float scale[2] = {0.0f, 0.0f};
        if (row_tile < l.row_tiles) {
          scale[0] = row_scale(l, w, row_tile * 16 + (lane >> 2));
          scale[1] = row_scale(l, w, row_tile * 16 + (lane >> 2) + 8);
        }
#pragma unroll
        for (int nb = 0; nb < NB; ++nb) {
          float* to = sums + (warp * NB * 4 + 4 * nb + (lane & 3)) * kTokenStride + (lane >> 2);
          to[0] = scale[0] * sum[nb][0];
          to[8] = scale[1] * sum[nb][1];
        }
        last = (pass + 1) * share.slots >= l.item_tiles;
        if (!last) start(w.block, w.bits, false, w.group, pass + 1);
        else start_next();
        __syncthreads();
        finish_pass<MODULE, NB>(l, w, plan, sums, gates, pass);
        if (lane == 0) turn.pass[warp] = last ? 0 : pass + 1;
        __syncthreads();
      }
    }
    const int taken = threadIdx.x == 0 ? atomicAdd(plan.queue(MODULE), 1) : 0;
    finish_item<MODULE>(l, w, turn.groups);
    __syncthreads();
    const int code = turn.next_code[0];
    if (!code) return;
    if (threadIdx.x == 0) take(turn, l, plan, MODULE, code, turn.next, taken + 2 * gridDim.x);
  }
}

// One module of one layer. Shapes (E experts, S slots, G = ceil(I / 256), U = units of this module's columns):
//   arena, bits, plane_pages [blocks, planes, plane_list], table_pages [blocks, tables, table_list]: as runtime/page_tables.py
//       has them, with the streams of tile_layout.py and decode_tables.py
//   x [rows, U, 512] int8, x_scales [rows, U]: rows are tokens (gate_up) or slots (down)
//   gate_weight [T, top_k], expert_scale [E] or null, plan: moe_schedule_plan.cuh, after moe_schedule
//   rows [S, 256 G] (gate_up) or [S, columns_out] (down), float32; next_x [S, G, 512], next_scales [S, G] (gate_up)
//   out [T, columns_out] (down, combine = 1); partial [S, 16 row_tiles] (more than 64 tokens an expert, else null)
// NB: token blocks of four that one expert may have; MANY: experts may have more than 16 tokens.
template <int MODULE, int NB, bool MANY>
__global__ void __launch_bounds__(kThreads, blocks_per_sm(NB, MANY))
moe_tile(const unsigned char* __restrict__ arena, const int* __restrict__ bits, const int* __restrict__ plane_pages,
         const int* __restrict__ table_pages, const signed char* __restrict__ x, const float* __restrict__ x_scales,
         const float* __restrict__ gate_weight, const float* __restrict__ expert_scale, int* plan, float* rows,
         signed char* next_x, float* next_scales, float* out, float* partial, int first_block, int planes,
         int plane_list, int tables, int table_list, int min_bits, int page_shift, int experts, int max_slots,
         int groups, int row_tiles, int full_units, int half_unit, int item_tiles, int split_log2, int top_k,
         int num_tokens, int columns_out, int gelu, int combine) {
  extern __shared__ __align__(16) unsigned char shared[];
  const Layer l{arena, bits, plane_pages, table_pages, x, x_scales, gate_weight, expert_scale, plan, rows, next_x,
                next_scales, out, partial, first_block, planes, plane_list, tables, table_list, min_bits, page_shift,
                experts, max_slots, groups, row_tiles, full_units, half_unit, item_tiles, split_log2, top_k, num_tokens,
                columns_out, gelu, combine};
  all_items<MODULE, NB, MANY>(l, shared);
}

// Each token's sum over its experts, where moe_tile<DOWN, ...> was told not to combine. Any grid.
extern "C" __global__ void __launch_bounds__(kThreads)
moe_tile_combine(const float* __restrict__ rows, int* plan_base, float* __restrict__ out, int experts, int max_slots,
                 int groups, int top_k, int num_tokens, int columns) {
  const Plan plan{plan_base, experts, max_slots, groups};
  const size_t total = (size_t)num_tokens * columns;
  for (size_t i = (size_t)blockIdx.x * kThreads + threadIdx.x; i < total; i += (size_t)gridDim.x * kThreads)
    out[i] = combined(rows, plan, top_k, (int)(i / columns), columns, (int)(i % columns));
}
