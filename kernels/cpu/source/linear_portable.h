// Plain C++ for any processor: vectors of 4 floats, products rounded before they are added.
#pragma once
#include "linear.h"
#include "target.h"

namespace linear_portable {

typedef float Vector __attribute__((vector_size(16), aligned(4)));
constexpr int kLanes = 4, kVectors = 8, kMost = 1, kPair = 0;

INLINE Vector load(const float* at) { return *reinterpret_cast<const Vector*>(at); }
INLINE void store(float* at, Vector v) { *reinterpret_cast<Vector*>(at) = v; }
INLINE Vector broadcast(const float* at) { return Vector{*at, *at, *at, *at}; }
INLINE Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }

template <int32_t Type>
INLINE void load_step(const uint8_t* panel, Vector* w) {
  if constexpr (Type == kFloat32) {
    for (int c = 0; c < kVectors; ++c) w[c] = load(reinterpret_cast<const float*>(panel) + 4 * c);
  } else {
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      uint16_t half;
      std::memcpy(&half, panel + 2 * place(kBfloat16, lane), 2);
      const uint32_t word = uint32_t(half) << 16;
      std::memcpy(reinterpret_cast<float*>(w) + lane, &word, 4);
    }
  }
}

#pragma push_macro("HOLD")
#undef HOLD
#define HOLD(v)
#include "linear_tile.h"
#pragma pop_macro("HOLD")

constexpr LinearPath kPath{kMost, kPair, tile, activate_here};

}  // namespace linear_portable
