// The body of attention, for the vectors of the namespace that includes this file (no #pragma
// once): Vector of kLanes floats; kRows rows and kGroup vectors make a tile; zero(), load(),
// store(), broadcast(), add(), multiply(), fma(), maximum(), largest(), exp2_of(), masked(),
// load_raw(), load_as<type>(), widen<type>(), transpose(),
// low_half(), high_half() (bfloat16 in a lane as float).

// scores[R, N vectors] of R rows with N vectors of keys: a chain of products for each key.
template <int R, int N>
static void score(const float* queries, int64_t depth, const float* keys, float* scores) {
  Vector sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[r][n] = zero();
  for (int64_t i = 0; i < depth; ++i) {
    Vector key[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      key[n] = load(keys + i * kKeys + n * kLanes);
      HOLD(key[n]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vector query = broadcast(queries + r * depth + i);
      HOLD(query);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[r][n] = fma(key[n], query, sum[r][n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(scores + r * kKeys + n * kLanes, sum[r][n]);
}

// sums[R, N vectors] = factor[R] * sums + weights[R, begin..end] * values, key after key.
template <int R, int N>
static void gather(const float* weights, int64_t begin, int64_t end, const float* values,
                   int64_t width, const float* factor, float* sums) {
  Vector sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n)
      sum[r][n] = multiply(broadcast(factor + r), load(sums + r * width + n * kLanes));
  for (int64_t k = begin; k < end; ++k) {
    Vector value[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) {
      value[n] = load(values + k * width + n * kLanes);
      HOLD(value[n]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      Vector weight = broadcast(weights + r * kKeys + k);
      HOLD(weight);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[r][n] = fma(value[n], weight, sum[r][n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(sums + r * width + n * kLanes, sum[r][n]);
}

template <int R, int N>
static void score_vectors(int64_t vectors, const float* queries, int64_t depth, const float* keys,
                          float* scores) {
  if constexpr (N > 1)
    if (vectors < N) return score_vectors<R, N - 1>(vectors, queries, depth, keys, scores);
  score<R, N>(queries, depth, keys, scores);
}

template <int R, int N>
static void gather_vectors(int64_t vectors, const float* weights, int64_t begin, int64_t end,
                           const float* values, int64_t width, const float* factor, float* sums) {
  if constexpr (N > 1)
    if (vectors < N)
      return gather_vectors<R, N - 1>(vectors, weights, begin, end, values, width, factor, sums);
  gather<R, N>(weights, begin, end, values, width, factor, sums);
}

// Weights of the keys [begin, end) of a block that one row sees, out of its scores; keys of vectors
// [low, high) that it does not see get 0. Returns the factor of what was summed up before.
static float weigh(float* scores, int64_t begin, int64_t end, int64_t low, int64_t high,
                   float* most, float* weights) {
  Vector top = broadcast(most);
  for (int64_t k = low; k < high; k += kLanes) {
    Vector s = load(scores + k);
    if (k < begin || k + kLanes > end) {
      s = masked(s, begin - k, end - k);
      store(scores + k, s);
    }
    top = maximum(s, top);
  }
  const float before = *most, now = largest(top);
  const float base = now == -std::numeric_limits<float>::infinity() ? 0.0f : now;
  const float minus = -base;
  Vector part = zero();
  for (int64_t k = low; k < high; k += kLanes) {
    const Vector w = exp2_of(add(load(scores + k), broadcast(&minus)));
    store(scores + k, w);
    part = add(part, w);
  }
  float factor = 1.0f;
  if (before != now) {
    alignas(64) float lanes[kLanes];
    const float difference = before - base;
    store(lanes, exp2_of(broadcast(&difference)));
    factor = lanes[0];
  }
  store(weights, fma(load(weights), broadcast(&factor), part));
  *most = now;
  return factor;
}

// One block of keys with R rows; keys [begin, end) are those that any of the rows sees.
struct TileOfRows {
  const AttentionMemory& memory;
  int64_t depth, width, row, begin, end;
  const int64_t* row_begin;  // of every row of the tile
  const int64_t* row_end;
};

template <int R>
static void tile_of(const TileOfRows& a) {
  alignas(64) float scores[R * kKeys];
  float factor[R];
  const int64_t low = a.begin / kLanes * kLanes, high = (a.end + kLanes - 1) / kLanes * kLanes;
  for (int64_t k = low; k < high; k += kGroup * kLanes)
    score_vectors<R, kGroup>((high - k) / kLanes, a.memory.queries + a.row * a.depth, a.depth,
                             a.memory.keys + k, scores + k);
  for (int r = 0; r < R; ++r)
    factor[r] = weigh(scores + r * kKeys, a.row_begin[r], a.row_end[r], low, high,
                      a.memory.most + a.row + r, a.memory.weights + (a.row + r) * 16);
  for (int64_t i = 0; i < a.width; i += kGroup * kLanes)
    gather_vectors<R, kGroup>((a.width - i) / kLanes, scores, a.begin, a.end, a.memory.values + i,
                              a.width, factor, a.memory.sums + a.row * a.width + i);
}

template <int R>
static void tile_rows(int64_t rows, const TileOfRows& a) {
  if constexpr (R > 1)
    if (rows < R) return tile_rows<R - 1>(rows, a);
  tile_of<R>(a);
}

// 16-bit keys of kLanes tokens, two numbers in a lane: half the vectors to transpose.
template <int32_t Type>
static int64_t pack_pairs(const uint8_t* const* at, int64_t offset, int64_t depth, float* keys) {
  int64_t i = 0;
  if constexpr (Type == kStoredBfloat16)
    for (; i + 2 * kLanes <= depth; i += 2 * kLanes) {
      Vector v[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) v[j] = load_raw(at[j] + offset + 2 * i);
      transpose(v);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) {
        store(keys + (i + 2 * j) * kKeys, low_half(v[j]));
        store(keys + (i + 2 * j + 1) * kKeys, high_half(v[j]));
      }
    }
  return i;
}

// Keys and values of tokens [begin, end) of a block into memory, as float32; keys transposed.
template <int32_t Type>
static void pack(const KvShape& shape, int64_t kv_head, const TokensOfBlock& tokens,
                 AttentionMemory& memory) {
  constexpr int64_t bytes = Type == kStoredFloat32 ? 4 : 2;
  const int64_t depth = shape.head_dim, width = AttentionMemory::width(shape);
  const int64_t head = kv_head * depth * bytes, behind = shape.kv_heads * depth * bytes;
  const int64_t low = tokens.begin / kLanes * kLanes;
  for (int64_t k = low; k < tokens.end; k += kLanes) {
    const uint8_t* at[kLanes];  // a token that is not there lends its place to one that is
    for (int64_t j = 0; j < kLanes; ++j)
      at[j] = tokens.at[k + j < tokens.begin ? tokens.begin
                                             : k + j < tokens.end ? k + j : tokens.end - 1];
    int64_t i = pack_pairs<Type>(at, head, depth, memory.keys + k);
    for (; i + kLanes <= depth; i += kLanes) {
      Vector v[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) v[j] = load_as<Type>(at[j] + head + i * bytes);
      transpose(v);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(memory.keys + (i + j) * kKeys + k, v[j]);
    }
    for (; i < depth; ++i)
      for (int j = 0; j < kLanes; ++j)
        memory.keys[i * kKeys + k + j] = widen<Type>(at[j] + head + i * bytes);
  }
  for (int64_t k = tokens.begin; k < tokens.end; ++k) {
    const uint8_t* from = tokens.at[k] + head + behind;
    float* value = memory.values + k * width;
    int64_t i = 0;
    for (; i + kLanes <= depth; i += kLanes) store(value + i, load_as<Type>(from + i * bytes));
    for (; i < depth; ++i) value[i] = widen<Type>(from + i * bytes);
  }
}

static void scaled_queries(const AttentionCall& call, const AttentionTask& task,
                           AttentionMemory& memory) {
  const int64_t depth = call.shape.head_dim, group = call.shape.group();
  float* to = memory.queries;
  for (int64_t h = task.first_head; h < task.last_head; ++h)
    for (int64_t row = task.first; row < task.last; ++row) {
      const float* from = call.queries + (row * call.shape.heads + h * group) * depth;
      for (int64_t i = 0; i < group * depth; ++i) to[i] = from[i] * call.scale;
      to += group * depth;
    }
}

static void store_results(const AttentionCall& call, const AttentionTask& task,
                          const AttentionMemory& memory) {
  const int64_t depth = call.shape.head_dim, group = call.shape.group();
  const int64_t width = AttentionMemory::width(call.shape);
  int64_t here = 0;
  for (int64_t h = task.first_head; h < task.last_head; ++h)
    for (int64_t row = task.first; row < task.last; ++row)
      for (int64_t g = 0; g < group; ++g, ++here) {
        float total = 0.0f;
        for (int j = 0; j < kLanes; ++j) total += memory.weights[here * 16 + j];
        const float* sums = memory.sums + here * width;
        float* to = call.out + (row * call.shape.heads + h * group + g) * depth;
        // + 0: keys that a row does not see have weight 0 and may turn the sign of a zero.
        for (int64_t i = 0; i < depth; ++i) to[i] = sums[i] / total + 0.0f;
      }
}

template <int32_t Type>
static void attend_stored(const AttentionCall& call, const AttentionTask& task,
                          AttentionMemory& memory) {
  const KvShape& shape = call.shape;
  const int64_t group = shape.group(), rows = (task.last - task.first) * group;
  const int64_t all_rows = rows * (task.last_head - task.first_head);
  const int64_t width = AttentionMemory::width(shape);
  const int64_t position = task.position(call.step), seen = shape.first_seen(position);
  const int64_t stop = position + task.last - task.first;
  scaled_queries(call, task, memory);
  std::memset(memory.sums.get(), 0, size_t(all_rows * width) * sizeof(float));
  std::memset(memory.weights.get(), 0, size_t(all_rows * 16) * sizeof(float));
  for (int64_t r = 0; r < all_rows; ++r) memory.most[r] = -std::numeric_limits<float>::infinity();
  TokensOfBlock tokens;
  for (int64_t block = seen / kKeys * kKeys; block < stop; block += kKeys) {
    tokens.find(call, task.sequence, block, seen, stop);
    for (int64_t h = task.first_head; h < task.last_head; ++h) {
      pack<Type>(shape, h, tokens, memory);
      const int64_t above = (h - task.first_head) * rows;
      for (int64_t row = 0; row < rows; row += kRows) {
        const int64_t count = rows - row < kRows ? rows - row : kRows;
        int64_t row_begin[kRows], row_end[kRows];
        for (int64_t r = 0; r < count; ++r) {
          const int64_t at = position + (row + r) / group;
          row_begin[r] = within_block(shape.first_seen(at) - block);
          row_end[r] = within_block(at + 1 - block);
        }
        const int64_t first = row_begin[0], last = row_end[count - 1];  // both ascend
        if (first < last)
          tile_rows<kRows>(
              count, {memory, shape.head_dim, width, above + row, first, last, row_begin, row_end});
      }
    }
  }
  store_results(call, task, memory);
}

static void attend(const AttentionCall& call, const AttentionTask& task, AttentionMemory& memory) {
  switch (call.shape.type) {
    case kStoredFloat32: return attend_stored<kStoredFloat32>(call, task, memory);
    case kStoredBfloat16: return attend_stored<kStoredBfloat16>(call, task, memory);
    default: return attend_stored<kStoredFloat16>(call, task, memory);
  }
}
