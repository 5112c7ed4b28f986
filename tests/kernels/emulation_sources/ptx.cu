// Each function of ptx_compat.h alone: registers in, registers out, one row of the arrays a lane.
#include "ptx_compat.h"

template <class T, void (*MMA)(T*, const unsigned*, const unsigned*)>
__device__ void one_mma(const unsigned* a, const unsigned* b, const T* c, T* d) {
  const int l = threadIdx.x;
  unsigned ra[4], rb[2];
  T rd[4];
  for (int i = 0; i < 4; ++i) { ra[i] = a[4 * l + i]; rd[i] = c[4 * l + i]; }
  for (int i = 0; i < 2; ++i) rb[i] = b[2 * l + i];
  MMA(rd, ra, rb);
  for (int i = 0; i < 4; ++i) d[4 * l + i] = rd[i];
}
extern "C" __global__ void mma_s8(const unsigned* a, const unsigned* b, const int* c, int* d) {
  one_mma<int, ptx_mma_m16n8k32_s8>(a, b, c, d);
}
extern "C" __global__ void mma_f16(const unsigned* a, const unsigned* b, const float* c, float* d) {
  one_mma<float, ptx_mma_m16n8k16_f16>(a, b, c, d);
}
extern "C" __global__ void mma_bf16(const unsigned* a, const unsigned* b, const float* c, float* d) {
  one_mma<float, ptx_mma_m16n8k16_bf16>(a, b, c, d);
}
extern "C" __global__ void mma_tf32(const unsigned* a, const unsigned* b, const float* c, float* d) {
  one_mma<float, ptx_mma_m16n8k8_tf32>(a, b, c, d);
}

// words: [n, 3] unsigned, out: [n, 5] unsigned
extern "C" __global__ void bit_functions(const unsigned* words, unsigned* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const unsigned a = words[3 * i], b = words[3 * i + 1], c = words[3 * i + 2];
  out[5 * i] = ptx_prmt(a, b, c);
  out[5 * i + 1] = ptx_lop3<0xEA>(a, b, c);  // (a & b) | c
  out[5 * i + 2] = ptx_lop3<0x96>(a, b, c);  // a ^ b ^ c
  out[5 * i + 3] = ptx_lop3<0x1D>(a, b, c);
  out[5 * i + 4] = __byte_perm(a, b, c);
}

// tile: [32, 8] 16-bit values (four 8x8 matrices, one below the other), out: [32, 12]
extern "C" __global__ void ldmatrix_all(const unsigned* tile, unsigned* out) {
  __shared__ __align__(16) unsigned s[128];
  const int l = threadIdx.x;
  for (int i = 0; i < 4; ++i) s[4 * l + i] = tile[4 * l + i];
  __syncwarp();
  unsigned r[12];
  ptx_ldmatrix_x4(r, s + 4 * l);
  ptx_ldmatrix_x4_trans(r + 4, s + 4 * l);
  ptx_ldmatrix_x2(r + 8, s + 4 * (l & 15));
  ptx_ldmatrix_x2_trans(r + 10, s + 4 * (l & 15));
  for (int i = 0; i < 12; ++i) out[12 * l + i] = r[i];
}

// src: [n] unsigned bytes read by 4, 8 and 16; the tail beyond `bytes` must come out as zero. out: [3, 32 * 4] words
extern "C" __global__ void cp_async_all(const unsigned char* src, unsigned* out, int bytes) {
  __shared__ __align__(16) unsigned s4[128], s8[128], s16[128];
  const int l = threadIdx.x;
  auto left = [&](int at, int size) { return max(0, min(size, bytes - at)); };
  for (int i = 0; i < 4; ++i) ptx_cp_async4_zfill(s4 + 32 * i + l, src + 128 * i + 4 * l, left(128 * i + 4 * l, 4));
  ptx_cp_async_commit();
  for (int i = 0; i < 2; ++i) ptx_cp_async8_zfill(s8 + 64 * i + 2 * l, src + 256 * i + 8 * l, left(256 * i + 8 * l, 8));
  ptx_cp_async_commit();
  ptx_cp_async16_zfill(s16 + 4 * l, src + 16 * l, left(16 * l, 16));
#ifndef NO_WAIT
  ptx_cp_async_wait<1>();
  ptx_cp_async_wait_all();
#endif
  __syncthreads();
  for (int i = 0; i < 4; ++i) {
    out[32 * i + l] = s4[32 * i + l];
    out[128 + 32 * i + l] = s8[32 * i + l];
    out[256 + 32 * i + l] = s16[32 * i + l];
  }
}

// whole elements only, with the last ones switched off
extern "C" __global__ void cp_async_predicates(const unsigned* src, unsigned* out, int words) {
  __shared__ __align__(16) unsigned s[32 * 7];
  const int l = threadIdx.x;
  ptx_cp_async4(s + l, src + l, l < words);
  ptx_cp_async8(s + 32 + 2 * l, src + 2 * l, 2 * l + 1 < words);
  ptx_cp_async16(s + 96 + 4 * l, src + 4 * l, 4 * l + 3 < words);
  ptx_cp_async_wait_all();
  __syncthreads();
  for (int i = 0; i < 7; ++i) out[32 * i + l] = s[32 * i + l];
}

// in: [n] uint4, out: [n] uint4 each four times over
extern "C" __global__ void streaming_loads(const uint4* in, unsigned* out) {
  const int l = threadIdx.x;
  const uint4 a = ptx_ld_global_nc_v4(in + l), b = ptx_ld_global_nc_evict_first_v4(in + l);
  const uint2 c = ptx_ld_global_nc_v2(in + l), d = ptx_ld_global_nc_evict_first_v2(in + l);
  unsigned* o = out + 12 * l;
  o[0] = a.x; o[1] = a.y; o[2] = a.z; o[3] = a.w;
  o[4] = b.x; o[5] = b.y; o[6] = b.z; o[7] = b.w;
  o[8] = c.x; o[9] = c.y; o[10] = d.x; o[11] = d.y;
}

extern "C" __global__ void conversions(const float* in, unsigned* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[2 * i] = ptx_cvt_f16x2(in[2 * i], in[2 * i + 1]);
  out[2 * i + 1] = ptx_cvt_bf16x2(in[2 * i], in[2 * i + 1]);
}

// bugs on purpose
extern "C" __global__ void bug_mma_short_warp(int* d) {
  unsigned a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  int r[4] = {0, 0, 0, 0};
  if (threadIdx.x == 31) return;
  ptx_mma_m16n8k32_s8(r, a, b);
  d[threadIdx.x] = r[0];
}
extern "C" __global__ void bug_cp_async_misaligned(const unsigned* src, unsigned* out) {
  __shared__ __align__(16) unsigned s[8];
  ptx_cp_async16(s, src + 1);
  ptx_cp_async_wait_all();
  out[0] = s[0];
}
extern "C" __global__ void bug_cp_async_to_global(const unsigned* src, unsigned* out) {
  ptx_cp_async16(out, src);
  ptx_cp_async_wait_all();
}
