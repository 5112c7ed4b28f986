// The body of attention, for the vectors of the namespace that includes this file (no #pragma
// once): Vector of kLanes floats; kRows rows and kGroup vectors make a tile; zero(), load(),
// store(), broadcast(), add(), multiply(), fma(), maximum(), largest(), exp2_of(), masked(),
// load_as<type>(), widen<type>(), transpose().

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

// Keys and values of tokens [from, to) of one block into memory, as float32; keys transposed.
template <int32_t Type>
static void pack(const AttentionCall& call, const AttentionTask& task, AttentionMemory& memory,
                 int64_t block, int64_t from, int64_t to) {
  constexpr int64_t bytes = Type == kStoredFloat32 ? 4 : 2;
  const KvShape& shape = call.shape;
  const int64_t depth = shape.head_dim, width = AttentionMemory::width(shape);
  const int64_t head = task.kv_head * depth * bytes, behind = shape.kv_heads * depth * bytes;
  const uint8_t* at[kKeys];
  const uint8_t* none = reinterpret_cast<const uint8_t*>(memory.zeros.get());
  const int64_t begin = from - block, end = to - block;
  const int64_t low = begin / kLanes * kLanes, high = (end + kLanes - 1) / kLanes * kLanes;
  for (int64_t k = low; k < high; ++k)
    at[k] = k < begin || k >= end ? none
                                  : token_at(call.step, shape, task.sequence, block + k) + head;
  for (int64_t k = low; k < high; k += kLanes) {
    int64_t i = 0;
    for (; i + kLanes <= depth; i += kLanes) {
      Vector v[kLanes];
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) v[j] = load_as<Type>(at[k + j] + i * bytes);
      transpose(v);
#pragma GCC unroll 16
      for (int j = 0; j < kLanes; ++j) store(memory.keys + (i + j) * kKeys + k, v[j]);
    }
    for (; i < depth; ++i)
      for (int j = 0; j < kLanes; ++j)
        memory.keys[i * kKeys + k + j] = widen<Type>(at[k + j] + i * bytes);
  }
  for (int64_t k = begin; k < end; ++k) {
    float* value = memory.values + k * width;
    int64_t i = 0;
    for (; i + kLanes <= depth; i += kLanes)
      store(value + i, load_as<Type>(at[k] + behind + i * bytes));
    for (; i < depth; ++i) value[i] = widen<Type>(at[k] + behind + i * bytes);
  }
}

// Lines of the tokens [from, to) on their way to the cache, while the block before is worked on.
static void fetch(const AttentionCall& call, const AttentionTask& task, int64_t from, int64_t to) {
  const KvShape& shape = call.shape;
  const int64_t bytes = shape.head_dim * shape.number_bytes(), behind = shape.kv_heads * bytes;
  for (int64_t t = from; t < to; ++t) {
    const uint8_t* at = token_at(call.step, shape, task.sequence, t) + task.kv_head * bytes;
    for (int64_t b = 0; b < bytes; b += 64) {
      __builtin_prefetch(at + b);
      __builtin_prefetch(at + behind + b);
    }
  }
}

static void scaled_queries(const AttentionCall& call, const AttentionTask& task,
                           AttentionMemory& memory) {
  const int64_t depth = call.shape.head_dim, group = call.shape.group();
  float* to = memory.queries;
  for (int64_t row = task.first; row < task.last; ++row) {
    const float* from = call.queries + (row * call.shape.heads + task.kv_head * group) * depth;
    for (int64_t i = 0; i < group * depth; ++i) to[i] = from[i] * call.scale;
    to += group * depth;
  }
}

static void store_results(const AttentionCall& call, const AttentionTask& task,
                          const AttentionMemory& memory) {
  const int64_t depth = call.shape.head_dim, group = call.shape.group();
  const int64_t width = AttentionMemory::width(call.shape);
  for (int64_t row = task.first; row < task.last; ++row)
    for (int64_t g = 0; g < group; ++g) {
      const int64_t here = (row - task.first) * group + g;
      float total = 0.0f;
      for (int j = 0; j < kLanes; ++j) total += memory.weights[here * 16 + j];
      const float* sums = memory.sums + here * width;
      float* to = call.out + (row * call.shape.heads + task.kv_head * group + g) * depth;
      // + 0: keys that a row does not see have weight 0 and may turn the sign of a zero.
      for (int64_t i = 0; i < depth; ++i) to[i] = sums[i] / total + 0.0f;
    }
}

template <int32_t Type>
static void attend_stored(const AttentionCall& call, const AttentionTask& task,
                          AttentionMemory& memory) {
  const KvShape& shape = call.shape;
  const int64_t group = shape.group(), rows = (task.last - task.first) * group;
  const int64_t width = AttentionMemory::width(shape);
  const int64_t position =
      call.step.starts[task.sequence] + task.first - call.step.first[task.sequence];
  const int64_t seen = shape.first_seen(position), stop = position + task.last - task.first;
  scaled_queries(call, task, memory);
  std::memset(memory.sums.get(), 0, size_t(rows * width) * sizeof(float));
  std::memset(memory.weights.get(), 0, size_t(rows * 16) * sizeof(float));
  for (int64_t r = 0; r < rows; ++r) memory.most[r] = -std::numeric_limits<float>::infinity();
  for (int64_t block = seen / kKeys * kKeys; block < stop; block += kKeys) {
    const int64_t end = block + kKeys < stop ? block + kKeys : stop;
    pack<Type>(call, task, memory, block, block > seen ? block : seen, end);
    fetch(call, task, end, end + kKeys < stop ? end + kKeys : stop);
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
            count, {memory, shape.head_dim, width, row, first, last, row_begin, row_end});
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
