// A whole mixture-of-experts layer: tokens sorted by expert, a width of its own for every block.
#pragma once
#include <algorithm>

#include "work.h"

struct Fault {
  int32_t kind;   // 0 none, 1 width, 2 page id, 3 memory
  int32_t plane;  // -1: the table
  int64_t block, index, found;
};
enum FaultKind : int32_t { kNone = 0, kWidth = 1, kPage = 2, kMemory = 3 };

struct Layer {
  int64_t experts, hidden, inner;
  int32_t activation, page_shift, min_bits, parent_bits;
  const int32_t* bits;  // [2E], block 2e + module
  const uint8_t* arena;
  int64_t num_pages;
  const int32_t* plane_pages;  // [2E, parent_bits, plane_list]
  int64_t plane_list;
  const int32_t* table_pages;  // [2E, parent_bits - min_bits + 1, table_list]
  int64_t table_list;
  const uint8_t* const* planes;  // [2E], contiguous form
  const uint8_t* const* tables;  // [2E], contiguous form, of the committed width
};

// Every page a block's rows will touch must lie in the arena.
inline bool check_pages(const Block& b, int64_t num_pages, int64_t table_list, Fault* fault) {
  if (b.page_shift < 0) return true;
  const auto used = [&](int64_t bytes) { return ((bytes - 1) >> b.page_shift) + 1; };
  for (int p = -1; p < b.bits; ++p) {
    const int32_t* pages = p < 0 ? b.table_pages : b.plane_pages + p * b.plane_list;
    const int64_t n = used(p < 0 ? b.rows << (b.bits + 1) : b.rows * b.row_bytes);
    const int64_t listed = p < 0 ? table_list : b.plane_list;
    for (int64_t i = 0; i < n; ++i)
      if (i >= listed || pages[i] < 0 || pages[i] >= num_pages) {
        fault->kind = kPage, fault->plane = p, fault->index = i;
        fault->found = i < listed ? pages[i] : -1;
        return false;
      }
  }
  return true;
}

inline bool layer_block(const Layer& l, int64_t block, Block* b, Fault* fault) {
  const bool gate_up = block % 2 == 0;
  fault->block = block;
  b->bits = l.bits[block];
  if (b->bits < l.min_bits || b->bits > l.parent_bits) {
    fault->kind = kWidth, fault->found = b->bits;
    return false;
  }
  b->page_shift = l.page_shift;
  b->rows = gate_up ? 2 * l.inner : l.hidden;
  b->columns = gate_up ? l.hidden : l.inner;
  b->row_bytes = (b->columns + 31) / 32 * 4;
  if (l.page_shift < 0) {
    b->planes = l.planes[block], b->table = l.tables[block];
    return true;
  }
  b->planes = l.arena;
  b->plane_list = l.plane_list;
  b->plane_pages = l.plane_pages + block * l.parent_bits * l.plane_list;
  const int64_t tables = l.parent_bits - l.min_bits + 1;
  b->table_pages = l.table_pages + (block * tables + b->bits - l.min_bits) * l.table_list;
  return check_pages(*b, l.num_pages, l.table_list, fault);
}

// A run of tokens of one expert; groups of runs share the buffers between the two matrices.
struct Run {
  int64_t expert, begin, count;
  bool starts_group;
};
constexpr int64_t kGroupSlots = 256;

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
  std::vector<int64_t> slots;  // token * top + position, sorted by expert
  std::vector<Run> runs;
  bool uses[2] = {false, false};

  bool plan(const int32_t* index, Fault* fault) {
    std::vector<int64_t> first(size_t(l.experts) + 1);
    for (int64_t s = 0; s < tokens * top; ++s) ++first[size_t(index[s]) + 1];
    for (int64_t e = 0; e < l.experts; ++e) first[size_t(e) + 1] += first[size_t(e)];
    slots.resize(size_t(tokens * top));
    std::vector<int64_t> next(first.begin(), first.end() - 1);
    for (int64_t s = 0; s < tokens * top; ++s) slots[size_t(next[size_t(index[s])]++)] = s;
    blocks.resize(size_t(2 * l.experts));
    int64_t group = kGroupSlots;
    for (int64_t e = 0; e < l.experts; ++e) {
      const int64_t end = first[size_t(e) + 1];
      if (first[size_t(e)] == end) continue;
      for (int m = 0; m < 2; ++m)
        if (!layer_block(l, 2 * e + m, &blocks[size_t(2 * e + m)], fault)) return false;
      uses[path.order(blocks[size_t(2 * e)].bits)] = true;
      for (int64_t s = first[size_t(e)]; s < end; s += kGroupSlots) {
        const int64_t count = std::min(kGroupSlots, end - s);
        const bool starts = group + count > kGroupSlots;
        group = starts ? count : group + count;
        runs.push_back({e, s, count, starts});
      }
    }
    return true;
  }

  void run() {
    const int64_t wide = input_stride(l.hidden), narrow = input_stride(l.inner);
    const int64_t held = std::min(kGroupSlots, tokens * top);
    const Buffer<float> inputs[2] = {Buffer<float>(uses[0] ? tokens * wide : 0),
                                     Buffer<float>(uses[1] ? tokens * wide : 0)};
    const Buffer<float> both(held * 2 * l.inner), hidden(held * l.inner), arranged(held * narrow),
        product(held * l.hidden);
    std::vector<ThreadMemory> memory;
    for (int i = 0; i < threads; ++i) memory.emplace_back(std::max(l.hidden, l.inner));
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
      std::vector<const float*> rows(static_cast<size_t>(held));
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
