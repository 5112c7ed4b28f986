// Tiles of up to 3 tokens in 12 AVX2 sums.
#pragma once
#include <immintrin.h>

#include "linear.h"
#include "target.h"

TARGET_BEGIN("avx2,fma,f16c")

namespace linear_avx2 {

typedef __m256 Vector;
constexpr int kLanes = 8, kVectors = 4, kMost = 3, kPair = 1;

INLINE Vector load(const float* at) { return _mm256_loadu_ps(at); }
INLINE void store(float* at, Vector v) { _mm256_storeu_ps(at, v); }
INLINE Vector broadcast(const float* at) { return _mm256_broadcast_ss(at); }
INLINE Vector fma(Vector a, Vector b, Vector c) { return _mm256_fmadd_ps(a, b, c); }

template <int32_t Type>
INLINE void load_step(const uint8_t* panel, Vector* w) {
  if constexpr (Type == kFloat32) {
    for (int c = 0; c < 4; ++c)
      w[c] = _mm256_loadu_ps(reinterpret_cast<const float*>(panel) + 8 * c);
  } else {
    for (int c = 0; c < 2; ++c) {
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(panel) + c);
      const __m256i upper = _mm256_set1_epi32(int32_t(0xffff0000));
      w[c] = _mm256_castsi256_ps(_mm256_slli_epi32(both, 16));
      w[2 + c] = _mm256_castsi256_ps(_mm256_and_si256(both, upper));
    }
  }
}

#include "linear_tile.h"

constexpr LinearPath kPath{kMost, kPair, tile, activate_here};

}  // namespace linear_avx2

TARGET_END
