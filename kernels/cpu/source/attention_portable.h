// Attention in plain C++: vectors of four floats.
#pragma once
#include "attention.h"
#include "portable.h"
#include "target.h"

namespace attention_portable {

typedef float Vector __attribute__((vector_size(16)));
typedef int32_t Integers __attribute__((vector_size(16)));
constexpr int kLanes = 4, kRows = 3, kGroup = 2;

inline Vector zero() { return Vector{}; }
inline Vector load(const float* at) {
  Vector v;
  std::memcpy(&v, at, sizeof v);
  return v;
}
inline void store(float* at, Vector v) { std::memcpy(at, &v, sizeof v); }
inline Vector broadcast(const float* at) { return Vector{*at, *at, *at, *at}; }
inline Vector add(Vector a, Vector b) { return a + b; }
inline Vector multiply(Vector a, Vector b) { return a * b; }
inline Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
inline Vector chosen(Integers mask, Vector a, Vector b) {
  return Vector((Integers(a) & mask) | (Integers(b) & ~mask));
}
inline Vector maximum(Vector a, Vector b) { return chosen(a > b, a, b); }
inline float largest(Vector v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

// 2^x to about 1e-7 relative for x <= 0; 0 below 2^-126; NaN stays NaN. Near-minimax in x - n.
inline Vector exp2_of(Vector x) {
  const float least = -126.0f, magic = 12582912.0f;
  const Integers low = x < broadcast(&least);
  const Vector kept = chosen(low, broadcast(&least), x);
  const Vector shifted = kept + broadcast(&magic), r = kept - (shifted - broadcast(&magic));
  Vector p = r * 1.5453162942e-04f + 1.3390863364e-03f;
  p = p * r + 9.6180825573e-03f;
  p = p * r + 5.5503571142e-02f;
  p = p * r + 2.4022650761e-01f;
  p = p * r + 6.9314718803e-01f;
  p = p * r + 1.0f;
  const Integers power = (Integers(shifted) - 0x4b400000 + 127) << 23;
  return chosen(low, Vector{}, p * Vector(power));
}

// Lanes before `begin` and from `end` on become minus infinity.
inline Vector masked(Vector v, int64_t begin, int64_t end) {
  for (int j = 0; j < kLanes; ++j)
    if (j < begin || j >= end) v[j] = -std::numeric_limits<float>::infinity();
  return v;
}

template <int32_t Type>
inline float widen(const uint8_t* at) {
  float value;
  if constexpr (Type == kStoredFloat32) {
    std::memcpy(&value, at, 4);
    return value;
  }
  uint16_t half;
  std::memcpy(&half, at, 2);
  if constexpr (Type == kStoredFloat16) return portable::widen(half);
  const uint32_t bits = uint32_t(half) << 16;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline Vector load_raw(const uint8_t* at) { return load(reinterpret_cast<const float*>(at)); }
inline Vector low_half(Vector v) { return Vector(Integers(v) << 16); }
inline Vector high_half(Vector v) { return Vector(Integers(v) & int32_t(0xffff0000)); }

template <int32_t Type>
inline Vector load_as(const uint8_t* at) {
  if constexpr (Type == kStoredFloat32) return load(reinterpret_cast<const float*>(at));
  return Vector{widen<Type>(at), widen<Type>(at + 2), widen<Type>(at + 4), widen<Type>(at + 6)};
}

inline void transpose(Vector* v) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const float here = v[i][j];
      v[i][j] = v[j][i];
      v[j][i] = here;
    }
}

#include "attention_tile.h"

constexpr AttentionPath kPath{attend};

}  // namespace attention_portable
