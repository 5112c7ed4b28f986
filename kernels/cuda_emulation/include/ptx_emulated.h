// ptx_emulated.h: the host side of ptx_compat.h. Every fragment layout follows PTX ISA 9.0, section 9.7.14.5.
#pragma once
#include "cuda_fp16.h"

namespace cuemu {
// ---------------------------------------------------------------- cp.async
static inline void need_shared(const char* op, const void* p) {
  if (!is_shared(p)) fail("%s: %p is not in shared memory", op, p);
}
static inline void cp_async(void* dst, const void* src, int size, int n) {
  if (((size_t)dst | (n ? (size_t)src : 0)) & (size_t)(size - 1)) fail("cp.async: address not aligned to its %d bytes", size);
  if (n < 0 || n > size) fail("cp.async: %d source bytes of %d", n, size);
  need_shared("cp.async", dst);
  need_shared("cp.async", (char*)dst + size - 1);
  if (n && is_shared(src)) fail("cp.async: the source is shared memory");
  g.cur->pending.push_back({dst, src, size, n});
  memset(dst, 0xFF, size);  // what has not landed is not there yet
}
static inline void land(const std::vector<Copy>& copies) {
  for (auto& c : copies) {
    memcpy(c.dst, c.src, c.src_n);
    memset((char*)c.dst + c.src_n, 0, c.n - c.src_n);
  }
}
static inline void cp_async_wait(size_t left) {
  auto& groups = g.cur->groups;
  while (groups.size() > left) { land(groups.front()); groups.erase(groups.begin()); }
}

// ---------------------------------------------------------------- warp-wide instructions
static inline void need_full_warp(const char* op, uint32_t present) {
  if (present != 0xffffffffu) fail("%s: lanes 0x%08x of the warp have exited or do not exist", op, ~present);
}
struct LdMatrix { unsigned* r; const char* row; };
template <int X, bool TRANS> static void ldmatrix(void** lanes, uint32_t present) {
  need_full_warp("ldmatrix", present);
  for (int m = 0; m < X; ++m) for (int l = 0; l < 32; ++l) {
    uint16_t h[2];
    for (int j = 0; j < 2; ++j) {
      int r = l / 4, c = l % 4 * 2 + j;
      if (TRANS) std::swap(r, c);
      memcpy(&h[j], ((LdMatrix*)lanes[m * 8 + r])->row + 2 * c, 2);
    }
    ((LdMatrix*)lanes[l])->r[m] = h[0] | (unsigned)h[1] << 16;
  }
}
template <int X, bool TRANS> static inline void ldmatrix_call(const char* op, unsigned* r, const void* row) {
  if (laneid() < 8 * X) {  // the addresses of lanes 8 X and above are not used
    if ((size_t)row & 15) fail("%s: row address not aligned to 16 bytes", op);
    need_shared(op, row);
    need_shared(op, (const char*)row + 15);
  }
  LdMatrix q{r, (const char*)row};
  warp_coll(0xffffffffu, op, &q, ldmatrix<X, TRANS>);
}

template <class T> struct Mma { T* d; const unsigned *a, *b; };
static inline float half_at(unsigned r, int i) { return h2f((uint16_t)(r >> 16 * i)); }
static inline float bf16_at(unsigned r, int i) { return bf2f((uint16_t)(r >> 16 * i)); }
static inline float tf32_at(unsigned r, int) { return cuemu_bits<float>(r & 0xFFFFE000u); }
static inline int byte_at(unsigned r, int i) { return (signed char)(r >> 8 * i); }
// PACK values a register; a K of 8 registers' width. Sums run upwards in k from the accumulator.
template <class T, class V, int PACK, V (*AT)(unsigned, int)> static void mma(void** lanes, uint32_t present) {
  need_full_warp("mma", present);
  typedef Mma<T> M;
  constexpr int K = 8 * PACK;
  V A[16][K], B[8][K];
  for (int l = 0; l < 32; ++l) {
    const M* m = (const M*)lanes[l];
    const int gid = l >> 2, t = l & 3;
    for (int i = 0; i < PACK; ++i) {
      const int k = t * PACK + i, k2 = k + 4 * PACK;
      A[gid][k] = AT(m->a[0], i); A[gid + 8][k] = AT(m->a[1], i);
      A[gid][k2] = AT(m->a[2], i); A[gid + 8][k2] = AT(m->a[3], i);
      B[gid][k] = AT(m->b[0], i); B[gid][k2] = AT(m->b[1], i);
    }
  }
  for (int l = 0; l < 32; ++l) for (int i = 0; i < 4; ++i) {
    const V *a = A[(l >> 2) + (i >= 2 ? 8 : 0)], *b = B[(l & 3) * 2 + (i & 1)];
    T* d = ((const M*)lanes[l])->d + i;
    if constexpr (std::is_integral_v<T>) {
      int s = 0;  // 32 products of int8: no overflow; the accumulator itself wraps
      for (int k = 0; k < K; ++k) s += a[k] * b[k];
      *d = (T)((unsigned)*d + (unsigned)s);
    } else {
      T s = *d;
      for (int k = 0; k < K; ++k) s += a[k] * b[k];
      *d = s;
    }
  }
}
}  // namespace cuemu

#define PTXE static inline
PTXE void ptx_cp_async16_zfill(void* dst, const void* src, int n) { cuemu::cp_async(dst, src, 16, n); }
PTXE void ptx_cp_async8_zfill(void* dst, const void* src, int n) { cuemu::cp_async(dst, src, 8, n); }
PTXE void ptx_cp_async4_zfill(void* dst, const void* src, int n) { cuemu::cp_async(dst, src, 4, n); }
PTXE void ptx_cp_async16(void* dst, const void* src, bool ok = true) { cuemu::cp_async(dst, src, 16, ok ? 16 : 0); }
PTXE void ptx_cp_async8(void* dst, const void* src, bool ok = true) { cuemu::cp_async(dst, src, 8, ok ? 8 : 0); }
PTXE void ptx_cp_async4(void* dst, const void* src, bool ok = true) { cuemu::cp_async(dst, src, 4, ok ? 4 : 0); }
PTXE void ptx_cp_async_commit() { auto* f = cuemu::g.cur; f->groups.push_back(std::move(f->pending)); f->pending.clear(); }
template <int N> PTXE void ptx_cp_async_wait() { cuemu::cp_async_wait(N); }
PTXE void ptx_cp_async_wait_all() { ptx_cp_async_commit(); cuemu::cp_async_wait(0); }

PTXE void ptx_ldmatrix_x4(unsigned r[4], const void* row) { cuemu::ldmatrix_call<4, false>("ldmatrix.x4", r, row); }
PTXE void ptx_ldmatrix_x4_trans(unsigned r[4], const void* row) { cuemu::ldmatrix_call<4, true>("ldmatrix.x4.trans", r, row); }
PTXE void ptx_ldmatrix_x2(unsigned r[2], const void* row) { cuemu::ldmatrix_call<2, false>("ldmatrix.x2", r, row); }
PTXE void ptx_ldmatrix_x2_trans(unsigned r[2], const void* row) { cuemu::ldmatrix_call<2, true>("ldmatrix.x2.trans", r, row); }

PTXE void ptx_mma_m16n8k16_f16(float d[4], const unsigned a[4], const unsigned b[2]) {
  cuemu::Mma<float> q{d, a, b};
  cuemu::warp_coll(0xffffffffu, "mma.m16n8k16.f16", &q, cuemu::mma<float, float, 2, cuemu::half_at>);
}
PTXE void ptx_mma_m16n8k16_bf16(float d[4], const unsigned a[4], const unsigned b[2]) {
  cuemu::Mma<float> q{d, a, b};
  cuemu::warp_coll(0xffffffffu, "mma.m16n8k16.bf16", &q, cuemu::mma<float, float, 2, cuemu::bf16_at>);
}
PTXE void ptx_mma_m16n8k8_tf32(float d[4], const unsigned a[4], const unsigned b[2]) {
  cuemu::Mma<float> q{d, a, b};
  cuemu::warp_coll(0xffffffffu, "mma.m16n8k8.tf32", &q, cuemu::mma<float, float, 1, cuemu::tf32_at>);
}
PTXE void ptx_mma_m16n8k32_s8(int d[4], const unsigned a[4], const unsigned b[2]) {
  cuemu::Mma<int> q{d, a, b};
  cuemu::warp_coll(0xffffffffu, "mma.m16n8k32.s8", &q, cuemu::mma<int, int, 4, cuemu::byte_at>);
}

// default mode: selector nibble i picks byte (nibble & 7) of {b, a}; its bit 3 replicates that byte's sign over the byte
PTXE unsigned ptx_prmt(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> 4 * i & 0xF;
    unsigned v = (unsigned)(bytes >> 8 * (pick & 7)) & 0xFF;
    if (pick & 8) v = v & 0x80 ? 0xFF : 0;
    r |= v << 8 * i;
  }
  return r;
}
// bit (4 a + 2 b + c) of immLut is the result
template <int immLut> PTXE unsigned ptx_lop3(unsigned a, unsigned b, unsigned c) {
  static_assert(immLut >= 0 && immLut < 256, "immLut is 8 bits");
  unsigned r = 0;
  if (immLut & 0x01) r |= ~a & ~b & ~c;
  if (immLut & 0x02) r |= ~a & ~b & c;
  if (immLut & 0x04) r |= ~a & b & ~c;
  if (immLut & 0x08) r |= ~a & b & c;
  if (immLut & 0x10) r |= a & ~b & ~c;
  if (immLut & 0x20) r |= a & ~b & c;
  if (immLut & 0x40) r |= a & b & ~c;
  if (immLut & 0x80) r |= a & b & c;
  return r;
}

template <class V> static inline V ptx_load(const void* p) {
  if ((size_t)p & (sizeof(V) - 1)) cuemu::fail("ld.global: address not aligned to its %zu bytes", sizeof(V));
  if (cuemu::is_shared(p)) cuemu::fail("ld.global: the address is shared memory");
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}
PTXE uint4 ptx_ld_global_nc_v4(const void* p) { return ptx_load<uint4>(p); }
PTXE uint2 ptx_ld_global_nc_v2(const void* p) { return ptx_load<uint2>(p); }
PTXE uint4 ptx_ld_global_nc_evict_first_v4(const void* p) { return ptx_load<uint4>(p); }
PTXE uint2 ptx_ld_global_nc_evict_first_v2(const void* p) { return ptx_load<uint2>(p); }

PTXE unsigned ptx_cvt_f16x2(float lo, float hi) { return cuemu::f2h(lo) | (unsigned)cuemu::f2h(hi) << 16; }
PTXE unsigned ptx_cvt_bf16x2(float lo, float hi) { return cuemu::f2bf(lo) | (unsigned)cuemu::f2bf(hi) << 16; }
