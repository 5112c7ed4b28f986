// A whole mixture-of-experts layer: tokens sorted by expert, a width of its own for every block.
#pragma once
#include "routing.h"
#include "weights.h"
#include "work.h"

struct Layer {
  const Weights& weights;
  int64_t first_block, experts, hidden, inner;
  int32_t activation;
};

struct LayerCall {
  const Path& path;
  const Layer& l;
  const float* x;
  int64_t tokens, top;
  const float* weight;
  const float* scale;
  float* out;
  int threads;

  std::vector<Block> blocks;
  Routing routing;
  bool uses[2] = {false, false};

  bool plan(const int32_t* index, Fault* fault) {
    routing = Routing(index, tokens * top, l.experts);
    blocks.resize(size_t(2 * l.experts));
    int64_t before = -1;
    for (const Run& r : routing.runs) {
      if (r.expert == before) continue;
      const int64_t e = before = r.expert;
      for (int m = 0; m < 2; ++m)
        if (!find_block(l.weights, l.first_block + 2 * e + m, m ? l.hidden : 2 * l.inner,
                        m ? l.inner : l.hidden, &blocks[size_t(2 * e + m)], fault))
          return false;
      uses[path.order(blocks[size_t(2 * e)].bits)] = true;
    }
    return true;
  }

  void run() {
    const std::vector<Run>& runs = routing.runs;
    const std::vector<int64_t>& slots = routing.slots;
    const int64_t wide = input_stride(l.hidden), narrow = input_stride(l.inner);
    const int64_t held = std::min(kGroupSlots, tokens * top);
    const Buffer<float> inputs[2] = {Buffer<float>(uses[0] ? tokens * wide : 0),
                                     Buffer<float>(uses[1] ? tokens * wide : 0)};
    const Buffer<float> both(held * 2 * l.inner), hidden(held * l.inner), arranged(held * narrow),
        product(held * l.hidden);
    std::vector<ThreadMemory> memory;
    for (int i = 0; i < threads; ++i) memory.emplace_back(std::max(l.hidden, l.inner));
    std::vector<std::vector<const float*>> at(static_cast<size_t>(threads),
                                              std::vector<const float*>(static_cast<size_t>(held)));
    Barrier barrier(threads);
    in_parallel(threads, [&](int part) {
      const Scratch scratch = memory[size_t(part)].scratch();
      const auto mine = [&](int64_t n) {
        return std::pair<int64_t, int64_t>{share(n, part, threads), share(n, part + 1, threads)};
      };
      const auto [token_from, token_to] = mine(tokens);
      const auto [inner_from, inner_to] = mine(l.inner);
      const auto [hidden_from, hidden_to] = mine(l.hidden);
      for (int64_t t = token_from; t < token_to; ++t) {
        std::fill(out + t * l.hidden, out + (t + 1) * l.hidden, 0.0f);
        for (int o = 0; o < 2; ++o)
          if (uses[o]) path.arrange(o, l.hidden, x + t * l.hidden, inputs[o] + t * wide);
      }
      std::vector<const float*>& rows = at[size_t(part)];
      for (size_t from = 0, to; from < runs.size(); from = to) {
        for (to = from + 1; to < runs.size() && !runs[to].starts_group;) ++to;
        const int64_t base = runs[from].begin;
        barrier.wait();
        for (size_t i = from; i < to; ++i) {
          const Run& r = runs[i];
          const Block& b = blocks[size_t(2 * r.expert)];
          float* sums = both + (r.begin - base) * 2 * l.inner;
          const int order = path.order(b.bits);
          for (int64_t s = 0; s < r.count; ++s)
            rows[size_t(s)] = inputs[order] + slots[size_t(r.begin + s)] / top * wide;
          path.rows(b, inner_from, inner_to, rows.data(), r.count, sums, 2 * l.inner, scratch);
          path.rows(b, l.inner + inner_from, l.inner + inner_to, rows.data(), r.count, sums,
                    2 * l.inner, scratch);
          for (int64_t s = 0; s < r.count; ++s) {
            const float* gate = sums + s * 2 * l.inner + inner_from;
            activate(l.activation, inner_to - inner_from, gate, gate + l.inner,
                     hidden + (r.begin - base + s) * l.inner + inner_from);
          }
        }
        barrier.wait();
        for (size_t i = from; i < to; ++i) {
          const Run& r = runs[i];
          const int order = path.order(blocks[size_t(2 * r.expert + 1)].bits);
          for (int64_t s = share(r.count, part, threads); s < share(r.count, part + 1, threads);
               ++s)
            path.arrange(order, l.inner, hidden + (r.begin - base + s) * l.inner,
                         arranged + (r.begin - base + s) * narrow);
        }
        barrier.wait();
        for (size_t i = from; i < to; ++i) {
          const Run& r = runs[i];
          float* sums = product + (r.begin - base) * l.hidden;
          for (int64_t s = 0; s < r.count; ++s)
            rows[size_t(s)] = arranged + (r.begin - base + s) * narrow;
          path.rows(blocks[size_t(2 * r.expert + 1)], hidden_from, hidden_to, rows.data(), r.count,
                    sums, l.hidden, scratch);
          for (int64_t s = 0; s < r.count; ++s) {
            const int64_t slot = slots[size_t(r.begin + s)];
            const float share_of = weight[slot] * (scale ? scale[r.expert] : 1.0f);
            float* to_row = out + slot / top * l.hidden;
            for (int64_t n = hidden_from; n < hidden_to; ++n)
              to_row[n] += share_of * sums[s * l.hidden + n];
          }
        }
      }
    });
  }
};
