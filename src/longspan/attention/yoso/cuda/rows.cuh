// Rows of numbers, eight neighbouring channels a lane.

// Lanes that hold a row.
__device__ constexpr int group_of(int channels) {
  return channels <= 8 ? 1 : channels <= 16 ? 2 : channels <= 32 ? 4 : channels <= 64 ? 8
         : channels <= 128 ? 16 : 32;
}

// Eight channels, as they lie in memory.
template <Type T> struct Row8 {
  uint4 word[T == F32 ? 2 : 1];
  __device__ void load(const void* row, int lane) {
    const uint4* p = (const uint4*)row + lane * (T == F32 ? 2 : 1);
    word[0] = __ldg(p);
    if constexpr (T == F32) word[1] = __ldg(p + 1);
  }
  __device__ void clear() {
    word[0] = make_uint4(0, 0, 0, 0);
    if constexpr (T == F32) word[1] = make_uint4(0, 0, 0, 0);
  }
  __device__ void store(void* row, int lane) const {
    uint4* p = (uint4*)row + lane * (T == F32 ? 2 : 1);
    p[0] = word[0];
    if constexpr (T == F32) p[1] = word[1];
  }
  // += factor x, of float16 rows in their own precision
  __device__ void add_scaled(float factor, const Row8& x) {
    static_assert(T == F16);
    const uint32_t twice = pack(factor, factor, F16), *from = (const uint32_t*)x.word;
    uint32_t* to = (uint32_t*)word;
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = multiply_add2(twice, from[i], to[i]);
  }
  __device__ void unpack_to(float (&x)[8]) const {
    const uint32_t* w = (const uint32_t*)word;
    if constexpr (T == F32) {
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = __uint_as_float(w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) unpack(w[i], x[2 * i], x[2 * i + 1], T);
    }
  }
  // += factor x, of sums in float32
  __device__ void add_to(float (&sum)[8], float factor = 1) const {
    float x[8];
    unpack_to(x);
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += factor * x[i];
  }
};

template <Type T> __device__ inline void store8(void* row, int lane, const float (&x)[8]) {
  uint4* p = (uint4*)row + lane * (T == F32 ? 2 : 1);
  if constexpr (T == F32) {
    p[0] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                      __float_as_uint(x[3]));
    p[1] = make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]),
                      __float_as_uint(x[7]));
  } else {
    p[0] = make_uint4(pack(x[0], x[1], T), pack(x[2], x[3], T), pack(x[4], x[5], T),
                      pack(x[6], x[7], T));
  }
}

// Σ over the row of a b, for all lanes of the group.
template <int GROUP> __device__ inline float dot(const float (&a)[8], const float (&b)[8]) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) sum += a[i] * b[i];
  for (int o = 1; o < GROUP; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
  return sum;
}

// The same of float16 rows, this lane's part of it: its eight products in their own precision, or not.
__device__ inline float dot16(const Row8<F16>& a, const Row8<F16>& b) {
  const uint32_t *x = (const uint32_t*)a.word, *y = (const uint32_t*)b.word;
  uint32_t both = multiply2(x[0], y[0]);
#pragma unroll
  for (int i = 1; i < 4; i++) both = multiply_add2(x[i], y[i], both);
  float low, high;
  unpack(both, low, high, F16);
  return low + high;
}

__device__ inline float dot32(const Row8<F16>& a, const Row8<F16>& b) {
  float x[8], y[8];
  a.unpack_to(x);
  b.unpack_to(y);
  return dot<1>(x, y);
}

// Four sums over the group, for all its lanes: each lane first adds up one of them.
template <int GROUP> __device__ inline void sum4(float (&x)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const float a = __shfl_xor_sync(~0u, odd ? x[0] : x[2], 1) + (odd ? x[2] : x[0]);
  const float b = __shfl_xor_sync(~0u, odd ? x[1] : x[3], 1) + (odd ? x[3] : x[1]);
  float sum = __shfl_xor_sync(~0u, upper ? a : b, 2) + (upper ? b : a);
  for (int o = 4; o < GROUP; o *= 2) sum += __shfl_xor_sync(~0u, sum, o);
#pragma unroll
  for (int i = 0; i < 4; i++) x[i] = __shfl_sync(~0u, sum, i / 2 + i % 2 * 2, GROUP);
}

__device__ inline float inverse_of(float norm) { return norm > 0 ? 1 / norm : 0; }

// Number type of the sums that outer.cu leaves for rows of a type: float16 rows have the digits that
// adding up in float16 would lose.
__device__ constexpr Type sums_of(Type x) { return x == BF16 ? F16 : F32; }

// Eight channels of such a row, in outer.cu's order of columns: 8 a + 2 b + c of every 32 hold what belongs
// to 8 b + 2 a + c.
template <Type T> __device__ inline Row8<T> load_sums(const char* row, int lane) {
  Row8<T> x;
#pragma unroll
  for (int a = 0; a < 4; a++) {
    const int pair = lane / 4 * 16 + a * 4 + lane % 4;
    if constexpr (T == F32) ((uint2*)x.word)[a] = ((const uint2*)row)[pair];
    else ((uint32_t*)x.word)[a] = ((const uint32_t*)row)[pair];
  }
  return x;
}
