// Streams of bytes to arena pages and back, many pages in one launch. Piece i of a launch is
//   page_ids[i]        page of the arena, bytes [page_ids[i] * page_bytes, + page_bytes)
//   stream_offset[i]   where the piece starts in the stream buffer
//   piece_bytes[i]     bytes of the stream in this page, <= page_bytes; less only in a stream's last page
// blockIdx.x is the piece, blockIdx.y a part of the page. A page id < 0 is skipped.
// Whole 16-byte units go as vectors where both sides are aligned (arena pages always are).

struct Piece {
  long long page;    // first byte in the arena
  long long stream;  // first byte in the stream buffer
  int bytes;
};
__device__ __forceinline__ Piece piece_of(const int* page_ids, const long long* offsets, const int* bytes, int page_bytes) {
  const int i = blockIdx.x;
  Piece p;
  p.page = (long long)page_ids[i] * page_bytes;
  p.stream = offsets[i];
  p.bytes = page_ids[i] < 0 ? -1 : min(bytes[i], page_bytes);
  return p;
}
__device__ __forceinline__ void copy_bytes(unsigned char* to, const unsigned char* from, int bytes) {
  const int first = blockIdx.y * blockDim.x + threadIdx.x, stride = gridDim.y * blockDim.x;
  const int vectors = (((size_t)to | (size_t)from) & 15) ? 0 : bytes / 16;
  for (int i = first; i < vectors; i += stride) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (int i = vectors * 16 + first; i < bytes; i += stride) to[i] = from[i];
}

// arena pages -> stream
extern "C" __global__ void __launch_bounds__(256)
gather_pages(const unsigned char* __restrict__ arena, unsigned char* __restrict__ stream, const int* __restrict__ page_ids,
             const long long* __restrict__ stream_offset, const int* __restrict__ piece_bytes, int page_bytes) {
  const Piece p = piece_of(page_ids, stream_offset, piece_bytes, page_bytes);
  if (p.bytes > 0) copy_bytes(stream + p.stream, arena + p.page, p.bytes);
}

// stream -> arena pages; what a stream's last page holds behind its end becomes zero
extern "C" __global__ void __launch_bounds__(256)
scatter_pages(unsigned char* __restrict__ arena, const unsigned char* __restrict__ stream, const int* __restrict__ page_ids,
              const long long* __restrict__ stream_offset, const int* __restrict__ piece_bytes, int page_bytes) {
  const Piece p = piece_of(page_ids, stream_offset, piece_bytes, page_bytes);
  if (p.bytes < 0) return;
  copy_bytes(arena + p.page, stream + p.stream, p.bytes);
  for (int i = p.bytes + blockIdx.y * blockDim.x + threadIdx.x; i < page_bytes; i += gridDim.y * blockDim.x)
    arena[p.page + i] = 0;
}
