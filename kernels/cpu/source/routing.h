// Tokens of a mixture-of-experts layer sorted by expert.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

// A run of tokens of one expert; groups of runs share the buffers between the two matrices.
struct Run {
  int64_t expert, begin, count;
  bool starts_group;
};
constexpr int64_t kGroupSlots = 256;

struct Routing {
  std::vector<int64_t> slots;  // token * top + position, sorted by expert, then by slot
  std::vector<Run> runs;       // experts without tokens have none

  Routing() = default;
  Routing(const int32_t* index, int64_t count, int64_t experts) : slots(size_t(count)) {
    std::vector<int64_t> first(size_t(experts) + 1);
    for (int64_t s = 0; s < count; ++s) ++first[size_t(index[s]) + 1];
    for (int64_t e = 0; e < experts; ++e) first[size_t(e) + 1] += first[size_t(e)];
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t s = 0; s < count; ++s) slots[size_t(next[size_t(index[s])]++)] = s;
    int64_t group = kGroupSlots;
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t s = first[size_t(e)], end = first[size_t(e) + 1]; s < end; s += kGroupSlots) {
        const int64_t here = std::min(kGroupSlots, end - s);
        const bool starts = group + here > kGroupSlots;
        group = starts ? here : group + here;
        runs.push_back({e, s, here, starts});
      }
  }
};
