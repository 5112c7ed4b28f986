// Bit planes in arena pages to codes, and codes to weights through a row table in shared memory.
#pragma once
#include <cuda_fp16.h>

// Where the planes and tables of all blocks lie; the arrays of runtime page tables, on the device.
struct PageView {
  const unsigned char* arena;
  const int* bits;         // [blocks]
  const int* plane_pages;  // [blocks, parent_bits, plane_list]
  const int* table_pages;  // [blocks, parent_bits - min_bits + 1, table_list]
  int parent_bits, min_bits, plane_list, table_list, page_shift;
};

// The address of byte `at` of a stream cut into pages. `pages` is the stream's own list.
__device__ __forceinline__ const unsigned char* page_address(const PageView& v, const int* pages, size_t at) {
  const size_t in_page = at & (((size_t)1 << v.page_shift) - 1);
  return v.arena + ((size_t)__ldg(pages + (at >> v.page_shift)) << v.page_shift) + in_page;
}
__device__ __forceinline__ unsigned plane_word(const PageView& v, const int* pages, size_t word) {
  return __ldg(reinterpret_cast<const unsigned*>(page_address(v, pages, 4 * word)));
}

// Rows come in tiles of 16; lane = 4 g + t serves rows g and g + 8. A tile's table lies in shared memory as
// halves [2][2^q][8]: half, code, row within the half. Lanes of different g never meet in one 16-bit place.
__device__ __forceinline__ int table_place(int row_in_tile, int code, int bits) {
  return ((row_in_tile >> 3) << (bits + 3)) + (code << 3) + (row_in_tile & 7);
}
// rows [first_row, first_row + 16) of a table of [rows, 2^bits] halves; rows outside it become zero
__device__ __forceinline__ void load_table(const PageView& v, const int* pages, __half* table, int first_row, int rows,
                                           int bits, int thread, int num_threads) {
  for (int i = thread; i < 16 << bits; i += num_threads) {
    const int row = i >> bits, code = i & ((1 << bits) - 1);
    __half value = __float2half(0.f);
    if (first_row + row < rows) {
      const size_t at = (((size_t)(first_row + row) << bits) + code) * 2;
      value = *reinterpret_cast<const __half*>(page_address(v, pages, at));
    }
    table[table_place(row, code, bits)] = value;
  }
}

// Four codes in one register: byte j holds the code of column s + 8 j of a word. Plane p is bit Q - 1 - p of the
// code; its words come turned left by that much (see load_two_words), so one turn and one mask place four bits.
template <int Q>
__device__ __forceinline__ unsigned four_codes(const unsigned (&word)[Q], int s) {
  unsigned codes = 0;
#pragma unroll
  for (int p = 0; p < Q; ++p) codes |= __funnelshift_r(word[p], word[p], s) & (0x01010101u << (Q - 1 - p));
  return codes;
}

// Words `first_word` and `first_word + 1` of one row of every plane, turned left by Q - 1 - p; 0 behind the row's end.
// A page list is the same length for every plane, so page and place are worked out once.
template <int Q>
__device__ __forceinline__ void load_two_words(const PageView& v, const int* planes, int row, int words, bool row_ok,
                                               int first_word, unsigned (&a)[Q], unsigned (&b)[Q]) {
  const int held = row_ok ? min(2, words - first_word) : 0;
  const size_t at = 4 * ((size_t)row * words + first_word), next = at + 4;
  const size_t mask = ((size_t)1 << v.page_shift) - 1;
  const int *list_a = planes + (at >> v.page_shift), *list_b = planes + (next >> v.page_shift);
  const unsigned char *in_a = v.arena + (at & mask), *in_b = v.arena + (next & mask);
  if (held == 2 && !(words & 1)) {  // an even row keeps pairs aligned, and no page border lies inside one
#pragma unroll
    for (int p = 0; p < Q; ++p) {
      const size_t page = (size_t)__ldg(list_a + p * v.plane_list) << v.page_shift;
      const uint2 pair = __ldg(reinterpret_cast<const uint2*>(in_a + page));
      a[p] = pair.x;
      b[p] = pair.y;
    }
  } else {
#pragma unroll
    for (int p = 0; p < Q; ++p) {
      a[p] = b[p] = 0;
      if (held > 0) a[p] = __ldg(reinterpret_cast<const unsigned*>(in_a + ((size_t)__ldg(list_a + p * v.plane_list) << v.page_shift)));
      if (held > 1) b[p] = __ldg(reinterpret_cast<const unsigned*>(in_b + ((size_t)__ldg(list_b + p * v.plane_list) << v.page_shift)));
    }
  }
#pragma unroll
  for (int p = 0; p < Q; ++p) {
    a[p] = __funnelshift_l(a[p], a[p], Q - 1 - p);
    b[p] = __funnelshift_l(b[p], b[p], Q - 1 - p);
  }
}
