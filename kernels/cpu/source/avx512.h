// AVX-512: products of decoded values with inputs, for few and for many tokens.
#pragma once
#include "avx512_decode.h"

TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,f16c,fma")

namespace avx512 {

// Sums of one row for T tokens, each in four vectors.
template <int T>
struct Sums {
  const float* const* x;
  __m512 of[T][4];
  INLINE_MEMBER void operator()(int64_t k, const __m512* w) {
    for (int t = 0; t < T; ++t)
      for (int j = 0; j < 4; ++j)
        of[t][j] = _mm512_fmadd_ps(w[j], _mm512_loadu_ps(x[t] + k + 16 * j), of[t][j]);
  }
};

struct Store {
  float* to;
  INLINE_MEMBER void operator()(int64_t k, const __m512* w) {
    for (int j = 0; j < 4; ++j) _mm512_storeu_ps(to + k + 16 * j, w[j]);
  }
};

INLINE __m512 joined(const __m512* sum) {
  return _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3]));
}

// Totals of four vectors; each is added up in the same order: within quarters, then quarters.
INLINE __m128 totals(__m512 a, __m512 b, __m512 c, __m512 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 abcd =
      _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// Few tokens: values go from the table straight into the sums.
template <int Q, int T>
void few_tokens(const Block& b, int64_t first, int64_t last, const float* const* x, float* y,
                int64_t y_stride, const Scratch& scratch) {
  // The cursor saves a tenth at q <= 4; above, registers are short and it costs more than it saves.
  using Rows = std::conditional_t<Q <= 4, RowCursor<Q>, RowFinder>;
  Rows rows(b, first, scratch.side);
  for (int64_t n = first; n < last; ++n, rows.next()) {
    Sums<T> sums{x, {}};
    row_values<Q>(rows.row(), b.columns, b.row_bytes, sums);
    for (int t = 0; t < T; t += 4) {
      const __m512 v = joined(sums.of[t]), zero = _mm512_setzero_ps();
      const __m128 four = totals(v, t + 1 < T ? joined(sums.of[t + 1]) : zero,
                                 t + 2 < T ? joined(sums.of[t + 2]) : zero,
                                 t + 3 < T ? joined(sums.of[t + 3]) : zero);
      float* to = y + t * y_stride + n;
      _mm_store_ss(to, four);
      if (t + 1 < T) to[y_stride] = four[1];
      if (t + 2 < T) to[2 * y_stride] = four[2];
      if (t + 3 < T) to[3 * y_stride] = four[3];
    }
  }
}

// R decoded rows with T tokens over `columns` columns, onto the sums of the columns before.
template <int R, int T>
void tile(const float* w, int64_t w_stride, int64_t columns, const float* const* x, int64_t from,
          float* sums, bool first) {
  __m512 sum[R][T][4];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j)
        sum[r][t][j] =
            first ? _mm512_setzero_ps() : _mm512_load_ps(sums + ((r * T + t) * 4 + j) * 16);
  for (int64_t k = 0; k < columns; k += 64)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      __m512 weight[R];
      for (int r = 0; r < R; ++r) {
        weight[r] = _mm512_loadu_ps(w + r * w_stride + k + 16 * j);
        HOLD(weight[r]);
      }
#pragma GCC unroll 4
      for (int t = 0; t < T; ++t) {
        __m512 input = _mm512_loadu_ps(x[t] + from + k + 16 * j);
        HOLD(input);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) sum[r][t][j] = _mm512_fmadd_ps(weight[r], input, sum[r][t][j]);
      }
    }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int t = 0; t < T; ++t)
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) _mm512_store_ps(sums + ((r * T + t) * 4 + j) * 16, sum[r][t][j]);
}

// Outputs of a tile from its sums, which are in the order row, token.
static void finish(const float* sums, int64_t rows, int64_t tokens, float* y, int64_t y_stride) {
  const int64_t count = rows * tokens;
  for (int64_t i = 0; i < count; i += 4) {
    __m512 v[4];
    for (int64_t j = 0; j < 4; ++j) {
      const float* at = sums + (i + j < count ? i + j : i) * 64;
      const __m512 sum[4] = {_mm512_load_ps(at), _mm512_load_ps(at + 16), _mm512_load_ps(at + 32),
                             _mm512_load_ps(at + 48)};
      v[j] = joined(sum);
    }
    const __m128 four = totals(v[0], v[1], v[2], v[3]);
    for (int64_t j = i; j < count && j < i + 4; ++j)
      y[j % tokens * y_stride + j / tokens] = four[j - i];
  }
}

template <int R>
INLINE void tile_of(int64_t t, const float* w, int64_t w_stride, int64_t columns,
                    const float* const* x, int64_t from, float* sums, bool first) {
  if (t >= 3) tile<R, 3>(w, w_stride, columns, x, from, sums, first);
  else if (t == 2) tile<R, 2>(w, w_stride, columns, x, from, sums, first);
  else tile<R, 1>(w, w_stride, columns, x, from, sums, first);
}

// `here` decoded rows with every token, a stretch of columns at a time so that rows and inputs stay
// in the first-level cache; the sums wait in memory between stretches.
static void multiply_rows(int64_t here, int64_t all_columns, const float* const* x, int64_t tokens,
                          float* y, int64_t y_stride, const Scratch& scratch) {
  const int64_t stride = weight_stride(all_columns), columns = (all_columns + 63) / 64 * 64;
  for (int64_t group = 0; group < tokens; group += kTokenTile) {
    const int64_t end = tokens - group < kTokenTile ? tokens : group + kTokenTile;
    for (int64_t k = 0; k < columns; k += kStretch) {
      const int64_t wide = columns - k < kStretch ? columns - k : kStretch;
      float* sums = scratch.sums;
      for (int64_t t = group; t < end; t += 3) {
        const int64_t t_here = end - t < 3 ? end - t : 3;
        for (int64_t r = 0; r < here; r += 2) {
          const int64_t r_here = here - r < 2 ? here - r : 2;
          const float* w = scratch.weights + r * stride + k;
          if (r_here == 2) tile_of<2>(t_here, w, stride, wide, x + t, k, sums, k == 0);
          else tile_of<1>(t_here, w, stride, wide, x + t, k, sums, k == 0);
          if (k + wide == columns) finish(sums, r_here, t_here, y + t * y_stride + r, y_stride);
          sums += r_here * t_here * 64;
        }
      }
    }
  }
}

// Many tokens: a few rows are decoded once, into memory.
template <int Q>
void many_tokens(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
                 float* y, int64_t y_stride, const Scratch& scratch) {
  for (int64_t n = first; n < last; n += kRowTile) {
    const int64_t here = last - n < kRowTile ? last - n : kRowTile;
    for (int64_t r = 0; r < here; ++r) {
      Store store{scratch.weights + r * weight_stride(b.columns)};
      row_values<Q>(locate(b, n + r, scratch.side), b.columns, b.row_bytes, store);
    }
    multiply_rows(here, b.columns, x, tokens, y + n, y_stride, scratch);
  }
}

// Up to kPassTokens the rows are decoded once for every 2 or 4 tokens, as many as have their inputs
// in a first-level cache of 32 KiB; beyond, once into memory. Measured on Zen 4.
template <int Q>
constexpr int64_t kPassTokens = Q <= 5 ? 8 : 4;
constexpr int64_t kRowBlock = 16;
inline int64_t tokens_at_once(int64_t columns) { return columns <= 2560 ? 4 : 2; }

template <int Q>
void some_tokens(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
                 float* y, int64_t y_stride, const Scratch& scratch) {
  switch (tokens) {
    case 0: return;
    case 1: return few_tokens<Q, 1>(b, first, last, x, y, y_stride, scratch);
    case 2: return few_tokens<Q, 2>(b, first, last, x, y, y_stride, scratch);
    case 3: return few_tokens<Q, 3>(b, first, last, x, y, y_stride, scratch);
    default: return few_tokens<Q, 4>(b, first, last, x, y, y_stride, scratch);
  }
}

template <int Q>
void rows_of(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
             float* y, int64_t y_stride, const Scratch& scratch) {
  const int64_t at_once = tokens_at_once(b.columns), passes = (tokens + at_once - 1) / at_once;
  if (tokens > kPassTokens<Q>)
    return many_tokens<Q>(b, first, last, x, tokens, y, y_stride, scratch);
  if (passes <= 1) return some_tokens<Q>(b, first, last, x, tokens, y, y_stride, scratch);
  for (int64_t n = first; n < last; n += kRowBlock)
    for (int64_t p = 0; p < passes; ++p) {
      const int64_t t = tokens * p / passes, end = tokens * (p + 1) / passes;
      some_tokens<Q>(b, n, last - n < kRowBlock ? last : n + kRowBlock, x + t, end - t,
                     y + t * y_stride, y_stride, scratch);
    }
}

static void rows(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
                 float* y, int64_t y_stride, const Scratch& scratch) {
  BY_WIDTH(rows_of, b.bits, (b, first, last, x, tokens, y, y_stride, scratch));
}

static void arrange(int order, int64_t columns, const float* x, float* out) {
  for (int64_t k = 0; k < padded(columns); k += 64)
    for (int v = 0; v < 4; ++v) {
      const __m512i lane = order == kDword ? _mm512_load_si512(kLaneColumns<kDword>.of[v])
                                           : _mm512_load_si512(kLaneColumns<kWord>.of[v]);
      const int64_t left = columns - k < 0 ? 0 : columns - k;
      const __mmask16 inside =
          _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(int32_t(left < 64 ? left : 64)));
      _mm512_storeu_ps(out + k + 16 * v,
                       _mm512_mask_i32gather_ps(_mm512_setzero_ps(), inside, lane, x + k, 4));
    }
}

static int order_of(int bits) { return order(bits); }
constexpr Path kPath{"avx512", order_of, arrange, rows};

}  // namespace avx512

TARGET_END
