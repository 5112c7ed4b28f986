// Tiles of up to 12 tokens in 24 AVX-512 sums.
#pragma once
#include <immintrin.h>

#include "linear.h"
#include "target.h"

TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,f16c,fma")

namespace linear_avx512 {

typedef __m512 Vector;
constexpr int kLanes = 16, kVectors = 2, kMost = 12, kPair = 4;

INLINE Vector load(const float* at) { return _mm512_loadu_ps(at); }
INLINE void store(float* at, Vector v) { _mm512_storeu_ps(at, v); }
INLINE Vector broadcast(const float* at) { return _mm512_set1_ps(*at); }
INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm512_fmadd_ps(a, b, c); }

template <int32_t Type>
INLINE void load_step(const uint8_t* panel, Vector* w) {
  if constexpr (Type == kFloat32) {
    for (int c = 0; c < 2; ++c) {
      w[c] = _mm512_loadu_ps(panel + 64 * c);
      HOLD(w[c]);
    }
  } else {
    const __m512i both = _mm512_loadu_si512(panel);
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
    w[1] = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int32_t(0xffff0000))));
  }
}

#include "linear_tile.h"

constexpr LinearPath kPath{kMost, kPair, tile, activate_here};

}  // namespace linear_avx512

TARGET_END
