// cuemu.h: run CUDA C++ kernel source on the CPU for correctness tests.
//
// One CUDA thread = one fiber (its own stack). Fibers of a block run on one OS thread and switch only
// at barriers / warp collectives, in an order chosen by the launch's schedule (forward, reverse or
// seeded random), so that a missing barrier changes the answer under at least one schedule.
// Blocks run one after the other, in the order that the schedule picks.
#pragma once
#define CUEMU 1
#include <algorithm>
#include <cassert>
#include <cfloat>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sys/mman.h>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#if !defined(__x86_64__) || defined(CUEMU_UCONTEXT)
#include <ucontext.h>
#endif

// ---------------------------------------------------------------- language extensions
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __managed__
#define __constant__ static
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __attribute__((aligned(n)))
// Static shared memory goes to its own ELF section so that a launch can poison it before each block.
#define __shared__ static __attribute__((section("cuemu_shared"), used))
#define __restrict __restrict__

#define CUEMU_VEC1(T, N) struct N##1 { T x; }; static inline N##1 make_##N##1(T x) { return {x}; }
#define CUEMU_VEC2(T, N) struct alignas(2 * sizeof(T)) N##2 { T x, y; }; \
  static inline N##2 make_##N##2(T x, T y) { return {x, y}; }
#define CUEMU_VEC3(T, N) struct N##3 { T x, y, z; }; static inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }
#define CUEMU_VEC4(T, N) struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; }; \
  static inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define CUEMU_VEC(T, N) CUEMU_VEC1(T, N) CUEMU_VEC2(T, N) CUEMU_VEC3(T, N) CUEMU_VEC4(T, N)
CUEMU_VEC(signed char, char) CUEMU_VEC(unsigned char, uchar) CUEMU_VEC(short, short)
CUEMU_VEC(unsigned short, ushort) CUEMU_VEC(int, int) CUEMU_VEC(unsigned int, uint)
CUEMU_VEC(long long, longlong) CUEMU_VEC(unsigned long long, ulonglong)
CUEMU_VEC(float, float) CUEMU_VEC(double, double)
struct dim3 { unsigned x, y, z; constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {} };

namespace cuemu {
// ---------------------------------------------------------------- fibers
#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void cuemu_switch(void** save, void* load);
asm(".text\n.globl cuemu_switch\n.hidden cuemu_switch\n.type cuemu_switch,@function\ncuemu_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
    ".size cuemu_switch,.-cuemu_switch\n");
#endif

enum State : int { READY, BLOCK_WAIT, WARP_WAIT, DONE };
struct Copy { void* dst; const void* src; int n, src_n; };
struct Fiber {
#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
  void* sp;
#else
  ucontext_t uc;
#endif
  char* stack;
  State state;
  uint3 tid;
  unsigned lin;
  const char* where;
  std::vector<Copy> pending;            // cp.async not yet committed
  std::vector<std::vector<Copy>> groups;  // cp.async committed groups, oldest first
};

typedef void (*Combine)(void** lane_args, uint32_t present);
struct Coll { bool used; uint32_t mask, arrived; const char* op; Combine fn; void* arg[32]; };
struct Warp { uint32_t exists, exited; std::vector<Coll> colls; };
struct BlockBar { int id, expected, arrived; const char* op; int acc, line; std::vector<int> who; };

constexpr size_t STACK = 256 * 1024;
constexpr size_t DYN_MAX = 227 * 1024;  // sm_90 and sm_100; sm_80 has 163 KiB

struct State_ {
  Fiber* cur = nullptr;
  uint3 bid{};
  dim3 bdim{}, gdim{};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<int> ready;
  size_t rpos = 0;
  int live = 0;
  std::vector<BlockBar> bars;
  void (*invoke)(void**) = nullptr;
  void** args = nullptr;
  bool fatal = false;
  char err[1024] = {0};
  int sched = 0;  // 0 forward, 1 reverse, >=2 random with that seed
  uint64_t rng = 1;
  uint64_t switches = 0, max_switches = 0, undefined_reads = 0, fault = 0;
  char *dyn_base = nullptr, *dyn = nullptr;
  size_t dyn_bytes = 0;
#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
  void* main_sp = nullptr;
#else
  ucontext_t main_uc;
#endif
  sigjmp_buf jb;
};
static State_ g;

static inline uint64_t rnd() { uint64_t x = g.rng; x ^= x << 13; x ^= x >> 7; x ^= x << 17; return g.rng = x; }

static inline void to_main() {
  Fiber* f = g.cur;
#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
  cuemu_switch(&f->sp, g.main_sp);
#else
  swapcontext(&f->uc, &g.main_uc);
#endif
}
__attribute__((noinline, format(printf, 1, 2))) static void fail(const char* fmt, ...) {
  if (!g.fatal) {
    g.fatal = true;
    va_list ap; va_start(ap, fmt);
    int n = vsnprintf(g.err, sizeof g.err, fmt, ap);
    va_end(ap);
    if (g.cur && n > 0 && n < (int)sizeof g.err)
      snprintf(g.err + n, sizeof g.err - n, " [block (%u,%u,%u) thread (%u,%u,%u)]", g.bid.x, g.bid.y, g.bid.z,
               g.cur->tid.x, g.cur->tid.y, g.cur->tid.z);
  }
  if (g.cur) { to_main(); abort(); }
}
static void permute(std::vector<int>& v) {
  if (g.sched == 0) std::sort(v.begin(), v.end());
  else if (g.sched == 1) std::sort(v.begin(), v.end(), [](int a, int b) { return a > b; });
  else for (size_t i = v.size(); i > 1; --i) std::swap(v[i - 1], v[rnd() % i]);
}
static inline void yield_ready() { g.ready.push_back((int)g.cur->lin); to_main(); }

// ---------------------------------------------------------------- block barriers
static void release_bar(BlockBar& b) {
  std::vector<int> who; who.swap(b.who);
  b.arrived = 0;
  for (int t : who) g.fibers[t].state = READY;
  permute(who);
  g.ready.insert(g.ready.end(), who.begin(), who.end());
}
// expected = 0 means every live thread of the block
static int block_bar(int id, int expected, const char* op, int pred, int line) {
  for (auto& f : g.bars) if (f.id == id && f.arrived) {
    if (f.line != line) fail("divergent barrier: %s at line %d while other threads wait in %s at line %d", op, line, f.op, f.line);
  }
  BlockBar* b = nullptr;
  for (auto& f : g.bars) if (f.id == id) b = &f;
  if (!b) { g.bars.push_back({id, expected, 0, op, 0, 0, {}}); b = &g.bars.back(); }
  if (!b->arrived) { b->acc = 0; b->op = op; b->expected = expected; b->line = line; }
  b->arrived++;
  b->acc += pred != 0;
  b->who.push_back((int)g.cur->lin);
  g.cur->state = BLOCK_WAIT; g.cur->where = op;
  int need = expected ? expected : g.live;
  if (b->arrived == need) {
    int n = b->arrived; (void)n;
    release_bar(*b);
  }
  to_main();
  for (auto& f : g.bars) if (f.id == id) return f.acc;
  return 0;
}

// ---------------------------------------------------------------- warp collectives
static inline unsigned laneid() { return g.cur->lin & 31; }
static void finish_coll(Warp& w, int widx, Coll& c) {
  Combine fn = c.fn; uint32_t arr = c.arrived; void* a[32]; memcpy(a, c.arg, sizeof a);
  c.used = false;
  fn(a, arr);
  std::vector<int> who;
  for (int l = 0; l < 32; ++l) if (arr >> l & 1) { who.push_back(widx * 32 + l); g.fibers[widx * 32 + l].state = READY; }
  permute(who);
  g.ready.insert(g.ready.end(), who.begin(), who.end());
}
template <class A> static void warp_coll(uint32_t mask, const char* op, A* mine, void (*fn)(void**, uint32_t)) {
  unsigned lane = laneid(), widx = g.cur->lin >> 5;
  Warp& w = g.warps[widx];
  if (!(mask >> lane & 1)) fail("%s: mask 0x%08x does not name the calling lane %u", op, mask, lane);
  Coll* c = nullptr;
  for (auto& k : w.colls) if (k.used && (k.mask & mask)) {
    if (k.mask != mask) fail("%s: mask 0x%08x overlaps a pending %s with mask 0x%08x", op, mask, k.op, k.mask);
    if (strcmp(k.op, op)) fail("%s: other lanes of mask 0x%08x wait in %s", op, mask, k.op);
    c = &k;
  }
  if (!c) {
    for (auto& k : w.colls) if (!k.used) { c = &k; break; }
    if (!c) { w.colls.emplace_back(); c = &w.colls.back(); }
    c->used = true; c->mask = mask; c->arrived = 0; c->op = op; c->fn = fn;
  }
  c->arrived |= 1u << lane; c->arg[lane] = mine;
  g.cur->state = WARP_WAIT; g.cur->where = op;
  if (c->arrived == (mask & w.exists & ~w.exited)) finish_coll(w, (int)widx, *c);
  to_main();
}

static void on_exit() {
  Fiber* f = g.cur;
  f->state = DONE;
  --g.live;
  unsigned widx = f->lin >> 5;
  Warp& w = g.warps[widx];
  w.exited |= 1u << (f->lin & 31);
  for (size_t i = 0; i < w.colls.size(); ++i) {
    Coll& c = w.colls[i];
    if (c.used && c.arrived == (c.mask & w.exists & ~w.exited)) finish_coll(w, (int)widx, c);
  }
  for (auto& b : g.bars) if (b.arrived && !b.expected && b.arrived == g.live) release_bar(b);
}
static void entry() {
  g.invoke(g.args);
  on_exit();
  to_main();
  abort();
}
static void start_fiber(Fiber& f) {
#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
  void** top = (void**)(f.stack + STACK);
  *--top = nullptr;
  *--top = (void*)entry;
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  f.sp = top;
#else
  getcontext(&f.uc);
  f.uc.uc_stack.ss_sp = f.stack; f.uc.uc_stack.ss_size = STACK; f.uc.uc_link = nullptr;
  makecontext(&f.uc, entry, 0);
#endif
}

extern "C" char __start_cuemu_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuemu_shared[] __attribute__((weak, visibility("hidden")));

static inline bool is_shared(const void* p) {
  const char* c = (const char*)p;
  return (g.dyn_bytes && c >= g.dyn && c < g.dyn + g.dyn_bytes) || (__start_cuemu_shared && c >= __start_cuemu_shared && c < __stop_cuemu_shared);
}

static void run_block() {
  unsigned n = g.bdim.x * g.bdim.y * g.bdim.z;
  if (__start_cuemu_shared) memset(__start_cuemu_shared, 0xFF, __stop_cuemu_shared - __start_cuemu_shared);
  if (g.dyn_bytes) memset(g.dyn, 0xFF, g.dyn_bytes);
  g.live = (int)n;
  g.bars.clear();
  g.warps.resize((n + 31) / 32);
  for (size_t i = 0; i < g.warps.size(); ++i) {
    unsigned left = n - 32 * (unsigned)i;
    g.warps[i].exists = left >= 32 ? 0xffffffffu : (1u << left) - 1;
    g.warps[i].exited = 0;
    g.warps[i].colls.clear();
  }
  g.ready.clear(); g.rpos = 0;
  for (unsigned i = 0; i < n; ++i) {
    Fiber& f = g.fibers[i];
    f.lin = i; f.state = READY; f.where = "start";
    f.tid = {i % g.bdim.x, i / g.bdim.x % g.bdim.y, i / (g.bdim.x * g.bdim.y)};
    f.pending.clear(); f.groups.clear();
    start_fiber(f);
    g.ready.push_back((int)i);
  }
  permute(g.ready);
  while (g.live > 0 && !g.fatal) {
    if (g.rpos == g.ready.size()) {
      g.cur = nullptr;
      char buf[600]; int o = 0;
      for (unsigned i = 0; i < n && o < 500; ++i) {
        Fiber& f = g.fibers[i];
        if (f.state == DONE) continue;
        unsigned j = i; while (j + 1 < n && g.fibers[j + 1].state == f.state && g.fibers[j + 1].where == f.where) ++j;
        o += snprintf(buf + o, sizeof buf - o, " threads %u..%u wait in %s;", i, j, f.where);
        i = j;
      }
      fail("deadlock in block (%u,%u,%u): %d of %u threads exited;%s", g.bid.x, g.bid.y, g.bid.z, (int)n - g.live, n, buf);
      break;
    }
    if (g.rpos > 4096 && g.rpos * 2 > g.ready.size()) { g.ready.erase(g.ready.begin(), g.ready.begin() + g.rpos); g.rpos = 0; }
    Fiber& f = g.fibers[g.ready[g.rpos++]];
    g.cur = &f;
    if (++g.switches > g.max_switches && g.max_switches) { fail("more than %llu fiber switches: livelock?", (unsigned long long)g.max_switches); }
#if defined(__x86_64__) && !defined(CUEMU_UCONTEXT)
    cuemu_switch(&g.main_sp, f.sp);
#else
    swapcontext(&g.main_uc, &f.uc);
#endif
  }
  g.cur = nullptr;
}

static void on_signal(int sig, siginfo_t* si, void*) {
  if (!g.fatal) {
    g.fatal = true;
    uint3 t = g.cur ? g.cur->tid : uint3{};
    snprintf(g.err, sizeof g.err, "%s at address %p [block (%u,%u,%u) thread (%u,%u,%u)]",
             sig == SIGSEGV || sig == SIGBUS ? "illegal memory access" : sig == SIGFPE ? "integer division by zero" : "undefined behaviour trap or assert",
             si->si_addr, g.bid.x, g.bid.y, g.bid.z, t.x, t.y, t.z);
  }
  g.fault = (uint64_t)si->si_addr;
  siglongjmp(g.jb, 1);
}

static void ensure_fibers(unsigned n) {
  while (g.fibers.size() < n) {
    size_t page = 4096;
    char* m = (char*)mmap(nullptr, STACK + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(m, page, PROT_NONE);
    g.fibers.emplace_back();
    g.fibers.back().stack = m + page;
  }
}

struct Opts { int sched; uint64_t max_switches; uint64_t* stats; uint64_t max_shared; };

static int launch(void (*invoke)(void**), const unsigned* gd, const unsigned* bd, unsigned shmem, void** args,
                  const Opts* o, char* err, int errlen) {
  unsigned n = bd[0] * bd[1] * bd[2];
  g.fatal = false; g.err[0] = 0;
  auto done = [&] { snprintf(err, errlen, "%s", g.err); return g.fatal ? 1 : 0; };
  if (n == 0 || n > 1024 || bd[0] > 1024 || bd[1] > 1024 || bd[2] > 64) { fail("invalid block size %u x %u x %u", bd[0], bd[1], bd[2]); return done(); }
  if (!gd[0] || !gd[1] || !gd[2] || gd[1] > 65535 || gd[2] > 65535) { fail("invalid grid"); return done(); }
  if (shmem > o->max_shared)
    { fail("%u bytes of dynamic shared memory: raise max_dynamic_shared_size_bytes (now %llu) first", shmem, (unsigned long long)o->max_shared); return done(); }
  if (shmem > DYN_MAX) { fail("%u bytes of dynamic shared memory: over the %zu that a block can have", shmem, DYN_MAX); return done(); }
  if (!g.dyn_base) {
    size_t page = 4096, sz = (DYN_MAX + page - 1) / page * page;
    g.dyn_base = (char*)mmap(nullptr, sz + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(g.dyn_base + sz, page, PROT_NONE);
    g.dyn_base += sz;
  }
  g.dyn_bytes = (shmem + 15) / 16 * 16;
  g.dyn = g.dyn_base - g.dyn_bytes;
  ensure_fibers(n);
  g.bdim = dim3(bd[0], bd[1], bd[2]); g.gdim = dim3(gd[0], gd[1], gd[2]);
  g.invoke = invoke; g.args = args; g.sched = o->sched; g.rng = 0x9E3779B97F4A7C15ull * (uint64_t)(o->sched + 1) | 1;
  g.switches = 0; g.max_switches = o->max_switches; g.undefined_reads = 0; g.fault = 0;

  static char* alt = (char*)malloc(65536);
  stack_t ss{}, oss{}; ss.ss_sp = alt; ss.ss_size = 65536; sigaltstack(&ss, &oss);
  struct sigaction sa{}, old[5]; sa.sa_sigaction = on_signal; sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER; sigemptyset(&sa.sa_mask);
  const int sigs[5] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
  for (int i = 0; i < 5; ++i) sigaction(sigs[i], &sa, &old[i]);
  if (!sigsetjmp(g.jb, 1)) {
    uint64_t nb = (uint64_t)gd[0] * gd[1] * gd[2];
    std::vector<int> order;
    if (o->sched && nb <= (1u << 22)) { order.resize(nb); for (uint64_t i = 0; i < nb; ++i) order[i] = (int)i; permute(order); }
    for (uint64_t i = 0; i < nb && !g.fatal; ++i) {
      uint64_t b = order.empty() ? i : (uint64_t)order[i];
      g.bid = {(unsigned)(b % gd[0]), (unsigned)(b / gd[0] % gd[1]), (unsigned)(b / ((uint64_t)gd[0] * gd[1]))};
      run_block();
    }
  }
  for (int i = 0; i < 5; ++i) sigaction(sigs[i], &old[i], nullptr);
  sigaltstack(&oss, nullptr);
  g.cur = nullptr;
  if (o->stats) { o->stats[0] = g.switches; o->stats[1] = g.undefined_reads; o->stats[2] = g.fault; }
  return done();
}

// ---------------------------------------------------------------- kernel export
template <class T> struct tcode { static constexpr const char* v = "?"; };
#define CUEMU_TC(T, S) template <> struct tcode<T> { static constexpr const char* v = S; };
CUEMU_TC(float, "f4") CUEMU_TC(double, "f8") CUEMU_TC(int, "i4") CUEMU_TC(unsigned, "u4") CUEMU_TC(long long, "i8")
CUEMU_TC(unsigned long long, "u8") CUEMU_TC(long, "i8") CUEMU_TC(unsigned long, "u8") CUEMU_TC(short, "i2")
CUEMU_TC(unsigned short, "u2") CUEMU_TC(signed char, "i1") CUEMU_TC(char, "i1") CUEMU_TC(unsigned char, "u1") CUEMU_TC(bool, "b1")
template <class P> static void describe(char*& o, char* end) {
  typedef std::remove_cv_t<std::remove_reference_t<P>> Q;
  if constexpr (std::is_pointer_v<Q>) {
    typedef std::remove_pointer_t<Q> E;
    o += snprintf(o, end - o, "%s*%s:%zu,", std::is_const_v<E> ? "c" : "m", tcode<std::remove_cv_t<E>>::v, sizeof(Q));
  } else o += snprintf(o, end - o, "v%s:%zu,", tcode<Q>::v, sizeof(Q));
}
template <auto F> struct Kernel;
template <class... P, void (*F)(P...)> struct Kernel<F> {
  template <size_t... I> static void call(void** a, std::index_sequence<I...>) { F(*(std::remove_reference_t<P>*)a[I]...); (void)a; }
  static void invoke(void** a) { call(a, std::index_sequence_for<P...>{}); }
  static const char* sig() { static char b[512]; char* o = b; (describe<P>(o, b + sizeof b), ...); *o = 0; return b; }
};
}  // namespace cuemu

#define CUEMU_EXPORT(sym, ...)                                                                                     \
  extern "C" __attribute__((visibility("default"))) int cuemu_launch_##sym(const unsigned* gd, const unsigned* bd, \
      unsigned shmem, void** args, const cuemu::Opts* o, char* err, int errlen) {                                  \
    return cuemu::launch(&cuemu::Kernel<&__VA_ARGS__>::invoke, gd, bd, shmem, args, o, err, errlen);               \
  }                                                                                                                \
  extern "C" __attribute__((visibility("default"))) const char* cuemu_sig_##sym() { return cuemu::Kernel<&__VA_ARGS__>::sig(); }

// Guarded buffers: the end of the data touches a no-access page; before it, a canary down to another such page.
extern "C" __attribute__((visibility("default"))) inline __attribute__((used)) void* cuemu_galloc(size_t n, void** base, size_t* total) {
  size_t page = 4096, pad = (n + 15) / 16 * 16, body = (pad + page - 1) / page * page + page;
  char* m = (char*)mmap(nullptr, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (m == MAP_FAILED) return nullptr;
  mprotect(m + body, page, PROT_NONE);
  mprotect(m, page, PROT_NONE);
  char* p = m + body - pad;
  for (char* q = m + page; q < p; ++q) *q = (char)0xA5;
  for (char* q = p + n; q < p + pad; ++q) *q = (char)0xA5;
  *base = m; *total = body + page;
  return p;
}
extern "C" __attribute__((visibility("default"))) inline __attribute__((used)) int cuemu_gcheck(void* base, size_t total, void* pv, size_t n) {
  char *m = (char*)base, *p = (char*)pv, *end = m + total - 4096;
  for (char* q = m + 4096; q < p; ++q) if (*q != (char)0xA5) return -1;
  for (char* q = p + n; q < end; ++q) if (*q != (char)0xA5) return 1;
  return 0;
}
extern "C" __attribute__((visibility("default"))) inline __attribute__((used)) void cuemu_gfree(void* base, size_t total) { munmap(base, total); }

// ---------------------------------------------------------------- built-ins
#define threadIdx (cuemu::g.cur->tid)
#define blockIdx (cuemu::g.bid)
#define blockDim (cuemu::g.bdim)
#define gridDim (cuemu::g.gdim)
static constexpr int warpSize = 32;
#define CUEMU_DYN_SHARED(T, name) T* name = reinterpret_cast<T*>(cuemu::g.dyn)

// macros, so that a barrier knows its source line: all threads of a block must meet at the same one
#define __syncthreads() ((void)cuemu::block_bar(0, 0, "__syncthreads", 0, __LINE__))
#define __syncthreads_count(p) (cuemu::block_bar(0, 0, "__syncthreads_count", (p), __LINE__))
#define __syncthreads_or(p) (cuemu::block_bar(0, 0, "__syncthreads_or", (p), __LINE__) != 0)
#define __syncthreads_and(p) (cuemu::block_bar(0, 0, "__syncthreads_and", !(p), __LINE__) == 0)
static inline void __threadfence() { asm volatile("" ::: "memory"); }
static inline void __threadfence_block() { asm volatile("" ::: "memory"); }
static inline void __threadfence_system() { asm volatile("" ::: "memory"); }
static inline void __nanosleep(unsigned) { cuemu::yield_ready(); }
static inline void __trap() { cuemu::fail("__trap()"); }
#undef assert
#define assert(e) ((e) ? (void)0 : cuemu::fail("assertion failed: %s (%s:%d)", #e, __FILE__, __LINE__))
static inline unsigned __activemask() { auto& w = cuemu::g.warps[cuemu::g.cur->lin >> 5]; return w.exists & ~w.exited; }
static inline long long clock64() { return (long long)cuemu::g.switches; }
static inline unsigned long long __cuemu_clock() { return cuemu::g.switches; }

namespace cuemu {
struct Nop {};
static void nop(void**, uint32_t) {}
template <class T> struct Shfl { T v, r; int src; bool undef; };
template <class T> static void do_shfl(void** a, uint32_t present) {
  for (int l = 0; l < 32; ++l) if (present >> l & 1) {
    Shfl<T>* s = (Shfl<T>*)a[l];
    if (present >> s->src & 1) s->r = ((Shfl<T>*)a[s->src])->v;
    else { memset((void*)&s->r, 0xFF, sizeof(T)); g.undefined_reads++; }
  }
}
template <class T> static T shfl(uint32_t mask, T v, int src, const char* op) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 2, "CUDA shuffles move 2, 4 or 8 bytes");
  Shfl<T> s; s.v = v; s.src = src;
  warp_coll(mask, op, &s, do_shfl<T>);
  return s.r;
}
struct Vote { unsigned p, r; };
}  // namespace cuemu
static inline void __syncwarp(unsigned mask = 0xffffffffu) { cuemu::Nop n; cuemu::warp_coll(mask, "__syncwarp", &n, cuemu::nop); }
template <class T> static inline T __shfl_sync(unsigned m, T v, int src, int w = 32) {
  int l = cuemu::laneid(); return cuemu::shfl(m, v, (l & ~(w - 1)) + (src & (w - 1)), "__shfl_sync");
}
template <class T> static inline T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = cuemu::laneid(), s = (l & (w - 1)) + (int)d < w ? l + (int)d : l; return cuemu::shfl(m, v, s, "__shfl_down_sync");
}
template <class T> static inline T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32) {
  int l = cuemu::laneid(), s = (l & (w - 1)) >= (int)d ? l - (int)d : l; return cuemu::shfl(m, v, s, "__shfl_up_sync");
}
template <class T> static inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32) {
  int l = cuemu::laneid(), t = l ^ x; int s = t < ((l & ~(w - 1)) + w) ? t : l; return cuemu::shfl(m, v, s, "__shfl_xor_sync");
}
static inline unsigned __ballot_sync(unsigned m, int p) {
  cuemu::Vote v{p != 0, 0};
  cuemu::warp_coll(m, "__ballot_sync", &v, [](void** a, uint32_t pr) {
    unsigned b = 0;
    for (int l = 0; l < 32; ++l) if (pr >> l & 1) b |= ((cuemu::Vote*)a[l])->p << l;
    for (int l = 0; l < 32; ++l) if (pr >> l & 1) ((cuemu::Vote*)a[l])->r = b;
  });
  return v.r;
}
static inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
static inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
template <class T> static inline unsigned __match_any_sync(unsigned m, T val) {
  struct A { T v; unsigned r; } s{val, 0};
  cuemu::warp_coll(m, "__match_any_sync", &s, [](void** a, uint32_t pr) {
    for (int i = 0; i < 32; ++i) if (pr >> i & 1) for (int j = 0; j < 32; ++j)
      if ((pr >> j & 1) && ((A*)a[i])->v == ((A*)a[j])->v) ((A*)a[i])->r |= 1u << j;
  });
  return s.r;
}
#define CUEMU_REDUCE(name, T, expr)                                                       \
  static inline T name(unsigned m, T val) {                                               \
    struct A { T v, r; } s{val, val};                                                     \
    cuemu::warp_coll(m, #name, &s, [](void** a, uint32_t pr) {                            \
      bool first = true; T x{};                                                           \
      for (int l = 0; l < 32; ++l) if (pr >> l & 1) { T y = ((A*)a[l])->v; x = first ? y : (expr); first = false; } \
      for (int l = 0; l < 32; ++l) if (pr >> l & 1) ((A*)a[l])->r = x;                    \
    });                                                                                   \
    return s.r;                                                                           \
  }
CUEMU_REDUCE(__reduce_add_sync, unsigned, x + y) CUEMU_REDUCE(__reduce_add_sync, int, x + y)
CUEMU_REDUCE(__reduce_max_sync, unsigned, x > y ? x : y) CUEMU_REDUCE(__reduce_max_sync, int, x > y ? x : y)
CUEMU_REDUCE(__reduce_min_sync, unsigned, x < y ? x : y) CUEMU_REDUCE(__reduce_min_sync, int, x < y ? x : y)
CUEMU_REDUCE(__reduce_and_sync, unsigned, x & y) CUEMU_REDUCE(__reduce_or_sync, unsigned, x | y) CUEMU_REDUCE(__reduce_xor_sync, unsigned, x ^ y)

// atomics: fibers never preempt each other, so plain read-modify-write is atomic
#define CUEMU_ATOMIC(name, expr) \
  template <class T> static inline T name(T* p, std::common_type_t<T> v) { T o = *p; *p = (T)(expr); return o; } \
  template <class T> static inline T name##_block(T* p, std::common_type_t<T> v) { return name(p, v); }          \
  template <class T> static inline T name##_system(T* p, std::common_type_t<T> v) { return name(p, v); }
CUEMU_ATOMIC(atomicAdd, o + v) CUEMU_ATOMIC(atomicSub, o - v) CUEMU_ATOMIC(atomicMax, o > v ? o : v)
CUEMU_ATOMIC(atomicMin, o < v ? o : v) CUEMU_ATOMIC(atomicAnd, o & v) CUEMU_ATOMIC(atomicOr, o | v) CUEMU_ATOMIC(atomicXor, o ^ v)
CUEMU_ATOMIC(atomicInc, o >= v ? 0 : o + 1) CUEMU_ATOMIC(atomicDec, (o == 0 || o > v) ? v : o - 1)
template <class T> static inline T atomicExch(T* p, std::common_type_t<T> v) { T o = *p; *p = v; return o; }
template <class T> static inline T atomicCAS(T* p, std::common_type_t<T> c, std::common_type_t<T> v) {
  T o = *p; if (o == c) *p = v; else cuemu::yield_ready();  // a spin lock makes progress
  return o;
}
template <class T> static inline T __ldg(const T* p) { return *p; }
template <class T> static inline T __ldcs(const T* p) { return *p; }
template <class T> static inline T __ldcg(const T* p) { return *p; }
template <class T> static inline void __stcs(T* p, T v) { *p = v; }
template <class T> static inline void __stcg(T* p, T v) { *p = v; }
static inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }

// math
using std::max; using std::min;
static inline int max(int a, unsigned b) { return (unsigned)a > b ? a : (int)b; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
// glibc declares __expf and friends itself, so these are macros
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __exp10f(x) powf(10.0f, x)
#define __log2f(x) log2f(x)
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= (x >> i & 1) << (31 - i); return r; }
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) { return (unsigned)((((uint64_t)hi << 32 | lo) << (n & 31)) >> 32); }
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) { return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31)); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
static inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline int __float2int_ru(float x) { return (int)ceilf(x); }
static inline unsigned __float2uint_rn(float x) { return x <= 0 ? 0u : (unsigned)nearbyintf(x); }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
static inline float __int2float_rn(int x) { return (float)x; }
template <class To, class From> static inline To cuemu_bits(From f) { static_assert(sizeof(To) == sizeof(From), ""); To t; memcpy(&t, &f, sizeof t); return t; }
static inline int __float_as_int(float f) { return cuemu_bits<int>(f); }
static inline unsigned __float_as_uint(float f) { return cuemu_bits<unsigned>(f); }
static inline float __int_as_float(int i) { return cuemu_bits<float>(i); }
static inline float __uint_as_float(unsigned i) { return cuemu_bits<float>(i); }
static inline int __dp4a(int a, int b, int c) { for (int i = 0; i < 4; ++i) c += (int)(signed char)(a >> 8 * i) * (int)(signed char)(b >> 8 * i); return c; }
// prmt.b32 without its sign replication: nvcc masks the selector to 3 bits a nibble (the PTX form is ptx_prmt)
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
  uint64_t v = (uint64_t)y << 32 | x; unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= ((unsigned)(v >> 8 * (s >> 4 * i & 7)) & 0xFF) << 8 * i;
  return r;
}
