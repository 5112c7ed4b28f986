// Products with a whole matrix of float32 or bfloat16 weights, kept in panels.
//
// A panel is 32 outputs side by side: element (k, lane) of panel p lies at (p * columns + k) * 32 +
// place(lane), so that one step over k reads neighbouring bytes and every output has a lane of its
// own. The sum of one output is a chain of fused multiply-adds over ascending k that starts from
// the bias: no order is left to choose, so it is the same whatever tokens, outputs and threads
// share the call, and whether the panels were made before or during it.
// In bfloat16 panels lanes i and 16 + i are neighbours: a shift and a mask widen 32 of them.
#pragma once
#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "work.h"

constexpr int64_t kPanel = 32;
constexpr int64_t kDepth = 256;  // k's multiplied at once: 32 KiB of a panel stay in cache
constexpr int64_t kAheadBytes = 4096;      // fetched ahead where every weight is used once
constexpr int64_t kInputFloats = 3 << 17;  // 1.5 MiB of inputs worked through at once stay in cache

enum WeightType : int32_t { kFloat32 = 0, kBfloat16 = 1 };

struct Matrix {
  const void* data;       // panels, or [rows, columns] with row_stride elements between rows
  int64_t rows, columns;  // outputs, inputs
  int64_t row_stride;     // < 0: in panels
  int32_t type;
};

inline int64_t element_bytes(int32_t type) { return type == kBfloat16 ? 2 : 4; }
inline int64_t panels(int64_t rows) { return (rows + kPanel - 1) / kPanel; }

// Place of an output in a step of its panel.
inline int64_t place(int32_t type, int64_t lane) {
  return type == kFloat32 ? lane : lane < 16 ? 2 * lane : 2 * lane - 31;
}

// What a tile is computed from: `tokens` inputs packed as [depth, tokens], and `depth` steps of one
// panel or two. Sums go from `start` (one float a lane) if `first`, else on from sums[token, lane].
struct Tile {
  const void* panel;
  const void* second;
  int64_t depth;
  const float* x;
  const float* start;
  float* sums;
  int64_t sums_stride;
  bool first;
  const uint8_t* ahead;  // fetched meanwhile, so many bytes further at every step
  int64_t ahead_step;
};

struct LinearPath {
  int64_t most;  // tokens in a tile
  int64_t pair;  // tiles of up to so many tokens take two panels at once
  void (*tile)(int32_t type, int64_t tokens, const Tile& tile);
  void (*activate)(int32_t activation, int64_t n, const float* gate, const float* up, float* out);
};

// out[k * stride + i] = rows[i][k] for k in [0, depth).
inline void interleave(const float* const* rows, int64_t count, int64_t depth, float* out,
                       int64_t stride) {
  int64_t i = 0;
#if defined(__x86_64__)
  for (; i + 4 <= count; i += 4) {
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      __m128 a = _mm_loadu_ps(rows[i] + k), b = _mm_loadu_ps(rows[i + 1] + k),
             c = _mm_loadu_ps(rows[i + 2] + k), d = _mm_loadu_ps(rows[i + 3] + k);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      float* to = out + k * stride + i;
      _mm_storeu_ps(to, a);
      _mm_storeu_ps(to + stride, b);
      _mm_storeu_ps(to + 2 * stride, c);
      _mm_storeu_ps(to + 3 * stride, d);
    }
    for (; k < depth; ++k)
      for (int64_t j = i; j < i + 4; ++j) out[k * stride + j] = rows[j][k];
  }
#endif
  for (; i < count; ++i)
    for (int64_t k = 0; k < depth; ++k) out[k * stride + i] = rows[i][k];
}

// One panel's steps [from, from + depth) of a matrix in rows; outputs behind the last are 0.
template <class T>
inline void pack_panel_of(const Matrix& m, int64_t row, int64_t from, int64_t depth, T* out) {
  const int64_t here = std::min(kPanel, m.rows - row);
  const T* rows[kPanel];
  for (int64_t i = 0; i < here; ++i)
    rows[i] = static_cast<const T*>(m.data) + (row + i) * m.row_stride + from;
  if constexpr (sizeof(T) == 4) {
    interleave(rows, here, depth, out, kPanel);
  } else {
    for (int64_t i = 0; i < here; ++i)
      for (int64_t k = 0; k < depth; ++k) out[k * kPanel + place(m.type, i)] = rows[i][k];
  }
  for (int64_t i = here; i < kPanel; ++i)
    for (int64_t k = 0; k < depth; ++k) out[k * kPanel + place(m.type, i)] = 0;
}

inline void pack_panel(const Matrix& m, int64_t row, int64_t from, int64_t depth, void* out) {
  if (m.type == kFloat32) pack_panel_of(m, row, from, depth, static_cast<float*>(out));
  else pack_panel_of(m, row, from, depth, static_cast<uint16_t*>(out));
}

// Tokens in tiles of nearly one size; tile i begins at token share(tokens, i, tiles).
inline int64_t tiles_of(const LinearPath& path, int64_t tokens) {
  return (tokens + path.most - 1) / path.most;
}

// Packs tokens [first, last) of the call's tiles [first, last) into out[tokens * columns].
inline void pack_tiles(const LinearPath& path, int64_t tokens, int64_t first, int64_t last,
                       int64_t columns, const float* const* x, float* out) {
  const int tiles = int(tiles_of(path, tokens));
  for (int64_t i = first; i < last; ++i) {
    const int64_t t = share(tokens, int(i), tiles), end = share(tokens, int(i) + 1, tiles);
    interleave(x + t, end - t, columns, out + t * columns, end - t);
  }
}

// Memory of one thread.
struct LinearMemory {
  Buffer<uint8_t> panel;
  Buffer<float> edge;
  explicit LinearMemory(int64_t tokens)
      : panel(kDepth * kPanel * 4), edge(tokens * kPanel) {}
};

// y[t * y_stride + n] of all tokens for the outputs of panels [first, last). `x`: packed tiles.
inline void multiply_panels(const LinearPath& path, const Matrix& m, const float* bias,
                            int64_t first, int64_t last, const float* x, int64_t tokens, float* y,
                            int64_t y_stride, const LinearMemory& memory) {
  const int tiles = int(tiles_of(path, tokens));
  const int64_t bytes = element_bytes(m.type), k_all = m.columns;
  const bool packed = m.row_stride < 0;
  const bool pairs = packed && tiles == 1 && tokens <= path.pair;
  const auto panel_at = [&](int64_t p, int64_t k) {
    return static_cast<const uint8_t*>(m.data) + (p * k_all + k) * kPanel * bytes;
  };
  const int groups = int((tokens * k_all + kInputFloats - 1) / kInputFloats);
  for (int g = 0; g < groups; ++g) {
    const int64_t group = share(tiles, g, groups), group_end = share(tiles, g + 1, groups);
    if (group == group_end) continue;
    const int64_t base = share(tokens, int(group), tiles);
    for (int64_t p = first; p < last;) {
      const bool pair = pairs && p + 2 <= last && (p + 2) * kPanel <= m.rows;
      const int64_t n = p * kPanel, wide = std::min(pair ? 2 * kPanel : kPanel, m.rows - n);
      const bool whole = wide >= kPanel;
      alignas(64) float start[2 * kPanel] = {};
      if (bias) std::copy(bias + n, bias + n + wide, start);
      float* const sums = whole ? y + n : memory.edge.get();
      const int64_t stride = whole ? y_stride : kPanel;
      const int64_t token_zero = whole ? 0 : base;
      const int64_t depth_most = packed && tiles == 1 ? k_all : kDepth;
      int64_t k = 0;
      do {
        const int64_t depth = std::min(depth_most, k_all - k);
        const void* panel = packed ? panel_at(p, k) : memory.panel.get();
        const uint8_t* ahead = !packed ? memory.panel.get()
                               : tiles == 1
                                   ? panel_at(p, k) + kAheadBytes
                                   : panel_at(p, k) + depth * kPanel * bytes;
        const int64_t ahead_step = packed ? kPanel * bytes / (group_end - group) : 0;
        if (!packed) pack_panel(m, n, k, depth, memory.panel.get());
        for (int64_t i = group; i < group_end; ++i) {
          const int64_t t = share(tokens, int(i), tiles), end = share(tokens, int(i) + 1, tiles);
          path.tile(m.type, end - t,
                    {panel, pair ? panel_at(p + 1, k) : nullptr, depth,
                     x + t * k_all + k * (end - t), start, sums + (t - token_zero) * stride, stride,
                     k == 0, ahead + (i - group) * depth * ahead_step, ahead_step});
        }
        k += depth;
      } while (k < k_all);
      if (!whole)
        for (int64_t t = base; t < share(tokens, int(group_end), tiles); ++t)
          std::copy(sums + (t - base) * kPanel, sums + (t - base) * kPanel + wide,
                    y + t * y_stride + n);
      p += pair ? 2 : 1;
    }
  }
}

inline void multiply(const LinearPath& path, const Matrix& m, const float* bias, const float* x,
                     int64_t tokens, float* y, int threads) {
  const int64_t tiles = tiles_of(path, tokens), all = panels(m.rows);
  std::vector<const float*> rows(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) rows[size_t(t)] = x + t * m.columns;
  const Buffer<float> packed(tokens * m.columns);
  std::vector<LinearMemory> memory;
  for (int i = 0; i < threads; ++i) memory.emplace_back(tokens);
  Barrier barrier(threads);
  in_parallel(threads, [&](int part) {
    pack_tiles(path, tokens, share(tiles, part, threads), share(tiles, part + 1, threads),
               m.columns, rows.data(), packed);
    barrier.wait();
    multiply_panels(path, m, bias, share(all, part, threads), share(all, part + 1, threads), packed,
                    tokens, y, m.rows, memory[size_t(part)]);
  });
}
