// C entry points. Shapes and dtypes were checked by the caller; widths and page ids are checked
// here, once a call, before any weight is read.
#include "attention_portable.h"
#include "block.h"
#include "layer.h"
#include "linear_portable.h"
#include "plain.h"
#include "portable.h"
#include "work.h"
#if defined(__x86_64__)
#include <cpuid.h>

#include "attention_avx2.h"
#include "attention_avx512.h"
#include "avx2.h"
#include "avx512.h"
#include "linear_avx2.h"
#include "linear_avx512.h"
#endif

namespace {

struct Choice {
  Path path;
  LinearPath linear;
  AttentionPath attention;
  bool (*runs_here)();
};

bool always() { return true; }
#if defined(__x86_64__)
// Bit 29 of ecx of leaf 1; not a name that every compiler's __builtin_cpu_supports knows.
bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}
bool has_avx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
}
#endif

const Choice kChoices[] = {
#if defined(__x86_64__)
    {avx512::kPath, linear_avx512::kPath, attention_avx512::kPath, has_avx512},
    {avx2::kPath, linear_avx2::kPath, attention_avx2::kPath, has_avx2},
#endif
    {portable::kPath, linear_portable::kPath, attention_portable::kPath, always},
};
constexpr int kCount = int(sizeof(kChoices) / sizeof(kChoices[0]));

}  // namespace

extern "C" {

int path_count() { return kCount; }
const char* path_name(int i) { return kChoices[i].path.name; }
int path_runs_here(int i) { return kChoices[i].runs_here(); }

// y[tokens, rows] = x[tokens, columns] times the transposed weights of block `index`.
int block_matmul(int choice, const Weights* weights, int64_t index, int64_t rows, int64_t columns,
                 const float* x, int64_t tokens, float* y, int threads, Fault* fault) try {
  const Path& path = kChoices[choice].path;
  Block block{};
  if (!find_block(*weights, index, rows, columns, &block, fault)) return 1;
  const int64_t wide = input_stride(columns);
  const Buffer<float> inputs(tokens * wide);
  std::vector<const float*> at(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) {
    path.arrange(path.order(block.bits), columns, x + t * columns, inputs + t * wide);
    at[size_t(t)] = inputs + t * wide;
  }
  std::vector<ThreadMemory> memory;
  for (int i = 0; i < threads; ++i) memory.emplace_back(columns);
  in_parallel(threads, [&](int part) {
    path.rows(block, share(rows, part, threads), share(rows, part + 1, threads), at.data(), tokens,
              y, rows, memory[size_t(part)].scratch());
  });
  return 0;
} catch (const std::exception&) {
  fault->kind = kResources;
  return 1;
}

// out[tokens, hidden]; expert_index in [0, experts) was checked by the caller.
int moe_layer(int choice, const Weights* weights, int64_t first_block, int64_t experts,
              int64_t hidden, int64_t inner, int32_t activation, const float* x, int64_t tokens,
              int64_t top, const int32_t* expert_index, const float* gate_weight,
              const float* expert_scale, float* out, int threads, Fault* fault) try {
  const Layer layer{*weights, first_block, experts, hidden, inner, activation};
  LayerCall call{kChoices[choice].path, layer, x,       tokens, top, gate_weight,
                 expert_scale,          out,   threads, {},     {}};
  if (!call.plan(expert_index, fault)) return 1;
  call.run();
  return 0;
} catch (const std::exception&) {
  fault->kind = kResources;
  return 1;
}

// panels[ceil(rows / 32) * 32 * columns] of the matrix' type, from its rows.
void pack_matrix(const Matrix* matrix, uint8_t* to) {
  const int64_t bytes = kPanel * matrix->columns * element_bytes(matrix->type);
  for (int64_t p = 0; p < panels(matrix->rows); ++p)
    pack_panel(*matrix, p * kPanel, 0, matrix->columns, to + p * bytes);
}

// y[tokens, rows] = x[tokens, columns] times the transposed matrix, plus the bias if there is one.
int linear(int choice, const Matrix* matrix, const float* bias, const float* x, int64_t tokens,
           float* y, int threads) try {
  multiply(kChoices[choice].linear, *matrix, bias, x, tokens, y, threads);
  return 0;
} catch (const std::exception&) {
  return 1;
}

// out[tokens, hidden]; matrices: of expert e at 2 e (gate and up) and 2 e + 1 (down).
int plain_moe_layer(int choice, const Matrix* matrices, int64_t experts, int64_t hidden,
                    int64_t inner, int32_t activation, const float* x, int64_t tokens, int64_t top,
                    const int32_t* expert_index, const float* gate_weight,
                    const float* expert_scale, float* out, int threads) try {
  const PlainLayer layer{matrices, experts, hidden, inner, activation};
  PlainCall{kChoices[choice].linear, layer, x, tokens, top, gate_weight, expert_scale, out, threads,
            Routing(expert_index, tokens * top, experts)}
      .run();
  return 0;
} catch (const std::exception&) {
  return 1;
}

// Writes keys and values (null: they are there), then out[T, heads * head_dim]; an AttentionFault.
int paged_attention(int choice, const KvStep* step, const KvShape* shape, const float* queries,
                    const float* keys, const float* values, float scale, float* out, int threads,
                    int64_t* found) try {
  if (!pages_are_there(*step, *shape, found)) return kMissingPage;
  if (keys) write_tokens(*step, *shape, keys, values);
  attend_all(kChoices[choice].attention, {*step, *shape, queries, out, scale}, threads);
  return kNoFault;
} catch (const std::exception&) {
  return kNoResources;
}
}
