// The body of a tile, for the vectors of the namespace that includes this file (no #pragma once):
// Vector of kLanes floats; kVectors = 32 / kLanes; kMost tokens, of which up to kPair take two
// panels; load(), store(), broadcast(), fma(); and load_step<type>(panel, w), one step of a panel
// as kVectors vectors in the order of its lanes.

template <int M, int P, int32_t Type>
static void tile_of(const Tile& a) {
  Vector sum[M][P * kVectors];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int c = 0; c < P * kVectors; ++c)
      sum[m][c] = load((a.first ? a.start : a.sums + m * a.sums_stride) + c * kLanes);
  const int64_t step = kPanel * (Type == kFloat32 ? 4 : 2);
  const uint8_t* panel = static_cast<const uint8_t*>(a.panel);
  const uint8_t* second = static_cast<const uint8_t*>(a.second);
  const uint8_t* ahead = a.ahead;
  const float* x = a.x;
  for (int64_t k = 0; k < a.depth; ++k, panel += step, ahead += a.ahead_step, x += M) {
    for (int64_t line = 0; line < step; line += 64) {
      __builtin_prefetch(ahead + line);
      if (P == 2) __builtin_prefetch(second + (ahead - panel) + line);
    }
    Vector w[P * kVectors];
    load_step<Type>(panel, w);
    if constexpr (P == 2) {
      load_step<Type>(second, w + kVectors);
      second += step;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      Vector input = broadcast(x + m);
      HOLD(input);
#pragma GCC unroll 16
      for (int c = 0; c < P * kVectors; ++c) sum[m][c] = fma(w[c], input, sum[m][c]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 16
    for (int c = 0; c < P * kVectors; ++c)
      store(a.sums + m * a.sums_stride + c * kLanes, sum[m][c]);
}

template <int M>
static void tile_tokens(int32_t type, int64_t tokens, const Tile& a) {
  if constexpr (M > 1)
    if (tokens < M) return tile_tokens<M - 1>(type, tokens, a);
  if constexpr (M <= kPair)
    if (a.second)
      return type == kFloat32 ? tile_of<M, 2, kFloat32>(a) : tile_of<M, 2, kBfloat16>(a);
  type == kFloat32 ? tile_of<M, 1, kFloat32>(a) : tile_of<M, 1, kBfloat16>(a);
}

static void tile(int32_t type, int64_t tokens, const Tile& a) {
  tile_tokens<kMost>(type, tokens, a);
}

// The same operations in any vector width: the result of an element does not depend on its place.
static void activate_here(int32_t activation, int64_t n, const float* gate, const float* up,
                          float* out) {
  activate(activation, n, gate, up, out);
}
