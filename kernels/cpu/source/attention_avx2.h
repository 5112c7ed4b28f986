// Attention in tiles of 6 rows and 16 keys or 16 numbers of values: 12 AVX2 sums.
#pragma once
#include <immintrin.h>

#include "attention.h"
#include "target.h"

TARGET_BEGIN("avx2,fma,f16c")

namespace attention_avx2 {

typedef __m256 Vector;
constexpr int kLanes = 8, kRows = 6, kGroup = 2;

INLINE Vector zero() { return _mm256_setzero_ps(); }
INLINE Vector load(const float* at) { return _mm256_loadu_ps(at); }
INLINE void store(float* at, Vector v) { _mm256_storeu_ps(at, v); }
INLINE Vector broadcast(const float* at) { return _mm256_broadcast_ss(at); }
INLINE Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
INLINE Vector multiply(Vector a, Vector b) { return _mm256_mul_ps(a, b); }
INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Vector maximum(Vector a, Vector b) { return _mm256_max_ps(a, b); }
INLINE float largest(Vector v) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// 2^x to about 1e-7 relative for x <= 0; 0 below 2^-126; NaN stays NaN. Near-minimax in x - n.
INLINE Vector exp2_of(Vector x) {
  const Vector n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector r = _mm256_sub_ps(x, n);
  Vector p = _mm256_set1_ps(1.5453162942e-04f);
  p = fma(p, r, _mm256_set1_ps(1.3390863364e-03f));
  p = fma(p, r, _mm256_set1_ps(9.6180825573e-03f));
  p = fma(p, r, _mm256_set1_ps(5.5503571142e-02f));
  p = fma(p, r, _mm256_set1_ps(2.4022650761e-01f));
  p = fma(p, r, _mm256_set1_ps(6.9314718803e-01f));
  p = fma(p, r, _mm256_set1_ps(1.0f));
  const __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const Vector value = _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
  return _mm256_and_ps(value, _mm256_cmp_ps(x, _mm256_set1_ps(-126.0f), _CMP_NLT_UQ));
}

// Lanes before `begin` and from `end` on become minus infinity.
INLINE Vector masked(Vector v, int64_t begin, int64_t end) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(begin)), lane);
  const __m256i seen =
      _mm256_andnot_si256(early, _mm256_cmpgt_epi32(_mm256_set1_epi32(int32_t(end)), lane));
  return _mm256_blendv_ps(_mm256_set1_ps(-std::numeric_limits<float>::infinity()), v,
                          _mm256_castsi256_ps(seen));
}

INLINE Vector load_raw(const uint8_t* at) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
}
INLINE Vector low_half(Vector v) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(v), 16));
}
INLINE Vector high_half(Vector v) {
  const __m256i kept = _mm256_set1_epi32(int32_t(0xffff0000));
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(v), kept));
}

template <int32_t Type>
INLINE Vector load_as(const uint8_t* at) {
  if constexpr (Type == kStoredFloat32) return _mm256_loadu_ps(reinterpret_cast<const float*>(at));
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  if constexpr (Type == kStoredFloat16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

template <int32_t Type>
INLINE float widen(const uint8_t* at) {
  float value;
  if constexpr (Type == kStoredFloat32) {
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at, 2);
  if constexpr (Type == kStoredFloat16) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
  const uint32_t bits = uint32_t(half) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

// 8 x 8: pairs, fours, then halves of the vectors.
INLINE void transpose(Vector* v) {
  Vector t[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) v[i] = t[i];
}

#include "attention_tile.h"

constexpr AttentionPath kPath{attend};

}  // namespace attention_avx2

TARGET_END
