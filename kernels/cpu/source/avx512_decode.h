// AVX-512 with byte permutes (VBMI) and bit-matrix products (GFNI), Ice Lake, Zen 4 and later:
// from plane bytes to vectors of weights.
//
// Codes. For 8 neighbouring weights the q plane bytes are a q x 8 bit matrix; its transpose holds
// the 8 codes. One vgf2p8affineqb transposes eight 8 x 8 matrices, so one instruction gives 64
// codes of up to 8 bits, 128 of up to 4 (two codes in a byte) or 256 of 2 (four in a byte).
// Values. q <= 4: vpermps in a 16-entry float table, which reads only the low 4 bits of each
// 32-bit lane, so that a shift is all it takes to go from one code to the next; q = 5: vpermi2ps;
// q >= 6: byte tables (vpermb, vpermi2b) of the low and high bytes of the float16 entries, put
// together by unpacking and widened by vcvtph2ps.
// Order. 64 neighbouring weights give four vectors; vector j is always added to sum j of a token,
// blocks of 64 in ascending order, whatever the number of tokens: one token's result does not
// depend on the others. kDword: lane d of vector j is weight 4d + j. kWord: what unpacking and
// widening leave.
#pragma once
#include <immintrin.h>

#include "block.h"
#include "target.h"

TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni,f16c,fma")

namespace avx512 {

enum Order : int { kDword = 0, kWord = 1 };
constexpr int order(int bits) { return bits <= 5 ? kDword : kWord; }

// Column, within 64, of a lane of a vector.
constexpr int column_of(int order, int vector, int lane) {
  return order == kDword ? 4 * lane + vector
                         : (vector & 1) * 32 + (vector >> 1) * 8 + (lane >> 3) * 16 + (lane & 7);
}

template <int Order>
struct LaneColumns {
  alignas(64) int32_t of[4][16];
  constexpr LaneColumns() : of() {
    for (int v = 0; v < 4; ++v)
      for (int l = 0; l < 16; ++l) of[v][l] = column_of(Order, v, l);
  }
};
template <int Order>
constexpr LaneColumns<Order> kLaneColumns{};

// Byte indices that bring plane bytes to the rows of the bit matrices: matrix i of code group c
// has plane Q-1-j's byte 8c + i in its row 7-j. `bytes`: bytes of one plane in the source;
// `groups`: codes put into one byte, `width`: bits each; `half`: first group.
template <int Q>
struct MatrixBytes {
  alignas(64) uint8_t of[64];
  constexpr MatrixBytes(int bytes, int groups, int width, int half) : of() {
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 8; ++j) {
        const int c = j / width < groups ? j / width : 0;
        const int plane = Q - 1 - (j % width < Q ? j % width : 0);
        of[8 * i + 7 - j] = uint8_t(plane * bytes + 8 * (c + half) + i);
      }
  }
};
template <int Q>
constexpr MatrixBytes<Q> kNibbles{Q == 2 ? 32 : 16, Q == 2 ? 4 : 2, Q == 2 ? 2 : 4, 0};
template <int Q>
constexpr MatrixBytes<Q> kBytes[2] = {{16, 1, 8, 0}, {16, 1, 8, 1}};

INLINE __m512i transpose_bits(__m512i matrices) {
  const __m512i unit = _mm512_set1_epi64(int64_t(0x8040201008040201ull));
  return _mm512_gf2p8affine_epi64_epi8(unit, matrices, 0);
}

template <bool Part>
INLINE __m128i load16(const uint8_t* from, __mmask16 bytes) {
  return Part ? _mm_maskz_loadu_epi8(bytes, from)
              : _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

template <bool Part>
INLINE __m256i load32(const uint8_t* from, __mmask32 bytes) {
  return Part ? _mm256_maskz_loadu_epi8(bytes, from)
              : _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

template <int Planes, bool Part>
INLINE __m512i load_planes(const uint8_t* const* plane, int64_t at, __mmask16 bytes) {
  __m512i v = _mm512_castsi128_si512(load16<Part>(plane[0] + at, bytes));
  if (Planes > 1) v = _mm512_inserti32x4(v, load16<Part>(plane[1] + at, bytes), 1);
  if (Planes > 2) v = _mm512_inserti32x4(v, load16<Part>(plane[2] + at, bytes), 2);
  if (Planes > 3) v = _mm512_inserti32x4(v, load16<Part>(plane[3] + at, bytes), 3);
  return v;
}

// The table of one row in registers, and four vectors of values from 64 codes.
template <int Q>
struct Table {
  __m512 value[Q == 5 ? 2 : 1];
  __m512i low[Q == 8 ? 4 : Q == 7 ? 2 : 1], high[Q == 8 ? 4 : Q == 7 ? 2 : 1];
};

template <int Q>
INLINE Table<Q> load_table(const uint16_t* from) {
  Table<Q> t;
  if constexpr (Q <= 4) {
    __m256i halves;
    if constexpr (Q == 2)
      halves =
          _mm256_set1_epi64x(*reinterpret_cast<const int64_t __attribute__((may_alias))*>(from));
    else if constexpr (Q == 3)
      halves = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    else halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    t.value[0] = _mm512_cvtph_ps(halves);
  } else if constexpr (Q == 5) {
    for (int i = 0; i < 2; ++i)
      t.value[i] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i));
  } else {
    const __m512i even = _mm512_set_epi64(
        0x7e7c7a7876747270, 0x6e6c6a6866646260, 0x5e5c5a5856545250, 0x4e4c4a4846444240,
        0x3e3c3a3836343230, 0x2e2c2a2826242220, 0x1e1c1a1816141210, 0x0e0c0a0806040200);
    const __m512i odd = _mm512_or_si512(even, _mm512_set1_epi8(1));
    for (int i = 0; i < 1 << (Q - 6); ++i) {
      const __m512i a = _mm512_loadu_si512(from + 64 * i),
                    b = _mm512_loadu_si512(from + 64 * i + 32);
      t.low[i] = _mm512_permutex2var_epi8(a, even, b);
      t.high[i] = _mm512_permutex2var_epi8(a, odd, b);
    }
  }
  return t;
}

template <int Q>
INLINE void values(const Table<Q>& t, __m512i codes, __m512* w) {
  if constexpr (Q == 5) {
    w[0] = _mm512_permutex2var_ps(t.value[0], codes, t.value[1]);
    w[1] = _mm512_permutex2var_ps(t.value[0], _mm512_srli_epi32(codes, 8), t.value[1]);
    w[2] = _mm512_permutex2var_ps(t.value[0], _mm512_srli_epi32(codes, 16), t.value[1]);
    w[3] = _mm512_permutex2var_ps(t.value[0], _mm512_srli_epi32(codes, 24), t.value[1]);
  } else {
    __m512i low, high;
    if constexpr (Q == 6) {
      low = _mm512_permutexvar_epi8(codes, t.low[0]);
      high = _mm512_permutexvar_epi8(codes, t.high[0]);
    } else {
      low = _mm512_permutex2var_epi8(t.low[0], codes, t.low[1]);
      high = _mm512_permutex2var_epi8(t.high[0], codes, t.high[1]);
      if constexpr (Q == 8) {
        const __mmask64 upper = _mm512_movepi8_mask(codes);
        low =
            _mm512_mask_blend_epi8(upper, low, _mm512_permutex2var_epi8(t.low[2], codes, t.low[3]));
        high = _mm512_mask_blend_epi8(upper, high,
                                      _mm512_permutex2var_epi8(t.high[2], codes, t.high[3]));
      }
    }
    const __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    w[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(a));
    w[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(a, 1));
    w[2] = _mm512_cvtph_ps(_mm512_castsi512_si256(b));
    w[3] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(b, 1));
  }
}

template <int Q>
constexpr int kChunk = Q == 2 ? 256 : 128;  // weights decoded at once

// Codes of one chunk in one or two registers.
struct Codes {
  __m512i of[2];
};

template <int Q, bool Part>
INLINE Codes load_codes(const Row& row, int64_t at, int64_t bytes) {
  Codes codes;
  if constexpr (Q == 2) {
    const __mmask32 m = Part ? __mmask32((uint64_t(1) << bytes) - 1) : 0;
    const __m512i both =
        _mm512_inserti64x4(_mm512_castsi256_si512(load32<Part>(row.plane[0] + at, m)),
                           load32<Part>(row.plane[1] + at, m), 1);
    codes.of[0] = transpose_bits(_mm512_permutexvar_epi8(_mm512_load_si512(kNibbles<2>.of), both));
  } else if constexpr (Q <= 4) {
    const __mmask16 m = Part ? __mmask16((uint32_t(1) << bytes) - 1) : 0;
    codes.of[0] = transpose_bits(_mm512_permutexvar_epi8(_mm512_load_si512(kNibbles<Q>.of),
                                                         load_planes<Q, Part>(row.plane, at, m)));
  } else {
    const __mmask16 m = Part ? __mmask16((uint32_t(1) << bytes) - 1) : 0;
    const __m512i upper = load_planes<4, Part>(row.plane, at, m);
    const __m512i lower = load_planes<Q - 4, Part>(row.plane + 4, at, m);
    for (int c = 0; c < 2; ++c)
      codes.of[c] = transpose_bits(
          _mm512_permutex2var_epi8(upper, _mm512_load_si512(kBytes<Q>[c].of), lower));
  }
  return codes;
}

// Four vectors for each 64 weights of one chunk, given to `take(block, w)`.
template <int Q, class Take>
INLINE void chunk(const Table<Q>& t, const Codes& codes, int blocks, Take&& take) {
  for (int c = 0; c < blocks; ++c) {
    __m512 w[4];
    if constexpr (Q <= 4) {
      for (int j = 0; j < 4; ++j)
        w[j] = _mm512_permutexvar_ps(
            _mm512_srli_epi32(codes.of[0], unsigned(8 * j + (Q == 2 ? 2 : 4) * c)), t.value[0]);
    } else {
      values<Q>(t, codes.of[c], w);
    }
    take(c, w);
  }
}

// Clears lanes whose column lies behind the row's end, so that padding meets no weight.
template <int Q>
INLINE void clear_behind(int64_t columns, __m512* w) {
  const auto& of = kLaneColumns<order(Q)>.of;
  const __m512i end = _mm512_set1_epi32(int32_t(columns));
  for (int j = 0; j < 4; ++j)
    w[j] = _mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask(_mm512_load_si512(of[j]), end), w[j]);
}

// Gives `sink` the four vectors of every 64 weights of a row, in ascending order.
template <int Q, class Sink>
INLINE void row_values(const Row& row, int64_t columns, int64_t row_bytes, Sink& sink) {
  const Table<Q> t = load_table<Q>(row.table);
  constexpr int64_t n = kChunk<Q>;
  constexpr int blocks = n / 64;
  const int64_t whole = columns / n * n;
  if (whole) {
    Codes codes = load_codes<Q, false>(row, 0, n / 8);
    for (int64_t k = 0; k < whole; k += n) {
      const int64_t next = k + n < whole ? k + n : k;
      const Codes ahead = load_codes<Q, false>(row, next / 8, n / 8);
      chunk<Q>(t, codes, blocks, [&](int c, __m512* w) INLINE_MEMBER { sink(k + 64 * c, w); });
      codes = ahead;
    }
  }
  if (whole < columns) {
    const int64_t bytes = row_bytes - whole / 8;
    chunk<Q>(t, load_codes<Q, true>(row, whole / 8, bytes), int(bytes + 7) / 8,
             [&](int c, __m512* w) INLINE_MEMBER {
               clear_behind<Q>(columns - whole - 64 * c, w);
               sink(whole + 64 * c, w);
             });
  }
}

}  // namespace avx512

TARGET_END
