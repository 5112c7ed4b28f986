// Plain C++ for any processor: decode rows into a buffer, then dot products of 16 partial sums.
#pragma once
#include "block.h"

namespace portable {

typedef float Lane4 __attribute__((vector_size(16), aligned(4)));

// Transposes, in each byte, the 8 x 8 matrix of bit (column) and word (row).
inline void transpose(uint64_t* w) {
  constexpr uint64_t mask[3] = {0x5555555555555555, 0x3333333333333333, 0x0f0f0f0f0f0f0f0f};
#pragma GCC unroll 3
  for (int level = 0; level < 3; ++level) {
    const int s = 1 << level;
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
      if (!(i & s)) {
        const uint64_t t = ((w[i] >> s) ^ w[i + s]) & mask[level];
        w[i + s] ^= t;
        w[i] ^= t << s;
      }
  }
}

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

// 64 codes: byte g of w[j] is that of column 8g + j. `bytes`: of a plane still in the row.
template <int Q>
inline void load_codes(const Row& row, int64_t at, int64_t bytes, uint64_t* w) {
#pragma GCC unroll 8
  for (int bit = 0; bit < 8; ++bit) {
    w[bit] = 0;
    if (bit < Q) std::memcpy(&w[bit], row.plane[Q - 1 - bit] + at, bytes < 8 ? size_t(bytes) : 8);
  }
  transpose(w);
}

template <int Q>
void decode(const Row& row, int64_t columns, int64_t row_bytes, float* out) {
  float table[256];
  for (int c = 0; c < 1 << Q; ++c) table[c] = widen(row.table[c]);
  uint64_t w[8];
  int64_t k = 0;
  for (; k + 64 <= columns; k += 64) {
    load_codes<Q>(row, k / 8, 8, w);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g)
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) out[k + 8 * g + j] = table[w[j] >> (8 * g) & 255];
  }
  if (k < columns) {
    load_codes<Q>(row, k / 8, row_bytes - k / 8, w);
    for (int i = 0; i < 64; ++i)
      out[k + i] = k + i < columns ? table[w[i & 7] >> (i & 56) & 255] : 0.0f;
  }
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
    decode<Q>(locate(b, n, scratch.side), b.columns, b.row_bytes, scratch.weights);
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2)
      dot<2>(scratch.weights, b.columns, x + t, y + t * y_stride + n, y_stride);
    if (t < tokens) dot<1>(scratch.weights, b.columns, x + t, y + t * y_stride + n, y_stride);
  }
}

inline void rows(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
                 float* y, int64_t y_stride, const Scratch& scratch) {
  BY_WIDTH(rows_of, b.bits, (b, first, last, x, tokens, y, y_stride, scratch));
}

inline int order(int) { return 0; }

constexpr Path kPath{"portable", order, in_order, rows};

}  // namespace portable
