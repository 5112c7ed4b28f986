// ptx_compat.h: the PTX instructions that a kernel may want, behind one function each.
// Under nvcc / NVRTC they are inline PTX, under emulation exact functions (ptx_emulated.h).
// Kernels call only these names. All need sm_80 or newer. Source: PTX ISA 9.0, section 9.7.
//
//   cp.async      ptx_cp_async{4,8,16}(dst, src, ok = true)     ok = false: zero fill, src is not read
//                 ptx_cp_async{4,8,16}_zfill(dst, src, n)       the first n bytes are copied, the rest is zero
//                 ptx_cp_async_commit(), ptx_cp_async_wait<N>(), ptx_cp_async_wait_all()
//   ldmatrix      ptx_ldmatrix_x4, _x4_trans, _x2, _x2_trans(r, row address of this lane)
//   mma           ptx_mma_m16n8k16_f16, ptx_mma_m16n8k16_bf16 (float d += a b), ptx_mma_m16n8k32_s8 (int d += a b),
//                 ptx_mma_m16n8k8_tf32 (float d += a b; operands are float bits whose low 13 bits do not count)
//   bits          ptx_prmt(a, b, selector), ptx_lop3<immLut>(a, b, c)
//   global loads  ptx_ld_global_nc_v2 / _v4(p): read once, not kept in L1; _evict_first_v2 / _v4(p): first to leave L1
//   conversion    ptx_cvt_f16x2(lo, hi), ptx_cvt_bf16x2(lo, hi): two floats to a packed pair, rounded to nearest even
//
// Fragments, lane = 4 g + t (g = 0..7, t = 0..3); four int8 or two 16-bit values a register, lowest first:
//   s8  A[16][32]: a[0] row g, columns 4t..4t+3; a[1] row g+8; a[2] row g, columns 16+4t..; a[3] row g+8, columns 16+4t..
//       B[32][8]:  b[0] rows 4t..4t+3 of column g; b[1] rows 16+4t..
//   f16 A[16][16]: a[0] row g, columns 2t, 2t+1; a[1] row g+8; a[2], a[3] the same rows, columns 8+2t..
//       B[16][8]:  b[0] rows 2t, 2t+1 of column g; b[1] rows 8+2t..
//   tf32 A[16][8]: a[0] row g, column t; a[1] row g+8; a[2], a[3] the same rows, column 4+t
//       B[8][8]:   b[0] row t of column g; b[1] row 4+t
//   D[16][8]:      d[0], d[1] row g, columns 2t, 2t+1; d[2], d[3] row g+8
#pragma once
#if defined(CUEMU)
#include "ptx_emulated.h"
#else
#define PTXC static __device__ __forceinline__
PTXC unsigned ptx_smem(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }

// ---------------------------------------------------------------- cp.async
PTXC void ptx_cp_async16_zfill(void* dst, const void* src, int n) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(ptx_smem(dst)), "l"(src), "r"(n) : "memory");
}
PTXC void ptx_cp_async8_zfill(void* dst, const void* src, int n) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(ptx_smem(dst)), "l"(src), "r"(n) : "memory");
}
PTXC void ptx_cp_async4_zfill(void* dst, const void* src, int n) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(ptx_smem(dst)), "l"(src), "r"(n) : "memory");
}
PTXC void ptx_cp_async16(void* dst, const void* src, bool ok = true) { ptx_cp_async16_zfill(dst, src, ok ? 16 : 0); }
PTXC void ptx_cp_async8(void* dst, const void* src, bool ok = true) { ptx_cp_async8_zfill(dst, src, ok ? 8 : 0); }
PTXC void ptx_cp_async4(void* dst, const void* src, bool ok = true) { ptx_cp_async4_zfill(dst, src, ok ? 4 : 0); }
PTXC void ptx_cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
template <int N> PTXC void ptx_cp_async_wait() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory"); }
PTXC void ptx_cp_async_wait_all() { asm volatile("cp.async.wait_all;\n" ::: "memory"); }

// ---------------------------------------------------------------- ldmatrix
#define PTXC_LDMATRIX4(name, mods)                                                            \
  PTXC void name(unsigned r[4], const void* row) {                                            \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" mods ".shared.b16 {%0,%1,%2,%3}, [%4];\n"    \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(ptx_smem(row)) : "memory"); \
  }
#define PTXC_LDMATRIX2(name, mods)                                                            \
  PTXC void name(unsigned r[2], const void* row) {                                            \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" mods ".shared.b16 {%0,%1}, [%2];\n"          \
                 : "=r"(r[0]), "=r"(r[1]) : "r"(ptx_smem(row)) : "memory");                   \
  }
PTXC_LDMATRIX4(ptx_ldmatrix_x4, "")
PTXC_LDMATRIX4(ptx_ldmatrix_x4_trans, ".trans")
PTXC_LDMATRIX2(ptx_ldmatrix_x2, "")
PTXC_LDMATRIX2(ptx_ldmatrix_x2_trans, ".trans")

// ---------------------------------------------------------------- mma
#define PTXC_MMA(name, T, con, shape)                                                         \
  PTXC void name(T d[4], const unsigned a[4], const unsigned b[2]) {                          \
    asm volatile("mma.sync.aligned." shape " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
                 : con(d[0]), con(d[1]), con(d[2]), con(d[3])                                 \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));         \
  }
PTXC_MMA(ptx_mma_m16n8k16_f16, float, "+f", "m16n8k16.row.col.f32.f16.f16.f32")
PTXC_MMA(ptx_mma_m16n8k16_bf16, float, "+f", "m16n8k16.row.col.f32.bf16.bf16.f32")
PTXC_MMA(ptx_mma_m16n8k8_tf32, float, "+f", "m16n8k8.row.col.f32.tf32.tf32.f32")
PTXC_MMA(ptx_mma_m16n8k32_s8, int, "+r", "m16n8k32.row.col.s32.s8.s8.s32")

// ---------------------------------------------------------------- bits (not volatile: free to move)
PTXC unsigned ptx_prmt(unsigned a, unsigned b, unsigned selector) {
  unsigned r;
  asm("prmt.b32 %0, %1, %2, %3;\n" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
  return r;
}
template <int immLut> PTXC unsigned ptx_lop3(unsigned a, unsigned b, unsigned c) {
  unsigned r;
  asm("lop3.b32 %0, %1, %2, %3, %4;\n" : "=r"(r) : "r"(a), "r"(b), "r"(c), "n"(immLut));
  return r;
}

// ---------------------------------------------------------------- global loads of data that no kernel in flight writes
#define PTXC_LOAD4(name, hint)                                                                \
  PTXC uint4 name(const void* p) {                                                            \
    uint4 v;                                                                                  \
    asm volatile("ld.global.nc." hint ".v4.u32 {%0,%1,%2,%3}, [%4];\n"                        \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));                      \
    return v;                                                                                 \
  }
#define PTXC_LOAD2(name, hint)                                                                \
  PTXC uint2 name(const void* p) {                                                            \
    uint2 v;                                                                                  \
    asm volatile("ld.global.nc." hint ".v2.u32 {%0,%1}, [%2];\n" : "=r"(v.x), "=r"(v.y) : "l"(p)); \
    return v;                                                                                 \
  }
PTXC_LOAD4(ptx_ld_global_nc_v4, "L1::no_allocate")
PTXC_LOAD2(ptx_ld_global_nc_v2, "L1::no_allocate")
PTXC_LOAD4(ptx_ld_global_nc_evict_first_v4, "L1::evict_first")
PTXC_LOAD2(ptx_ld_global_nc_evict_first_v2, "L1::evict_first")

// ---------------------------------------------------------------- conversion
PTXC unsigned ptx_cvt_f16x2(float lo, float hi) {
  unsigned r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
PTXC unsigned ptx_cvt_bf16x2(float lo, float hi) {
  unsigned r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;\n" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
#endif
