// moe_schedule.cu: before a layer, router output to work lists, and token activations to int8 terms.
// Nothing is read back by the host, so a captured graph replays with new routing and new widths.
#include "moe_schedule_activation.cuh"
#include "moe_schedule_plan.cuh"

#define SCHEDULE_THREADS 256
#define SCHEDULE_WARPS (SCHEDULE_THREADS / 32)

// Exclusive prefix sums of count[0..n) into out[0..n], by one warp.
static __device__ void prefix_sums(const int* count, int* out, int n) {
  const int lane = threadIdx.x & 31;
  int carry = 0;
  for (int base = 0; base < n; base += 32) {
    const int own = base + lane < n ? count[base + lane] : 0;
    int sum = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int other = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += other;
    }
    if (base + lane < n) out[base + lane] = carry + sum - own;
    carry += __shfl_sync(0xffffffffu, sum, 31);
  }
  if (lane == 0) out[n] = carry;
}

// Work of one expert and module, for the order of the items: experts with many tokens first, then wide ones.
static __device__ int work_key(int count, int bits) { return count > kFewTokens ? 16 + count : bits; }

// The stable counting sort of the slots: warps hold runs of entries, warp_count is [warps][experts].
static __device__ void sort_slots(const int* expert_index, int entries, const Plan& plan, int* warp_count, int* count) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, experts = plan.experts;
  const int run = (entries + SCHEDULE_THREADS - 1) / SCHEDULE_THREADS * 32;
  const int begin = warp * run, end = min(begin + run, entries);
  int* mine = warp_count + warp * experts;
#pragma unroll 1
  for (int place = 0; place < 2; ++place) {
    for (int base = begin; base < end; base += 32) {
      const int i = base + lane;
      int expert = i < end ? expert_index[i] : -1;
      if (expert < 0 || expert >= experts) expert = -1;
      const unsigned same = __match_any_sync(0xffffffffu, expert);
      const int before = __popc(same & ((1u << lane) - 1));
      const int start = expert >= 0 ? mine[expert] : 0;
      __syncwarp();
      if (expert >= 0 && before == 0) mine[expert] = start + __popc(same);
      __syncwarp();
      if (place && i < end) {
        plan.slot()[i] = expert >= 0 ? start + before : -1;
        if (expert >= 0) plan.source()[start + before] = i;
      }
    }
    __syncthreads();
    if (place) break;
    for (int e = threadIdx.x; e < experts; e += SCHEDULE_THREADS) {
      int sum = 0;
#pragma unroll 1
      for (int w = 0; w < SCHEDULE_WARPS; ++w) sum += warp_count[w * experts + e];
      count[e] = sum;
    }
    __syncthreads();
    if (warp == 0) prefix_sums(count, plan.first_slot(), experts);
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += SCHEDULE_THREADS) {
      int next = plan.first_slot()[e];
#pragma unroll 1
      for (int w = 0; w < SCHEDULE_WARPS; ++w) {
        const int own = warp_count[w * experts + e];
        warp_count[w * experts + e] = next;
        next += own;
      }
    }
    __syncthreads();
  }
}

// Block 0: the plan of a layer. Blocks 1..: `tokens` to int8 terms, and `out` to 0.
//   expert_index [T, top_k] int32: an index outside [0, E) is no expert (padding)
//   bits         [blocks] int32: widths of this layer begin at first_block (gate_up, down of expert 0, 1, ...)
//   plan         as in moe_schedule_plan.cuh; num_tickets = E * groups + row groups
//   tokens       [T, columns], kind 0 float32, 1 bfloat16, 2 float16
//   x            [T, units, 512] int8; x_scales [T, units] float32
//   out          [T, columns] float32
// Dynamic shared memory: (warps + 1) * E ints.
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS)
moe_schedule(const int* __restrict__ expert_index, const int* __restrict__ bits, int* __restrict__ plan_base,
             const void* __restrict__ tokens, signed char* __restrict__ x, float* __restrict__ x_scales,
             float* __restrict__ out, int first_block, int experts, int top_k, int max_slots, int groups,
             int num_tickets, int num_tokens, int columns, int units, int kind) {
  extern __shared__ int shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  if (blockIdx.x > 0) {
    const int warps = (gridDim.x - 1) * SCHEDULE_WARPS;
    for (int i = (blockIdx.x - 1) * SCHEDULE_WARPS + warp; i < num_tokens * units; i += warps) {
      const int token = i / units, unit = i % units;
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const int k = unit * kUnitColumns + (j >> 2) * 128 + 4 * lane + (j & 3);
        const size_t at = (size_t)token * columns + k;
        v[j] = k < columns ? read_element(tokens, at, kind) : 0.0f;
        if (k < columns) out[at] = 0.0f;
      }
      store_unit(v, x + (size_t)i * kActivationBytes, x_scales + i);
    }
    return;
  }
  const Plan plan{plan_base, experts, max_slots, groups};
  int* count = shared + SCHEDULE_WARPS * experts;
  for (int i = threadIdx.x; i < SCHEDULE_WARPS * experts; i += SCHEDULE_THREADS) shared[i] = 0;
  for (int i = threadIdx.x; i < num_tickets; i += SCHEDULE_THREADS) plan.group_tickets()[i] = 0;
  if (threadIdx.x < 2) *plan.queue(threadIdx.x) = 0;
  __syncthreads();
  sort_slots(expert_index, num_tokens * top_k, plan, shared, count);
  int* key = shared;  // the counts of the warps are used up: keys of both modules
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * experts; i += SCHEDULE_THREADS) {
    const int module = i / experts, e = i % experts;
    key[i] = count[e] ? work_key(count[e], bits[first_block + 2 * e + module]) : 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 2 * experts; i += SCHEDULE_THREADS) {
    const int module = i / experts, e = i % experts;
    if (!key[i]) continue;
    int rank = 0;
    for (int other = 0; other < experts; ++other) {
      const int k = key[module * experts + other];
      rank += k > key[i] || (k == key[i] && other < e);
    }
    const int many = count[e] > kFewTokens ? kManyFlag : 0;
    plan.order(module)[rank] = e << kCodeShift | many | bits[first_block + 2 * e + module];
  }
  if (warp == 0) {
    int active = 0;
    for (int base = 0; base < experts; base += 32) {
      const int e = base + lane;
      active += __popc(__ballot_sync(0xffffffffu, e < experts && count[e] > 0));
    }
    if (lane == 0) *plan.active() = active;
  }
}
