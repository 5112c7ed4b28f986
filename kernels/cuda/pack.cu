// Codes to canonical bit planes and back. Plane p holds bit (B - 1 - p) of every code; element (row, k)
// is bit k % 32 of word k / 32 of its row. One warp makes or reads one word of every plane.
extern "C" __global__ void __launch_bounds__(256)
pack_planes(const unsigned char* __restrict__ codes,  // [rows, columns]
            unsigned* __restrict__ planes,            // [parent_bits, rows, words]
            int rows, int columns, int words, int parent_bits) {
  const int lane = threadIdx.x & 31;
  const long long num_words = (long long)rows * words;
  const long long stride = (long long)gridDim.x * (blockDim.x >> 5);
  for (long long i = (long long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); i < num_words; i += stride) {
    const long long row = i / words;
    const int k = (int)(i - row * words) * 32 + lane;
    const unsigned code = k < columns ? codes[row * columns + k] : 0u;
    unsigned mine = 0;
    for (int p = 0; p < parent_bits; ++p) {
      const unsigned word = __ballot_sync(0xffffffffu, code >> (parent_bits - 1 - p) & 1);
      if (lane == p) mine = word;
    }
    if (lane < parent_bits) planes[lane * num_words + i] = mine;
  }
}

// The first `bits` planes give the codes of that width.
extern "C" __global__ void __launch_bounds__(256)
unpack_codes(const unsigned* __restrict__ planes,  // [>= bits, rows, words]
             unsigned char* __restrict__ codes,    // [rows, columns]
             int rows, int columns, int words, int bits) {
  const int lane = threadIdx.x & 31;
  const long long num_words = (long long)rows * words;
  const long long stride = (long long)gridDim.x * (blockDim.x >> 5);
  for (long long i = (long long)blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5); i < num_words; i += stride) {
    const long long row = i / words;
    const int k = (int)(i - row * words) * 32 + lane;
    const unsigned mine = lane < bits ? planes[lane * num_words + i] : 0u;
    unsigned code = 0;
    for (int p = 0; p < bits; ++p) code = code << 1 | (__shfl_sync(0xffffffffu, mine, p) >> lane & 1);
    if (k < columns) codes[row * columns + k] = (unsigned char)code;
  }
}
