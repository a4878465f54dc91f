// What the kernels share.

#include "ptx.cuh"

template <Type T> struct Bytes { static constexpr int each = T == F32 ? 4 : 2; };

// The counter-based generator of random.py, one step.
__device__ inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

// Where the 16-byte piece of a row lies: shifted so that eight rows meet eight different banks.
template <int PIECES> __device__ inline uint32_t place(int row, int piece) {
  const int shift = PIECES >= 8 ? row & 7 : row >> 1 & 3;
  return row * PIECES * 16 + ((piece ^ shift) << 4);
}
