// The weights of one or many blocks as the caller describes them, and the checks before use.
#pragma once
#include "block.h"

struct Fault {
  int32_t kind;   // FaultKind
  int32_t plane;  // -1: the table
  int64_t block, index, found;
};
enum FaultKind : int32_t { kNone = 0, kWidth = 1, kPage = 2, kResources = 3 };

struct Weights {
  int32_t page_shift;             // < 0: contiguous
  int32_t min_bits, parent_bits;  // widths a block may have
  const int32_t* bits;            // [n] committed width
  const uint8_t* arena;
  int64_t num_pages;
  const int32_t* plane_pages;  // [n, parent_bits, plane_list]
  int64_t plane_list;
  const int32_t* table_pages;  // [n, parent_bits - min_bits + 1, table_list]
  int64_t table_list;
  const uint8_t* const* planes;  // [n], contiguous form
  const uint8_t* const* tables;  // [n], contiguous form, of the committed width
};

// Every page that the rows of a block will touch must lie in the arena.
inline bool pages_are_there(const Weights& w, const Block& b, Fault* fault) {
  for (int p = -1; p < b.bits; ++p) {
    const int32_t* pages = p < 0 ? b.table_pages : b.plane_pages + p * b.plane_list;
    const int64_t bytes = p < 0 ? b.rows << (b.bits + 1) : b.rows * b.row_bytes;
    const int64_t needed = ((bytes - 1) >> b.page_shift) + 1;
    const int64_t listed = p < 0 ? w.table_list : w.plane_list;
    for (int64_t i = 0; i < needed; ++i)
      if (i >= listed || pages[i] < 0 || pages[i] >= w.num_pages) {
        fault->kind = kPage, fault->plane = p, fault->index = i;
        fault->found = i < listed ? pages[i] : -1;
        return false;
      }
  }
  return true;
}

// The block at the width committed now; false with `fault` filled if it cannot be used.
inline bool find_block(const Weights& w, int64_t index, int64_t rows, int64_t columns, Block* b,
                       Fault* fault) {
  fault->block = index;
  b->bits = w.bits[index];
  if (b->bits < w.min_bits || b->bits > w.parent_bits) {
    fault->kind = kWidth, fault->found = b->bits;
    return false;
  }
  b->page_shift = w.page_shift;
  b->rows = rows, b->columns = columns, b->row_bytes = (columns + 31) / 32 * 4;
  if (w.page_shift < 0) {
    b->planes = w.planes[index], b->table = w.tables[index];
    return true;
  }
  b->planes = w.arena;
  b->plane_list = w.plane_list;
  b->plane_pages = w.plane_pages + index * w.parent_bits * w.plane_list;
  const int64_t tables = w.parent_bits - w.min_bits + 1;
  b->table_pages = w.table_pages + (index * tables + b->bits - w.min_bits) * w.table_list;
  return pages_are_there(w, *b, fault);
}
