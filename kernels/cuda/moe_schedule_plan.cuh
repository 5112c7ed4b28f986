// moe_schedule_plan.cuh: what one layer's kernels agree on, in one int32 buffer that never moves.
#pragma once

constexpr int kFewTokens = 16;  // an expert with at most this many tokens is "few": decoded in registers
constexpr int kManyFlag = 16, kCodeShift = 5;  // of an entry of `order`: expert << 5 | many << 4 | bits

// Offsets in ints (experts E, capacity of slots S, activation groups G of the hidden vector):
struct Plan {
  int* base;
  int experts, max_slots, groups;
  // [1] experts with tokens
  __device__ int* active() const { return base; }
  // [2] work items of gate_up and of down taken, beyond two a block
  __device__ int* queue(int module) const { return base + 1 + module; }
  // [E + 1] first slot of each expert; slots are ordered by expert, then token, then choice
  __device__ int* first_slot() const { return base + 3; }
  // [2][E] codes of the active experts, most work first
  __device__ int* order(int module) const { return base + experts + 4 + module * experts; }
  // [S] token * top_k + choice of a slot
  __device__ int* source() const { return base + 3 * experts + 4; }
  // [S] slot of token * top_k + choice; -1: no expert
  __device__ int* slot() const { return source() + max_slots; }
  // [E][G] work items of gate_up that have finished a group of h
  __device__ int* group_tickets() const { return slot() + max_slots; }
  // [row groups] work items of down that have finished a group of rows
  __device__ int* row_tickets() const { return group_tickets() + experts * groups; }
};
