// moe_tile_stream.cuh: one warp's planes, from their pages to shared memory ahead of their decoding.
#pragma once
#include "moe_tile_layer.cuh"

constexpr int kMaxStages = 8;
constexpr int kMaxPlanes = 8;

// from + a * b in one instruction, which the compiler would take apart
TILE_INLINE const unsigned char* multiply_add(unsigned a, unsigned b, const unsigned char* from) {
#if defined(CUEMU)
  return from + (size_t)a * b;
#else
  unsigned long long sum;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(sum) : "r"(a), "r"(b), "l"(from));
  return (const unsigned char*)sum;
#endif
}

// Units in flight in a ring: 8 of 2 bits or 2 of 8 bits in 8 KiB.
__host__ __device__ constexpr int ring_stages(int bits, int ring_bytes) {
  return ring_bytes / (bits * kUnitBytes) < kMaxStages ? ring_bytes / (bits * kUnitBytes) : kMaxStages;
}

// A warp's place in the planes of a block. Units are copied in order; each copy is one group of cp.async.
struct Stream {
  unsigned char* ring;  // this warp's
  unsigned* ids;        // this warp's: page ids of the planes at list index `page`
  unsigned page;        // ~0: none yet

  // Bits is a number or, where code size matters more, a variable.
  template <class Bits>
  TILE_INLINE void issue(Stream& s, const Layer& l, Bits bits, int block, int row_tile, int unit, int stage) {
    const int lane = threadIdx.x & 31;
    const bool half = unit >= l.full_units;
    const unsigned byte = half ? (unsigned)l.row_tiles * l.full_units * kUnitBytes + row_tile * (kUnitBytes / 2)
                               : ((unsigned)row_tile * l.full_units + unit) * kUnitBytes;
    const unsigned page = byte >> l.page_shift;
    if (page != s.page) {  // all planes cross pages together
      s.page = page;
      if (lane < bits) s.ids[lane] = (unsigned)__ldg(l.plane_pages + (((unsigned)block * l.planes + lane) * l.plane_list + page));
      __syncwarp();
    }
    unsigned char* to = s.ring + stage * (bits * kUnitBytes) + lane * 16;
    const unsigned char* from = l.arena + (byte & ((1u << l.page_shift) - 1)) + lane * (half ? 8 : 16);
    const uint4 low = ((const uint4*)s.ids)[0], high = bits > 4 ? ((const uint4*)s.ids)[1] : low;
    const unsigned ids[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int p = 0; p < kMaxPlanes; ++p) {
      if (p >= bits) break;
      const unsigned char* plane = multiply_add(ids[p], 1u << l.page_shift, from);
      if (half) ptx_cp_async8(to + p * kUnitBytes, plane);  // where the first tile of a full unit would be
      else ptx_cp_async16(to + p * kUnitBytes, plane);
    }
  }
  // The first units of a row tile; one group of copies a stage, empty where there are fewer units.
  TILE_INLINE void prologue(Stream& s, const Layer& l, int bits, int block, int row_tile, int first, int count, int stages) {
    s.page = ~0u;
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      if (i < count) issue(s, l, bits, block, row_tile, first + i, i);
      __syncwarp();  // ids may change with the next unit
      ptx_cp_async_commit();
    }
  }
  // planes[row of the pair][plane] of one tile of the unit in `stage`; a half unit has no tile 1
  template <int Q> TILE_INLINE void read_tile(const Stream& s, int stage, int tile, unsigned planes[2][Q]) {
    const unsigned char* from = s.ring + stage * (Q * kUnitBytes) + (threadIdx.x & 31) * 16 + tile * 8;
#pragma unroll
    for (int p = 0; p < Q; ++p) {
      const uint2 v = *(const uint2*)(from + p * kUnitBytes);
      planes[0][p] = v.x;
      planes[1][p] = v.y;
    }
  }
  // Both tiles at once, without bank conflicts, for twice the registers; those of a missing tile 1 mean nothing.
  template <int Q> TILE_INLINE void read(const Stream& s, int stage, unsigned planes[2][2][Q]) {
    const unsigned char* from = s.ring + stage * (Q * kUnitBytes) + (threadIdx.x & 31) * 16;
#pragma unroll
    for (int p = 0; p < Q; ++p) {
      const uint4 v = *(const uint4*)(from + p * kUnitBytes);
      planes[0][0][p] = v.x;
      planes[0][1][p] = v.y;
      planes[1][0][p] = v.z;
      planes[1][1][p] = v.w;
    }
  }
};
// A width known to the compiler, where Stream::issue takes one.
template <int Q> struct Constant {
  static constexpr int value = Q;
  __device__ constexpr operator int() const { return Q; }
};
