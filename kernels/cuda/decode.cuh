// decode.cuh: from bit planes to int8 fragments of the tensor cores, in registers.
//
// Lane 4g + t of a warp holds, of each plane, one word of row g and one of row g + 8 (tile_layout.py):
// its 32 columns of a tile are k = 32 a + 16 (i >> 2) + 4 t + (i & 3), and plane p keeps column (a, i) at
// bit 4 i + ((3 - p - a) & 3). At one step a the four planes of a set occupy different bits of a nibble,
// so that the nibbles of eight weights are put together by masks alone, rotated by a.
//
//   2..4 bits   the table of a row lies in registers, once per rotation; PRMT looks four weights up
//   5..8 bits   the table lies in shared memory, one copy per lane (bank), so that no lookup waits for another
//
// A fragment of mma.m16n8k32.s8: a[0], a[2] row g (i = 0..3, i = 4..7); a[1], a[3] row g + 8.
#pragma once
#include "ptx_compat.h"

#define DECODE_INLINE static __device__ __forceinline__

constexpr int kUnitBytes = 512;                                             // of one plane: 16 rows x 256 columns
__host__ __device__ constexpr int table_terms(int bits) { return bits >= 6 ? 2 : 1; }           // int8 parts of an entry: high, low
__host__ __device__ constexpr int row_table_bytes(int bits) { return table_terms(bits) << bits; }
__host__ __device__ constexpr bool in_registers(int bits) { return bits <= 4; }

// A value the compiler cannot follow: what a loop makes of it stays in the loop, and what one width makes of it out of
// the registers of the others.
DECODE_INLINE int opaque(int value) {
#if !defined(CUEMU)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// bits of a where mask is 1, of b elsewhere
DECODE_INLINE unsigned select_bits(unsigned mask, unsigned a, unsigned b) { return ptx_lop3<0xCA>(mask, a, b); }

// Nibbles of step A from the N planes of one set (first plane: the most significant bit); absent bits are 0.
template <int A, int N> DECODE_INLINE unsigned gather_nibbles(const unsigned* p) {
  if constexpr (N == 4) {
    const unsigned even = select_bits(0x55555555u, p[(3 - A) & 3], p[(2 - A) & 3]);
    const unsigned odd = select_bits(0x55555555u, p[(1 - A) & 3], p[(0 - A) & 3]);
    return select_bits(0x33333333u, even, odd);
  } else {
    unsigned n = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) n |= p[j] & (0x11111111u << ((3 - j - A) & 3));
    return n;
  }
}
// The same with plane j of the set at bit 3 - j, whatever A is.
template <int A, int N> DECODE_INLINE unsigned gather_codes(const unsigned* p) {
  const unsigned n = gather_nibbles<A, N>(p);
  if constexpr (A == 0) return n;
  return select_bits(0x11111111u * ((15 << A) & 15), n << A, n >> (4 - A));
}

// ---------------------------------------------------------------- tables in registers
template <int Q> struct RegisterTable;

// lo, hi: weights i = 0..3 and 4..7 of step A of one row, one int8 a byte
template <> struct RegisterTable<2> {
  unsigned plain, pairs[2], swapped;
  DECODE_INLINE void load(RegisterTable& r, const unsigned char* row) {
    r.plain = *(const unsigned*)row;
    r.pairs[0] = ptx_prmt(r.plain, 0, 0x1100);
    r.pairs[1] = ptx_prmt(r.plain, 0, 0x3322);
    r.swapped = ptx_prmt(r.plain, 0, 0x3120);
  }
  template <int A> DECODE_INLINE void lookup(const RegisterTable& r, const unsigned* p, unsigned& lo, unsigned& hi) {
    unsigned n;
    if constexpr (A == 3) n = (p[0] & 0x11111111u) | ((p[1] >> 2) & 0x22222222u);
    else n = gather_nibbles<A, 2>(p);
    const unsigned first = A == 0 ? n >> 1 : n, second = A == 0 ? n >> 17 : n >> 16;
    const unsigned t0 = A < 2 ? r.pairs[0] : A == 2 ? r.plain : r.swapped;
    const unsigned t1 = A < 2 ? r.pairs[1] : t0;
    lo = ptx_prmt(t0, t1, first);
    hi = ptx_prmt(t0, t1, second);
  }
};

template <> struct RegisterTable<3> {
  unsigned t[3][2];  // by order of the index bits: planes 0 1 2, planes 2 0 1, planes 2 1 0
  DECODE_INLINE void load(RegisterTable& r, const unsigned char* row) {
    const uint2 v = *(const uint2*)row;
    r.t[0][0] = v.x;
    r.t[0][1] = v.y;
    r.t[1][0] = ptx_prmt(v.x, v.y, 0x6420);
    r.t[1][1] = ptx_prmt(v.x, v.y, 0x7531);
    r.t[2][0] = ptx_prmt(v.x, v.y, 0x6240);
    r.t[2][1] = ptx_prmt(v.x, v.y, 0x7351);
  }
  template <int A> DECODE_INLINE void lookup(const RegisterTable& r, const unsigned* p, unsigned& lo, unsigned& hi) {
    unsigned n;
    if constexpr (A == 2) n = (p[0] & 0x22222222u) | (p[1] & 0x11111111u) | ((p[2] >> 1) & 0x44444444u);
    else if constexpr (A == 3) n = (p[0] & 0x11111111u) | ((p[1] >> 2) & 0x22222222u) | (p[2] & 0x44444444u);
    else n = gather_nibbles<A, 3>(p);
    const unsigned first = A == 0 ? n >> 1 : n, second = A == 0 ? n >> 17 : n >> 16;
    constexpr int order = A < 2 ? 0 : A - 1;
    lo = ptx_prmt(r.t[order][0], r.t[order][1], first);
    hi = ptx_prmt(r.t[order][0], r.t[order][1], second);
  }
};

template <> struct RegisterTable<4> {
  unsigned t[4][4];  // copy A: entry j is the table's entry at j rotated left by A within its four bits
  unsigned fours;    // 0x44444444, in a register: an instruction holds one constant
  DECODE_INLINE void load(RegisterTable& r, const unsigned char* row) {
    const uint4 v = *(const uint4*)row;
    const unsigned w[4] = {v.x, v.y, v.z, v.w};
    r.fours = opaque(0x44444444);
#pragma unroll
    for (int j = 0; j < 4; ++j) r.t[0][j] = w[j];
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // j = j1 j0; entry (j1 j0 b1 b0) comes from (j0 b1 b0 j1) and from (b0 j1 j0 b1)
      r.t[1][j] = ptx_prmt(w[2 * (j & 1)], w[2 * (j & 1) + 1], j < 2 ? 0x6420 : 0x7531);
      r.t[3][j] = ptx_prmt(w[j >> 1], w[2 + (j >> 1)], j & 1 ? 0x7362 : 0x5140);
    }
    const unsigned low01 = ptx_prmt(w[0], w[1], 0x5140), low23 = ptx_prmt(w[2], w[3], 0x5140);
    const unsigned high01 = ptx_prmt(w[0], w[1], 0x7362), high23 = ptx_prmt(w[2], w[3], 0x7362);
    r.t[2][0] = ptx_prmt(low01, low23, 0x5410);
    r.t[2][1] = ptx_prmt(low01, low23, 0x7632);
    r.t[2][2] = ptx_prmt(high01, high23, 0x5410);
    r.t[2][3] = ptx_prmt(high01, high23, 0x7632);
  }
  template <int A> DECODE_INLINE void lookup(const RegisterTable& r, const unsigned* p, unsigned& lo, unsigned& hi) {
    const unsigned n = gather_nibbles<A, 4>(p);
    const unsigned s = n & 0x77777777u, m = ptx_lop3<0xEA>(n >> 1, r.fours, 0x32103210u);  // (n >> 1) & fours | ..
    const unsigned* t = r.t[A];
    lo = ptx_prmt(ptx_prmt(t[0], t[1], s), ptx_prmt(t[2], t[3], s), m);
    hi = ptx_prmt(ptx_prmt(t[0], t[1], s >> 16), ptx_prmt(t[2], t[3], s >> 16), m >> 16);
  }
};

// Decodes step A: planes[p][row of the pair] to the fragment a (one term: high is not used).
template <int Q> struct RegisterDecoder {
  RegisterTable<Q> row[2];
  DECODE_INLINE void load(RegisterDecoder& d, const unsigned char* first, const unsigned char* second) {
    RegisterTable<Q>::load(d.row[0], first);
    RegisterTable<Q>::load(d.row[1], second);
  }
  template <int A> DECODE_INLINE void step(const RegisterDecoder& d, const unsigned planes[2][Q], unsigned a[1][4]) {
    RegisterTable<Q>::template lookup<A>(d.row[0], planes[0], a[0][0], a[0][2]);
    RegisterTable<Q>::template lookup<A>(d.row[1], planes[1], a[0][1], a[0][3]);
  }
};

// ---------------------------------------------------------------- tables in shared memory
// Word of one code: row g's entry, then row g + 8's; one byte each, or two (low, high) from 6 bits on.
// STRIDE bytes lead from one code to the next: 128 = a copy per lane, 32 = one per row pair g.
template <int Q, int STRIDE> struct SharedDecoder {
  static constexpr int kTerms = table_terms(Q);
  const unsigned char* tables;  // of all warps
  unsigned offset;              // of this lane's word of code 0

  DECODE_INLINE void place(SharedDecoder& d, const unsigned char* tables, int index, int lane) {
    d.tables = tables;
    d.offset = index * (STRIDE << Q) + (STRIDE == 128 ? lane * 4 : (lane >> 2) * 4);
  }
  // Write the 16-byte pieces part, part + parts, ... of both rows' tables.
  DECODE_INLINE void fill(const SharedDecoder& d, unsigned char* tables, const unsigned char* first, const unsigned char* second, int part,
                          int parts) {
    constexpr int kEntries = 16 / kTerms;
    for (int piece = part; piece < row_table_bytes(Q) / 16; piece += parts) {
      const uint4 x = ((const uint4*)first)[piece], y = ((const uint4*)second)[piece];
      const unsigned a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
      unsigned* out = (unsigned*)(tables + d.offset + piece * kEntries * STRIDE);
#pragma unroll
      for (int j = 0; j < kEntries; ++j) {
        if constexpr (kTerms == 2) out[j * STRIDE / 4] = ptx_prmt(a[j / 2], b[j / 2], j & 1 ? 0x7632 : 0x5410);
        else out[j * STRIDE / 4] = ptx_prmt(a[j / 4], b[j / 4], (j & 3) | (4 + (j & 3)) << 4);
      }
    }
  }
  // byte J of x is code << (8 - Q); half: row of the pair
  template <int J> DECODE_INLINE unsigned entry(const SharedDecoder& d, unsigned x, int half) {
    constexpr int shift = Q - 8 + (STRIDE == 128 ? 7 : 5);
    const unsigned byte = ptx_prmt(x, 0, 0x4440 | J);
    const unsigned char* p = d.tables + (byte * (1u << shift) + d.offset);
    if constexpr (kTerms == 2) return ((const unsigned short*)p)[half];
    else return p[half];
  }
  // Four weights: columns even J, odd J, even J + 1, odd J + 1.
  template <int J> DECODE_INLINE void four(const SharedDecoder& d, unsigned even, unsigned odd, int half, unsigned* a,
                                           int at) {
    const unsigned e0 = entry<J>(d, even, half), e1 = entry<J>(d, odd, half);
    const unsigned e2 = entry<J + 1>(d, even, half), e3 = entry<J + 1>(d, odd, half);
    if constexpr (kTerms == 2) {
      const unsigned x = ptx_prmt(e0, e1, 0x5140), y = ptx_prmt(e2, e3, 0x5140);  // low low high high
      a[at] = ptx_prmt(x, y, 0x7632);
      a[4 + at] = ptx_prmt(x, y, 0x5410);
    } else {
      a[at] = ptx_prmt(ptx_prmt(e0, e1, 0x0040), ptx_prmt(e2, e3, 0x0040), 0x5410);
    }
  }
  // a[0]: the high terms (or the only ones), a[1]: the low terms
  template <int A> DECODE_INLINE void step(const SharedDecoder& d, const unsigned planes[2][Q], unsigned a[kTerms][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned n = gather_codes<A, 4>(planes[half]), m = gather_codes<A, Q - 4>(planes[half] + 4);
      const unsigned even = ((n & 0x0f0f0f0fu) << 4) | (m & 0x0f0f0f0fu);
      const unsigned odd = (n & 0xf0f0f0f0u) | ((m >> 4) & 0x0f0f0f0fu);
      four<0>(d, even, odd, half, a[0], half);
      four<2>(d, even, odd, half, a[0], 2 + half);
    }
  }
};
