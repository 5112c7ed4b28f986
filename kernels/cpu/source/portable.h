// Plain C++ for any processor: decode rows into a buffer, then dot products of 16 partial sums.
#pragma once
#include "block.h"

namespace portable {

typedef float Lane4 __attribute__((vector_size(16), aligned(4)));

// spread[b]: bit i of byte b moved to bit 0 of byte i.
struct Spread {
  uint64_t of[256];
  constexpr Spread() : of() {
    for (int b = 0; b < 256; ++b)
      for (int i = 0; i < 8; ++i) of[b] |= uint64_t(b >> i & 1) << (8 * i);
  }
};
constexpr Spread kSpread;

inline float widen(uint16_t half) {
  const uint32_t magnitude = uint32_t(half & 0x7fff) << 13;
  const uint32_t sign = uint32_t(half & 0x8000) << 16;
  float value;
  std::memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;  // exact, subnormal halves included
  uint32_t word;
  std::memcpy(&word, &value, 4);
  if ((half & 0x7c00) == 0x7c00) word = 0x7f800000u | magnitude;
  word |= sign;
  std::memcpy(&value, &word, 4);
  return value;
}

template <int Q>
void decode(const Row& row, int64_t columns, float* out) {
  float table[1 << Q];
  for (int c = 0; c < 1 << Q; ++c) table[c] = widen(row.table[c]);
  for (int64_t group = 0; group * 8 < columns; ++group) {
    uint64_t codes = 0;
    for (int p = 0; p < Q; ++p) codes = codes << 1 | kSpread.of[row.plane[p][group]];
    float* to = out + group * 8;
    const int64_t left = columns - group * 8;
    const int n = left < 8 ? int(left) : 8;
    if (n == 8) {
      for (int i = 0; i < 8; ++i) to[i] = table[codes >> (8 * i) & 255];
    } else {
      for (int i = 0; i < n; ++i) to[i] = table[codes >> (8 * i) & 255];
    }
  }
  for (int64_t k = columns; k % 16; ++k) out[k] = 0.0f;
}

template <int T>
void dot(const float* w, int64_t columns, const float* const* x, float* y, int64_t y_stride) {
  Lane4 sum[T][4] = {};
  for (int64_t k = 0; k < columns; k += 16)
    for (int j = 0; j < 4; ++j) {
      const Lane4 weight = *reinterpret_cast<const Lane4*>(w + k + 4 * j);
      for (int t = 0; t < T; ++t)
        sum[t][j] += weight * *reinterpret_cast<const Lane4*>(x[t] + k + 4 * j);
    }
  for (int t = 0; t < T; ++t) {
    const Lane4 s = (sum[t][0] + sum[t][1]) + (sum[t][2] + sum[t][3]);
    y[t * y_stride] = (s[0] + s[1]) + (s[2] + s[3]);
  }
}

template <int Q>
void rows_of(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
             float* y, int64_t y_stride, const Scratch& scratch) {
  for (int64_t n = first; n < last; ++n) {
    decode<Q>(locate(b, n, scratch.side), b.columns, scratch.weights);
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2)
      dot<2>(scratch.weights, b.columns, x + t, y + t * y_stride + n, y_stride);
    if (t < tokens) dot<1>(scratch.weights, b.columns, x + t, y + t * y_stride + n, y_stride);
  }
}

inline void rows(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
                 float* y, int64_t y_stride, const Scratch& scratch) {
  switch (b.bits) {
    case 2: return rows_of<2>(b, first, last, x, tokens, y, y_stride, scratch);
    case 3: return rows_of<3>(b, first, last, x, tokens, y, y_stride, scratch);
    case 4: return rows_of<4>(b, first, last, x, tokens, y, y_stride, scratch);
    case 5: return rows_of<5>(b, first, last, x, tokens, y, y_stride, scratch);
    case 6: return rows_of<6>(b, first, last, x, tokens, y, y_stride, scratch);
    case 7: return rows_of<7>(b, first, last, x, tokens, y, y_stride, scratch);
    default: return rows_of<8>(b, first, last, x, tokens, y, y_stride, scratch);
  }
}

inline int order(int) { return 0; }

inline void arrange(int, int64_t columns, const float* x, float* out) {
  std::memcpy(out, x, size_t(columns) * sizeof(float));
  std::memset(out + columns, 0, size_t(padded(columns) - columns) * sizeof(float));
}

constexpr Path kPath{"portable", order, arrange, rows};

}  // namespace portable
