// Which tokens go to which expert, worked out on the device: a captured graph replays with new routing.
#pragma once
#define ROUTE_THREADS 256

// One block per expert. Slot s = token * top_k + choice. An index outside [0, num_experts) is no expert.
//   expert_offsets [num_experts + 1]: the slots of expert e are sorted_slots[offsets[e] .. offsets[e + 1])
//   sorted_slots   [num_slots]: slots by expert, ascending within each
//   active_experts [num_experts + 1]: how many experts have slots, then those experts, ascending
// Shared memory: num_experts ints. Every block counts for itself, so blocks need not wait for each other.
extern "C" __global__ void __launch_bounds__(ROUTE_THREADS)
route_slots(const int* __restrict__ expert_index, int* __restrict__ expert_offsets, int* __restrict__ sorted_slots,
            int* __restrict__ active_experts, int num_slots, int num_experts) {
  extern __shared__ int counts[];
  __shared__ int before[3];  // slots of lower experts, active lower experts, all active experts
  __shared__ int warp_count[ROUTE_THREADS / 32];
  const int expert = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  for (int e = threadIdx.x; e < num_experts; e += ROUTE_THREADS) counts[e] = 0;
  if (threadIdx.x < 3) before[threadIdx.x] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < num_slots; s += ROUTE_THREADS) {
    const int e = expert_index[s];
    if (e >= 0 && e < num_experts) atomicAdd(&counts[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < num_experts; e += ROUTE_THREADS) {
    if (counts[e] == 0) continue;
    if (e < expert) { atomicAdd(&before[0], counts[e]); atomicAdd(&before[1], 1); }
    atomicAdd(&before[2], 1);
  }
  __syncthreads();
  const int start = before[0], mine = counts[expert];
  if (threadIdx.x == 0) {
    expert_offsets[expert] = start;
    if (expert == num_experts - 1) expert_offsets[num_experts] = start + mine;
    if (expert == 0) active_experts[0] = before[2];
    if (mine) active_experts[1 + before[1]] = expert;
  }
  int place = start;
  for (int base = 0; base < num_slots && mine; base += ROUTE_THREADS) {
    const int s = base + threadIdx.x;
    const bool hit = s < num_slots && expert_index[s] == expert;
    const unsigned hits = __ballot_sync(0xffffffffu, hit);
    if (lane == 0) warp_count[warp] = __popc(hits);
    __syncthreads();
    int at = place;
    for (int w = 0; w < ROUTE_THREADS / 32; ++w) {
      if (w < warp) at += warp_count[w];
      place += warp_count[w];
    }
    if (hit) sorted_slots[at + __popc(hits & ((1u << lane) - 1))] = s;
    __syncthreads();
  }
}
