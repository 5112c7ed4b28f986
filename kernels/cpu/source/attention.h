// Attention over keys and values in pages: what is asked for, where tokens lie, who does which part.
//
// A query works through the keys it sees in blocks of kKeys, which begin at multiples of kKeys of
// the position in the sequence, in ascending order; within a block every product and sum runs in an
// order of its own that nothing but the shape decides. So a result does not depend on the other
// queries of the call, on how a prompt was divided, on the number of threads or on the pages.
#pragma once
#include <atomic>
#include <cmath>
#include <limits>

#include "work.h"

constexpr int64_t kKeys = 64;       // of a block
constexpr int64_t kChunkRows = 96;  // queries times heads that share packed keys
enum StoredType : int32_t { kStoredFloat32 = 0, kStoredBfloat16 = 1, kStoredFloat16 = 2 };

// New tokens of several sequences and the pages of all their tokens.
struct KvStep {
  int64_t sequences;
  const int64_t* first;           // [sequences + 1], rows of a sequence's new tokens
  const int64_t* starts;          // [sequences], tokens before them
  const int32_t* const* tables;   // [sequences], each [blocks, block_pages] page ids
  const int64_t* blocks;          // [sequences]
  int64_t block_pages;
  int32_t block_shift;            // tokens of a block, as a power of two
  int32_t reserved;
  uint8_t* arena;
  int64_t num_pages, page_bytes;
};

struct KvShape {
  int64_t heads, kv_heads, head_dim;
  int64_t window;      // tokens that a query sees, itself included; 0: all
  int64_t first_page;  // of this layer among the pages of a block
  int32_t page_shift;  // tokens of a page, as a power of two
  int32_t type;        // StoredType

  int64_t number_bytes() const { return type == kStoredFloat32 ? 4 : 2; }
  int64_t token_bytes() const { return 2 * kv_heads * head_dim * number_bytes(); }
  int64_t group() const { return heads / kv_heads; }
  int64_t first_seen(int64_t position) const {
    return window && position >= window ? position + 1 - window : 0;
  }
};

enum AttentionFault : int { kNoFault = 0, kMissingPage = 1, kNoResources = 2 };

inline int64_t page_of(const KvStep& step, const KvShape& shape, int64_t sequence, int64_t token) {
  const int64_t block = token >> step.block_shift, within = token - (block << step.block_shift);
  return step.tables[sequence][block * step.block_pages + shape.first_page +
                               (within >> shape.page_shift)];
}

// Keys of a token, of all heads; its values follow.
inline uint8_t* token_at(const KvStep& step, const KvShape& shape, int64_t sequence,
                         int64_t token) {
  const int64_t page = page_of(step, shape, sequence, token);
  const int64_t within = token & ((int64_t(1) << shape.page_shift) - 1);
  return step.arena + page * step.page_bytes + within * shape.token_bytes();
}

// Every token that a query of the step sees must lie on a page of the arena; found: [sequence,
// token, page] of one that does not.
inline bool pages_are_there(const KvStep& step, const KvShape& shape, int64_t* found) {
  const int64_t page_tokens = int64_t(1) << shape.page_shift;
  for (int64_t s = 0; s < step.sequences; ++s) {
    const int64_t stop = step.starts[s] + step.first[s + 1] - step.first[s];
    for (int64_t t = shape.first_seen(step.starts[s]) & -page_tokens; t < stop; t += page_tokens) {
      const bool listed = t >> step.block_shift < step.blocks[s];
      const int64_t page = listed ? page_of(step, shape, s, t) : -1;
      if (page < 0 || page >= step.num_pages) {
        found[0] = s, found[1] = t, found[2] = page;
        return false;
      }
    }
  }
  return true;
}

inline uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? bits >> 16 | 0x40u : rounded);
}

// Nearest, ties to even; subnormal halves by an addition that rounds at their last bit.
inline uint16_t to_float16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00u);
  if (bits >= 0x47800000u) return uint16_t(sign | 0x7c00u);
  if (bits < 0x38800000u) {
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000u));
  }
  return uint16_t(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13));
}

inline void store_numbers(int32_t type, const float* from, int64_t n, uint8_t* to) {
  if (type == kStoredFloat32) {
    std::memcpy(to, from, size_t(n) * sizeof(float));
    return;
  }
  uint16_t* halves = reinterpret_cast<uint16_t*>(to);
  if (type == kStoredBfloat16)
    for (int64_t i = 0; i < n; ++i) halves[i] = to_bfloat16(from[i]);
  else
    for (int64_t i = 0; i < n; ++i) halves[i] = to_float16(from[i]);
}

// keys and values [T, kv_heads, head_dim] onto the pages of their tokens.
inline void write_tokens(const KvStep& step, const KvShape& shape, const float* keys,
                         const float* values) {
  const int64_t n = shape.kv_heads * shape.head_dim;
  for (int64_t s = 0; s < step.sequences; ++s)
    for (int64_t row = step.first[s]; row < step.first[s + 1]; ++row) {
      uint8_t* at = token_at(step, shape, s, step.starts[s] + row - step.first[s]);
      store_numbers(shape.type, keys + row * n, n, at);
      store_numbers(shape.type, values + row * n, n, at + n * shape.number_bytes());
    }
}

// Memory of one thread. Rows: a query for each of the heads that share a head of keys.
struct AttentionMemory {
  Buffer<float> keys;     // [head_dim, kKeys], a block of keys, transposed
  Buffer<float> values;   // [kKeys, width]
  Buffer<float> queries;  // [rows, head_dim], scaled
  Buffer<float> sums;     // [rows, width], weighted values
  Buffer<float> weights;  // [rows, 16], sums of weights, by lane
  Buffer<float> most;     // [rows], largest score so far
  AttentionMemory(const KvShape& shape, int64_t rows)
      : keys(shape.head_dim * kKeys),
        values(kKeys * width(shape)),
        queries(rows * shape.head_dim),
        sums(rows * width(shape)),
        weights(rows * 16),
        most(rows) {
    std::memset(values.get(), 0, size_t(kKeys * width(shape)) * sizeof(float));
  }
  static int64_t width(const KvShape& shape) { return (shape.head_dim + 15) / 16 * 16; }
};

// Queries of rows [first, last) of the batch, all of one sequence, for some heads of keys.
struct AttentionTask {
  int64_t sequence, first, last, first_head, last_head;
  int64_t position(const KvStep& step) const {
    return step.starts[sequence] + first - step.first[sequence];
  }
};

struct AttentionCall {
  const KvStep& step;
  const KvShape& shape;
  const float* queries;  // [T, heads, head_dim]
  float* out;            // [T, heads * head_dim]
  float scale;           // of a product of query and key, times log2 e
};

// Where the tokens [begin, end) of a block of keys lie.
struct TokensOfBlock {
  int64_t begin = 0, end = 0;
  const uint8_t* at[kKeys];

  void find(const AttentionCall& call, int64_t sequence, int64_t block, int64_t from, int64_t to) {
    begin = from > block ? from - block : 0;
    end = to - block < kKeys ? to - block : kKeys;
    for (int64_t k = begin; k < end; ++k)
      at[k] = token_at(call.step, call.shape, sequence, block + k);
  }
};

struct AttentionPath {
  void (*attend)(const AttentionCall& call, const AttentionTask& task, AttentionMemory& memory);
};

inline void attend_all(const AttentionPath& path, const AttentionCall& call, int threads) {
  const KvShape& shape = call.shape;
  const int64_t group = shape.group(), most = kChunkRows / group > 1 ? kChunkRows / group : 1;
  std::vector<AttentionTask> tasks;
  int64_t rows = 1;
  for (int64_t s = 0; s < call.step.sequences; ++s)
    for (int64_t row = call.step.first[s]; row < call.step.first[s + 1]; row += most) {
      const int64_t end = call.step.first[s + 1] - row < most ? call.step.first[s + 1] : row + most;
      // Few queries: all heads together, so that tokens are read from end to end. Asking for lines
      // ahead on top of that gained nothing (Emerald Rapids).
      const bool together = threads == 1 && (end - row) * shape.heads <= kChunkRows;
      const int64_t heads = together ? shape.kv_heads : 1, here = (end - row) * group * heads;
      rows = here > rows ? here : rows;
      for (int64_t h = 0; h < shape.kv_heads; h += heads)
        tasks.push_back({s, row, end, h, h + heads});
    }
  const int64_t count = int64_t(tasks.size());
  const int workers = count < threads ? int(count) : threads;
  if (!workers) return;
  std::vector<AttentionMemory> memory;
  memory.reserve(size_t(workers));
  for (int i = 0; i < workers; ++i) memory.emplace_back(shape, rows);
  std::atomic<int64_t> next{0};
  in_parallel(workers, [&](int part) {
    for (int64_t i; (i = next.fetch_add(1)) < count;)
      path.attend(call, tasks[size_t(i)], memory[size_t(part)]);
  });
}

// A place relative to a block, moved into it.
inline int64_t within_block(int64_t key) { return key < 0 ? 0 : key > kKeys ? kKeys : key; }
