// Attention in tiles of 6 rows and 64 keys or 64 numbers of values: 24 AVX-512 sums.
#pragma once
#include <immintrin.h>

#include "attention.h"
#include "target.h"

TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")

namespace attention_avx512 {

typedef __m512 Vector;
constexpr int kLanes = 16, kRows = 6, kGroup = 4;

INLINE Vector zero() { return _mm512_setzero_ps(); }
INLINE Vector load(const float* at) { return _mm512_loadu_ps(at); }
INLINE void store(float* at, Vector v) { _mm512_storeu_ps(at, v); }
INLINE Vector broadcast(const float* at) { return _mm512_set1_ps(*at); }
INLINE Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
INLINE Vector multiply(Vector a, Vector b) { return _mm512_mul_ps(a, b); }
INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Vector maximum(Vector a, Vector b) { return _mm512_max_ps(a, b); }
INLINE float largest(Vector v) { return _mm512_reduce_max_ps(v); }

// 2^x to about 1e-7 relative for x <= 0; 0 below 2^-126; NaN stays NaN. Near-minimax in x - n.
INLINE Vector exp2_of(Vector x) {
  const Vector n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector r = _mm512_sub_ps(x, n);
  Vector p = _mm512_set1_ps(1.5453162942e-04f);
  p = fma(p, r, _mm512_set1_ps(1.3390863364e-03f));
  p = fma(p, r, _mm512_set1_ps(9.6180825573e-03f));
  p = fma(p, r, _mm512_set1_ps(5.5503571142e-02f));
  p = fma(p, r, _mm512_set1_ps(2.4022650761e-01f));
  p = fma(p, r, _mm512_set1_ps(6.9314718803e-01f));
  p = fma(p, r, _mm512_set1_ps(1.0f));
  const __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(kept, p, n);
}

// Lanes before `begin` and from `end` on become minus infinity.
INLINE Vector masked(Vector v, int64_t begin, int64_t end) {
  const int64_t from = begin < 0 ? 0 : begin > 16 ? 16 : begin;
  const int64_t to = end < 0 ? 0 : end > 16 ? 16 : end;
  const __mmask16 seen = __mmask16(((1u << to) - 1u) & ~((1u << from) - 1u));
  return _mm512_mask_blend_ps(seen, _mm512_set1_ps(-std::numeric_limits<float>::infinity()), v);
}

INLINE Vector load_raw(const uint8_t* at) { return _mm512_loadu_ps(at); }
INLINE Vector low_half(Vector v) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(v), 16));
}
INLINE Vector high_half(Vector v) {
  const __m512i kept = _mm512_set1_epi32(int32_t(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), kept));
}

template <int32_t Type>
INLINE Vector load_as(const uint8_t* at) {
  if constexpr (Type == kStoredFloat32) return _mm512_loadu_ps(at);
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
  if constexpr (Type == kStoredFloat16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
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

// 16 x 16: pairs, fours, then quarters of the vectors.
INLINE void transpose(Vector* v) {
  Vector t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm512_shuffle_ps(t[i], t[i + 2], 0xee);
    v[i + 2] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm512_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    v[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
    v[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
    v[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

#include "attention_tile.h"

constexpr AttentionPath kPath{attend};

}  // namespace attention_avx512

TARGET_END
