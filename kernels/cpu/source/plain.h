// A mixture-of-experts layer whose experts are float32 or bfloat16 matrices.
#pragma once
#include "linear.h"
#include "routing.h"

struct PlainLayer {
  const Matrix* matrices;  // 2 an expert: gate_up [2 inner, hidden], down [hidden, inner]
  int64_t experts, hidden, inner;
  int32_t activation;
};

struct PlainCall {
  const LinearPath& path;
  const PlainLayer& l;
  const float* x;
  int64_t tokens, top;
  const float* weight;
  const float* scale;
  float* out;
  int threads;
  Routing routing;

  void run() {
    const std::vector<Run>& runs = routing.runs;
    const int64_t held = std::min(kGroupSlots, tokens * top);
    const Buffer<float> packed(held * std::max(l.hidden, l.inner)), both(held * 2 * l.inner),
        product(held * l.hidden);
    std::vector<LinearMemory> memory;
    std::vector<Buffer<float>> hidden;  // one tile of activated rows a thread
    for (int i = 0; i < threads; ++i) {
      memory.emplace_back(held);
      hidden.emplace_back(path.most * l.inner);
    }
    std::vector<std::vector<const float*>> rows(
        static_cast<size_t>(threads), std::vector<const float*>(static_cast<size_t>(held)));
    std::vector<std::vector<const float*>> active(
        static_cast<size_t>(threads), std::vector<const float*>(static_cast<size_t>(path.most)));
    for (int i = 0; i < threads; ++i)
      for (int64_t t = 0; t < path.most; ++t)
        active[size_t(i)][size_t(t)] = hidden[size_t(i)] + t * l.inner;
    Barrier barrier(threads);
    in_parallel(threads, [&](int part) {
      const auto from = [&](int64_t n) { return share(n, part, threads); };
      const auto to = [&](int64_t n) { return share(n, part + 1, threads); };
      const int64_t both_panels = panels(2 * l.inner), out_panels = panels(l.hidden);
      const int64_t out_from = from(out_panels) * kPanel,
                    out_to = std::min(to(out_panels) * kPanel, l.hidden);
      for (int64_t t = 0; t < tokens; ++t)
        std::fill(out + t * l.hidden + out_from, out + t * l.hidden + std::max(out_from, out_to),
                  0.0f);
      for (size_t first = 0, end; first < runs.size(); first = end) {
        for (end = first + 1; end < runs.size() && !runs[end].starts_group;) ++end;
        const int64_t base = runs[first].begin;
        const auto each = [&](auto&& work) {
          barrier.wait();
          for (size_t i = first; i < end; ++i) work(runs[i], runs[i].begin - base);
        };
        each([&](const Run& r, int64_t at) {
          std::vector<const float*>& mine = rows[size_t(part)];
          for (int64_t s = 0; s < r.count; ++s)
            mine[size_t(s)] = x + routing.slots[size_t(r.begin + s)] / top * l.hidden;
          const int64_t tiles = tiles_of(path, r.count);
          pack_tiles(path, r.count, from(tiles), to(tiles), l.hidden, mine.data(),
                     packed + at * l.hidden);
        });
        each([&](const Run& r, int64_t at) {
          multiply_panels(path, l.matrices[2 * r.expert], nullptr, from(both_panels),
                          to(both_panels), packed + at * l.hidden, r.count,
                          both + at * 2 * l.inner, 2 * l.inner, memory[size_t(part)]);
        });
        each([&](const Run& r, int64_t at) {
          const int64_t tiles = tiles_of(path, r.count);
          for (int64_t i = from(tiles); i < to(tiles); ++i) {
            const int64_t t = share(r.count, int(i), int(tiles));
            const int64_t here = share(r.count, int(i) + 1, int(tiles)) - t;
            for (int64_t s = 0; s < here; ++s) {
              const float* gate = both + (at + t + s) * 2 * l.inner;
              path.activate(l.activation, l.inner, gate, gate + l.inner,
                            hidden[size_t(part)] + s * l.inner);
            }
            interleave(active[size_t(part)].data(), here, l.inner, packed + (at + t) * l.inner,
                       here);
          }
        });
        each([&](const Run& r, int64_t at) {
          float* sums = product + at * l.hidden;
          multiply_panels(path, l.matrices[2 * r.expert + 1], nullptr, from(out_panels),
                          to(out_panels), packed + at * l.inner, r.count, sums, l.hidden,
                          memory[size_t(part)]);
          for (int64_t s = 0; s < r.count; ++s) {
            const int64_t slot = routing.slots[size_t(r.begin + s)];
            const float share_of = weight[slot] * (scale ? scale[r.expert] : 1.0f);
            float* to_row = out + slot / top * l.hidden;
            for (int64_t n = out_from; n < out_to; ++n)
              to_row[n] += share_of * sums[s * l.hidden + n];
          }
        });
      }
    });
  }
};
