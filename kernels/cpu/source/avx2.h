// AVX2 with FMA and F16C: rows are decoded 32 weights at a time into a buffer, then multiplied.
//
// Codes: a plane's 32-bit word is spread to 32 bytes and compared with one bit each. Values: byte
// shuffles in 16-entry tables of the low and high bytes of the float16 entries (q <= 7), else one
// look-up per code in a float table.
#pragma once
#include <immintrin.h>

#include "block.h"
#include "target.h"

TARGET_BEGIN("avx2,fma,f16c")

namespace avx2 {

// One more bit for 32 codes.
INLINE __m256i append(__m256i codes, const uint8_t* word) {
  int32_t bits;
  std::memcpy(&bits, word, 4);
  const __m256i bytes = _mm256_setr_epi64x(0x0000000000000000, 0x0101010101010101,
                                           0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201ull));
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), bytes);
  const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
  return _mm256_sub_epi8(_mm256_add_epi8(codes, codes), is_set);
}

// Byte tables of one row: part i has entries 16i .. 16i + 15.
template <int Q>
struct Tables {
  static constexpr int kParts = Q <= 4 ? 1 : 1 << (Q - 4);
  __m256i low[kParts], high[kParts];
  explicit INLINE_MEMBER Tables(const uint16_t* from) {
    alignas(16) uint16_t entry[16];
    for (int i = 0; i < kParts; ++i) {
      for (int c = 0; c < 16; ++c) entry[c] = from[(16 * i + c) & ((1 << Q) - 1)];
      const __m128i a = _mm_load_si128(reinterpret_cast<const __m128i*>(entry));
      const __m128i b = _mm_load_si128(reinterpret_cast<const __m128i*>(entry) + 1);
      const __m128i byte = _mm_set1_epi16(0xff);
      low[i] = _mm256_broadcastsi128_si256(
          _mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte)));
      high[i] =
          _mm256_broadcastsi128_si256(_mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8)));
    }
  }
};

// Bytes of 32 codes; bit Q-1 chooses between the two halves of the table.
template <int Q>
INLINE __m256i look_up(const __m256i* part, __m256i codes) {
  if constexpr (Q <= 4) {
    return _mm256_shuffle_epi8(part[0], _mm256_and_si256(codes, _mm256_set1_epi8(15)));
  } else {
    return _mm256_blendv_epi8(look_up<Q - 1>(part, codes),
                              look_up<Q - 1>(part + (1 << (Q - 5)), codes),
                              _mm256_slli_epi16(codes, 8 - Q));
  }
}

template <int Q>
INLINE __m256i load_codes(const Row& row, int64_t at) {
  __m256i codes = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int p = 0; p < Q; ++p) codes = append(codes, row.plane[p] + at);
  return codes;
}

INLINE void store_halves(float* to, __m256i low, __m256i high) {
  const __m256i a = _mm256_unpacklo_epi8(low, high), b = _mm256_unpackhi_epi8(low, high);
  _mm256_storeu_ps(to, _mm256_cvtph_ps(_mm256_castsi256_si128(a)));
  _mm256_storeu_ps(to + 8, _mm256_cvtph_ps(_mm256_castsi256_si128(b)));
  _mm256_storeu_ps(to + 16, _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
  _mm256_storeu_ps(to + 24, _mm256_cvtph_ps(_mm256_extracti128_si256(b, 1)));
}

template <int Q>
void decode(const Row& row, int64_t columns, int64_t row_bytes, float* out) {
  if constexpr (Q <= 7) {
    const Tables<Q> table(row.table);
    for (int64_t at = 0; at < row_bytes; at += 4) {
      const __m256i codes = load_codes<Q>(row, at);
      store_halves(out + 8 * at, look_up<Q>(table.low, codes), look_up<Q>(table.high, codes));
    }
  } else {
    alignas(32) float table[1 << Q];
    for (int c = 0; c < 1 << Q; c += 8)
      _mm256_store_ps(
          table + c,
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row.table + c))));
    for (int64_t at = 0; at < row_bytes; at += 4) {
      alignas(32) uint64_t codes[4];
      _mm256_store_si256(reinterpret_cast<__m256i*>(codes), load_codes<Q>(row, at));
#pragma GCC unroll 4
      for (int g = 0; g < 4; ++g)
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) out[8 * (at + g) + j] = table[codes[g] >> (8 * j) & 255];
    }
  }
  for (int64_t k = columns; k < 8 * row_bytes; ++k) out[k] = 0.0f;
}

INLINE float total(const __m256* sum) {
  const __m256 v = _mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3]));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

template <int T>
INLINE void dot(const float* w, int64_t columns, const float* const* x, float* y,
                int64_t y_stride) {
  __m256 sum[T][4] = {};
  for (int64_t k = 0; k < columns; k += 32)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m256 weight = _mm256_loadu_ps(w + k + 8 * j);
      HOLD(weight);
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t)
        sum[t][j] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(x[t] + k + 8 * j), sum[t][j]);
    }
  for (int t = 0; t < T; ++t) y[t * y_stride] = total(sum[t]);
}

template <int Q>
void rows_of(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
             float* y, int64_t y_stride, const Scratch& scratch) {
  const int64_t columns = 8 * b.row_bytes;
  float* w = scratch.weights;
  for (int64_t n = first; n < last; ++n) {
    decode<Q>(locate(b, n, scratch.side), b.columns, b.row_bytes, w);
    int64_t t = 0;
    for (; t + 3 <= tokens; t += 3) dot<3>(w, columns, x + t, y + t * y_stride + n, y_stride);
    if (tokens - t == 2) dot<2>(w, columns, x + t, y + t * y_stride + n, y_stride);
    if (tokens - t == 1) dot<1>(w, columns, x + t, y + t * y_stride + n, y_stride);
  }
}

static void rows(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
                 float* y, int64_t y_stride, const Scratch& scratch) {
  BY_WIDTH(rows_of, b.bits, (b, first, last, x, tokens, y, y_stride, scratch));
}

static int order(int) { return 0; }
constexpr Path kPath{"avx2", order, in_order, rows};

}  // namespace avx2

TARGET_END
