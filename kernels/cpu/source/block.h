// One weight block at its committed width, and where a row of it lies.
//
// A plane is [rows, row_bytes] bytes, a table [rows, 2^bits] float16. Both are either contiguous
// or cut into pages of an arena: byte k of a stream is
//     arena[(pages[k >> page_shift] << page_shift) + (k & (page_bytes - 1))].
// A table row never straddles two pages; a plane row may, and is then copied into a side buffer.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

constexpr int kMaxBits = 8;

struct Block {
  int32_t bits;
  int32_t page_shift;  // < 0: contiguous
  int64_t rows, columns, row_bytes;
  const uint8_t* planes;       // contiguous planes, or the arena
  const uint8_t* table;        // contiguous table of width bits
  const int32_t* plane_pages;  // [bits, plane_list] page ids
  const int32_t* table_pages;  // page ids
  int64_t plane_list;          // entries from one plane's page list to the next
};

struct Row {
  const uint8_t* plane[kMaxBits];
  const uint16_t* table;
};

inline const uint8_t* paged_byte(const Block& b, const int32_t* pages, int64_t k) {
  const int64_t page = pages[k >> b.page_shift];
  return b.planes + (page << b.page_shift) + (k & ((int64_t(1) << b.page_shift) - 1));
}

// Copies a plane row that lies on two or more pages.
inline void copy_straddling(const Block& b, const int32_t* pages, int64_t k, uint8_t* to) {
  const int64_t page_bytes = int64_t(1) << b.page_shift;
  int64_t left = b.row_bytes;
  while (left > 0) {
    const int64_t here = page_bytes - (k & (page_bytes - 1));
    const int64_t n = here < left ? here : left;
    std::memcpy(to, paged_byte(b, pages, k), size_t(n));
    to += n, k += n, left -= n;
  }
}

// side: at least bits * row_bytes bytes, alive as long as the row is read.
inline Row locate(const Block& b, int64_t row, uint8_t* side) {
  Row r;
  const int64_t start = row * b.row_bytes;
  const int64_t table_start = row << (b.bits + 1);
  if (b.page_shift < 0) {
    const int64_t stride = b.rows * b.row_bytes;
    for (int p = 0; p < b.bits; ++p) r.plane[p] = b.planes + p * stride + start;
    r.table = reinterpret_cast<const uint16_t*>(b.table + table_start);
    return r;
  }
  const bool whole = start >> b.page_shift == (start + b.row_bytes - 1) >> b.page_shift;
  for (int p = 0; p < b.bits; ++p) {
    const int32_t* pages = b.plane_pages + p * b.plane_list;
    if (whole) {
      r.plane[p] = paged_byte(b, pages, start);
    } else {
      r.plane[p] = side + p * b.row_bytes;
      copy_straddling(b, pages, start, side + p * b.row_bytes);
    }
  }
  r.table = reinterpret_cast<const uint16_t*>(paged_byte(b, b.table_pages, table_start));
  return r;
}

// Rows one after the other, each found anew.
class RowFinder {
 public:
  RowFinder(const Block& b, int64_t row, uint8_t* side) : b_(b), row_(row), side_(side) {}
  Row row() const { return locate(b_, row_, side_); }
  void next() { ++row_; }

 private:
  const Block& b_;
  int64_t row_;
  uint8_t* side_;
};

// Rows of Q bits one after the other; within a page, going on is an addition per plane.
template <int Q>
class RowCursor {
 public:
  RowCursor(const Block& b, int64_t row, uint8_t* side) : b_(b), side_(side) { find(row); }
  const Row& row() const { return at_; }
  void next() {
    if (++row_ == until_) {
      if (row_ < b_.rows) find(row_);
      return;
    }
#pragma GCC unroll 8
    for (int p = 0; p < Q; ++p) at_.plane[p] += b_.row_bytes;
    at_.table += 1 << Q;
  }

 private:
  void find(int64_t row) {
    row_ = row, until_ = b_.rows, at_ = locate(b_, row, side_);
    if (b_.page_shift < 0) return;
    const int64_t page_bytes = int64_t(1) << b_.page_shift;
    const int64_t left = page_bytes - (row * b_.row_bytes & (page_bytes - 1));
    const int64_t whole = left / b_.row_bytes;  // 0: this row straddles
    const int64_t per_page = page_bytes >> (b_.bits + 1);
    const int64_t tables_end = (row / per_page + 1) * per_page;
    until_ = row + (whole ? whole : 1);
    if (until_ > tables_end) until_ = tables_end;
  }

  const Block& b_;
  uint8_t* side_;
  Row at_;
  int64_t row_, until_;
};

// Memory of one thread, aligned to 64 bytes.
struct Scratch {
  uint8_t* side;   // kMaxBits * row_bytes, for straddling rows
  float* weights;  // kRowTile * weight_stride(columns), decoded rows
  float* sums;     // kRowTile * kTokenTile * 64, partial sums
};
constexpr int64_t kRowTile = 8, kTokenTile = 96, kStretch = 1024, kColumnPad = 256;

inline int64_t padded(int64_t columns) {
  return (columns + kColumnPad - 1) / kColumnPad * kColumnPad;
}
// One cache line more than a multiple of 1 KiB, so that rows do not share cache sets.
inline int64_t weight_stride(int64_t columns) { return padded(columns) + 16; }
inline int64_t input_stride(int64_t columns) { return padded(columns) + 16; }

// What one instruction set provides. `arrange` puts one token's inputs into the order in which
// `rows` meets the weights (padded to padded(columns) floats); the order depends on the width.
// `rows` writes y[t * y_stride + n], n in [first, last), for tokens x[0..tokens). The sum of one
// output runs in the same order whatever tokens, first and last are.
struct Path {
  const char* name;
  int (*order)(int bits);
  void (*arrange)(int order, int64_t columns, const float* x, float* out);
  void (*rows)(const Block& b, int64_t first, int64_t last, const float* const* x, int64_t tokens,
               float* y, int64_t y_stride, const Scratch& scratch);
};

// The natural order, padded with zeros.
inline void in_order(int, int64_t columns, const float* x, float* out) {
  std::memcpy(out, x, size_t(columns) * sizeof(float));
  std::memset(out + columns, 0, size_t(padded(columns) - columns) * sizeof(float));
}

#define BY_WIDTH(function, bits, arguments) \
  switch (bits) {                           \
    case 2: return function<2> arguments;   \
    case 3: return function<3> arguments;   \
    case 4: return function<4> arguments;   \
    case 5: return function<5> arguments;   \
    case 6: return function<6> arguments;   \
    case 7: return function<7> arguments;   \
    default: return function<8> arguments;  \
  }
