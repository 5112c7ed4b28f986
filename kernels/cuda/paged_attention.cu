// Attention over keys and values in arena pages, for new tokens of several sequences at once.
//
//   write_keys_values -> paged_attention -> combine_chunks
//
// Keys are cut into chunks by their position alone. A block folds one chunk for the query rows of one kv head; rows that
// see several chunks get a partial result for each, and combine_chunks adds these in order. What a row gets depends on
// nothing but its own keys: not on the rows beside it, not on the grid. Nothing is read on the host, tables and rows lie
// at fixed addresses, and grids depend on shapes: a captured graph replays over other tokens, positions and pages.
//
// A row's exponentials are taken in base 2 below the largest score so far; weights are rounded to the stored type before
// they are summed, so that they add up to one. All sums are float32.
#include "paged_attention_tile.cuh"

// keys and values of new tokens into their pages. Grid: (tokens); 256 threads.
template <int TYPE>
__global__ void __launch_bounds__(256)
write_keys_values(unsigned char* __restrict__ arena, const int* __restrict__ tables, const int* __restrict__ positions,
                  const int* __restrict__ slots,
                  const void* __restrict__ keys,    // [T, kv_heads, head_dim] of new_type, rows key_stride apart
                  const void* __restrict__ values,  // [T, kv_heads, head_dim] of new_type, rows value_stride apart
                  int new_type, long long key_stride, long long value_stride, PAGE_PARAMETERS) {
  const PagedKeys k = PAGED_KEYS;
  const int token = blockIdx.x, row = kv_heads * head_dim;
  const long long at = token_offset(k, slots[token], positions[token]);
  if (at < 0) return;
  for (int i = threadIdx.x; i < 2 * row; i += blockDim.x) {
    const bool is_value = i >= row;
    const float x = is_value ? read_number(values, token * value_stride + i - row, new_type)
                             : read_number(keys, token * key_stride + i, new_type);
    write_number(arena + at, i, TYPE, x);
  }
}

// One chunk of keys for ROWS query rows (tokens of one sequence x heads of one kv head).
// Grid: (tiles, kv heads x head blocks, chunks); 128 threads; dynamic shared memory: see paged_attention.py.
template <int TYPE, int DIM, int ROWS>
__global__ void __launch_bounds__(ATTENTION_THREADS, ROWS * DIM > 2048 ? 2 : 4)
paged_attention(const unsigned char* __restrict__ arena, const int* __restrict__ tables,
                const int* __restrict__ positions, const int* __restrict__ slots,
                const int* __restrict__ tiles,     // [tiles, 2]: first token, tokens
                const void* __restrict__ queries,  // [T, heads, head_dim] of query_type, rows query_stride apart
                void* __restrict__ out,            // [T, heads, head_dim] of query_type
                float* __restrict__ partial,       // [tokens of this launch, heads, chunks, head_dim]
                float2* __restrict__ partial_sum,  // [tokens of this launch, heads, chunks]: largest score, sum
                int query_type, long long query_stride, int heads, int head_blocks, int window, int chunk_keys,
                int first_token, float scale, PAGE_PARAMETERS) {
  const PagedKeys k = PAGED_KEYS;
  Tile tile;
  tile.first = tiles[2 * blockIdx.x];
  tile.group = heads / kv_heads;
  tile.kv_head = blockIdx.y / head_blocks;
  tile.head0 = tile.kv_head * tile.group + (blockIdx.y % head_blocks) * ROWS;
  tile.heads = min(tile.group - (int)(blockIdx.y % head_blocks) * ROWS, ROWS);
  tile.rows = tiles[2 * blockIdx.x + 1] * tile.heads;
  tile.positions = positions;
  tile.window = window;
  const int oldest = positions[tile.first], newest = positions[tile.first + tiles[2 * blockIdx.x + 1] - 1];
  tile.low = max(window ? oldest + 1 - window : 0, (int)blockIdx.z * chunk_keys);
  tile.high = min(newest + 1, ((int)blockIdx.z + 1) * chunk_keys);
  if (tile.low >= tile.high) return;
  tile.slot = slots[tile.first];
  extern __shared__ __align__(16) unsigned char attention_shared[];
  Fold<TYPE, DIM, ROWS> fold(attention_shared);
  fold.load_queries(queries, query_type, query_stride, tile, head_dim);
  // whole units from a position that no query decides
  for (int unit = tile.low / UNIT_KEYS * UNIT_KEYS; unit < tile.high; unit += UNIT_KEYS) {
    fold.find_keys(k, tile, unit);
    fold.scores(arena, head_dim);
    fold.weights(tile, unit, scale * 1.4426950408889634f);
    fold.add_values(arena, k.kv_heads * head_dim * (TYPE == FLOAT32 ? 4 : 2), head_dim);
  }
  fold.finish([&](int row, int dim, float x, float largest, float sum) {
    if (row >= tile.rows || dim >= head_dim) return;
    const int token = tile.first + row / tile.heads, head = tile.head0 + row % tile.heads;
    const int position = positions[token];
    const int first_chunk = window ? max(position + 1 - window, 0) / chunk_keys : 0, last_chunk = position / chunk_keys;
    if ((int)blockIdx.z < first_chunk || (int)blockIdx.z > last_chunk) return;
    if (first_chunk == last_chunk) {
      write_number(out, ((size_t)token * heads + head) * head_dim + dim, query_type, x / sum);
    } else {
      const size_t at = ((size_t)(token - first_token) * heads + head) * gridDim.z + blockIdx.z;
      partial[at * head_dim + dim] = x;
      if (dim == 0) partial_sum[at] = make_float2(largest, sum);
    }
  });
}

// Rows that see several chunks: their partial results, added in order. Grid: (tokens of this launch, heads).
extern "C" __global__ void __launch_bounds__(128)
combine_chunks(const float* __restrict__ partial, const float2* __restrict__ partial_sum,
               const int* __restrict__ positions, void* __restrict__ out, int out_type, int chunks, int window,
               int chunk_keys, int first_token, int head_dim) {
  const int token = first_token + blockIdx.x, heads = gridDim.y, position = positions[token];
  const int first = window ? max(position + 1 - window, 0) / chunk_keys : 0, last = position / chunk_keys;
  if (first == last) return;
  const size_t row = (size_t)blockIdx.x * heads + blockIdx.y;
  float largest = NO_SCORE, sum = 0.f;
  for (int c = first; c <= last; ++c) largest = fmaxf(largest, partial_sum[row * chunks + c].x);
  for (int c = first; c <= last; ++c) {
    const float2 p = partial_sum[row * chunks + c];
    sum = __fmaf_rn(p.y, exp2f(p.x - largest), sum);
  }
  for (int dim = threadIdx.x; dim < head_dim; dim += blockDim.x) {
    float x = 0.f;
    for (int c = first; c <= last; ++c)
      x = __fmaf_rn(partial[(row * chunks + c) * head_dim + dim], exp2f(partial_sum[row * chunks + c].x - largest), x);
    write_number(out, ((size_t)token * heads + blockIdx.y) * head_dim + dim, out_type, x / sum);
  }
}
