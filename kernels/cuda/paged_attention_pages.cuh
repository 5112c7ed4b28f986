// Where the keys of a token lie: the layout of runtime/model/kv_layout.py with the packed tables of a step.
#pragma once
#include "shared_table_activation.cuh"

// Pages of one layer. tables: [slots, max_blocks, block_pages], page ids, below 0 for none; the layer's pages of a block
// begin at first_page, each holds 1 << page_tokens_log2 tokens as [tokens, 2, kv_heads, head_dim].
#define PAGE_PARAMETERS                                                                                          \
  long long page_bytes, int max_blocks, int block_pages, int first_page, int block_tokens_log2, int page_tokens_log2, \
      int kv_heads, int head_dim, int number_bytes
#define PAGED_KEYS                                                                                                    \
  PagedKeys { tables, page_bytes, max_blocks, block_pages, first_page, block_tokens_log2, page_tokens_log2, kv_heads, \
              head_dim, 2 * kv_heads * head_dim * number_bytes }

struct PagedKeys {
  const int* tables;
  long long page_bytes;
  int max_blocks, block_pages, first_page, block_tokens_log2, page_tokens_log2, kv_heads, head_dim, token_bytes;
};

// Byte of a token's keys in the arena; below 0 where no page is.
__device__ __forceinline__ long long token_offset(const PagedKeys& k, int slot, int position) {
  const int block = position >> k.block_tokens_log2, within = position & ((1 << k.block_tokens_log2) - 1);
  if (slot < 0 || position < 0 || block >= k.max_blocks) return -1;
  const size_t row = (size_t)slot * k.max_blocks + block;
  const int page = k.tables[row * k.block_pages + k.first_page + (within >> k.page_tokens_log2)];
  if (page < 0) return -1;
  return page * k.page_bytes + (long long)(within & ((1 << k.page_tokens_log2) - 1)) * k.token_bytes;
}
