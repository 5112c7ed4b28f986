// Activations of three number types, read as float; silu and the tanh form of gelu.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// Which type is told at run time: the same branch for a whole launch, far from the inner loop.
enum NumberType { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

__device__ __forceinline__ float read_number(const void* from, size_t at, int type) {
  if (type == FLOAT16) return __half2float(reinterpret_cast<const __half*>(from)[at]);
  if (type == BFLOAT16) return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(from)[at]);
  return reinterpret_cast<const float*>(from)[at];
}
__device__ __forceinline__ void write_number(void* to, size_t at, int type, float x) {
  if (type == FLOAT16) reinterpret_cast<__half*>(to)[at] = __float2half_rn(x);
  else if (type == BFLOAT16) reinterpret_cast<__nv_bfloat16*>(to)[at] = __float2bfloat16_rn(x);
  else reinterpret_cast<float*>(to)[at] = x;
}

__device__ __forceinline__ float activate(float z, int is_gelu) {
  if (is_gelu) return 0.5f * z * (1.f + tanhf(0.7978845608028654f * (z + 0.044715f * z * z * z)));
  return z / (1.f + expf(-z));
}
