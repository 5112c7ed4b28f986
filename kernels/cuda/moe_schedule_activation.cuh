// moe_schedule_activation.cuh: activations as two int8 terms, X = round(x / scale) = 128 high + low.
//
// One scale for each 256 columns (a unit) of a token: scale = largest magnitude / 16256, so |high| <= 127,
// |low| <= 64. Bytes of one unit of one token, in the order in which the B fragments of
// mma.m16n8k32.s8 are read, 16 bytes a lane and pair of steps:
//
//   [pair of steps 4][t 4][high, low][step of the pair 2][upper half 2][i 4]   column 64 pair + 32 step + 16 upper + 4 t + i
//
// A unit with a NaN has scale NaN; one with an infinity has scale infinity: both give NaN, nothing is hidden.
#pragma once

constexpr int kUnitColumns = 256;
constexpr int kActivationBytes = 512;  // of one unit of one token
constexpr float kActivationMax = 16256.0f;

// 0 float32, 1 bfloat16, 2 float16
__device__ __forceinline__ float read_element(const void* p, size_t i, int kind) {
  if (kind == 0) return ((const float*)p)[i];
  const unsigned h = ((const unsigned short*)p)[i];
  if (kind == 1) return __uint_as_float(h << 16);
  // the exponent moves by 112; infinity and NaN keep all ones
  const float magnitude = __uint_as_float((h & 0x7fffu) << 13) * 5.192296858534828e33f;
  const unsigned bits = (h & 0x7c00u) == 0x7c00u ? 0x7f800000u | (h & 0x3ffu) << 13 : __float_as_uint(magnitude);
  return __uint_as_float(bits | (h & 0x8000u) << 16);
}

// One warp: 8 columns a lane, v[0..3] = columns 4 lane.., v[4..7] = columns 128 + 4 lane..
__device__ __forceinline__ void store_unit(const float* v, signed char* unit, float* scale) {
  const int lane = threadIdx.x & 31;
  float largest = 0.0f, check = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = fmaxf(largest, fabsf(v[i]));
    check += 0.0f * v[i];  // 0, or NaN where a value is NaN or infinite
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, d));
    check += __shfl_xor_sync(0xffffffffu, check, d);
  }
  const bool tiny = largest < 1e-30f;  // its reciprocal would overflow
  const float inverse = tiny ? 0.0f : kActivationMax / largest;
  if (lane == 0) *scale = tiny ? check : largest * (1.0f / kActivationMax) + check;
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    unsigned high = 0, low = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int x = __float2int_rn(v[4 * quad + i] * inverse);
      const int h = (x + 64) >> 7;
      high |= (unsigned)(h & 255) << (8 * i);
      low |= (unsigned)((x - 128 * h) & 255) << (8 * i);
    }
    const int k = 128 * quad + 4 * lane;
    const int at = (k >> 6) * 128 + ((k >> 2) & 3) * 32 + ((k >> 5) & 1) * 8 + ((k >> 4) & 1) * 4;
    *(unsigned*)(unit + at) = high;
    *(unsigned*)(unit + at + 16) = low;
  }
}
