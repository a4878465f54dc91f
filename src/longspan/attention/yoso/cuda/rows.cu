// Row by row work before and after outer.cu: compiled by NVRTC for one set of
//
//   D, E   channels of queries and keys, and of values and gradients; multiples of 8 up to 128
//   W      columns of what outer.cu reads, 64 or 128
//   X      number type of rows in and out: BF16 or F16
//
// Eight channels a lane, a group of lanes a row. Blocks of queries (B H, nq) and of keys
// (B H, nk) take turns, from the last head to the first: other kernels go from the first to the last, and
// find in the L2 cache what was written last, or leave there what is read first.

#include "common.cuh"
#include "rows.cuh"

constexpr int GROUP = W / 8;
constexpr Type SUMS = sums_of(X);
constexpr Type G = X == F16 ? F32 : X;  // of gradients divided by norms, for which float16 has no room
constexpr int PARTS = 2;  // rows of a group of lanes, all on their way before the first is worked on

struct Rows {
  bool key;                  // which side
  uint32_t begin, n, count;  // the first of this block; tokens of a head, and of the side
  __device__ Rows(int64_t batch_heads, int64_t queries, int64_t keys) {
    const uint32_t block = gridDim.x - 1 - blockIdx.x;
    key = block % 2;
    begin = block / 2 * (256 / GROUP * PARTS);
    n = (uint32_t)(key ? keys : queries);
    count = (uint32_t)batch_heads * n;
  }
  __device__ uint32_t operator[](int part) const { return begin + (part * 256 + threadIdx.x) / GROUP; }
};

__device__ inline Row8<X> load(const char* rows, uint32_t row, int channels, bool there) {
  const int lane = threadIdx.x % GROUP;
  Row8<X> word;
  if (there && lane * 8 < channels) word.load(rows + (int64_t)row * (channels * 2), lane);
  else word.clear();
  return word;
}

__device__ inline float inverse_root(float x) { return x == 0 ? 0 : rsqrtf(x); }

// By which rows can be divided without rounding; zero for zero, and for NaN infinity.
__device__ inline float power_of_two_above(float x) {
  return 2 * __uint_as_float(__float_as_uint(x) & 0x7f800000);
}

// The gradient through the unit vector of y: g ← (g − (g·y) y) / norm, where `inverse` is given; norms
// (B H, nq) of g and (B H, nk) of v, zero for masked keys; and the first half of what outer.cu reads of a
// token in float16, the unit vectors in [ĝ | q̂ |g| room/Σ|g|] or [v̂ | k̂ |v| room/Σ|v|]. Of float16 rows
// the norms are powers of two, so that all digits are kept.
extern "C" __global__ void __launch_bounds__(256) measure(
    const char* g, const char* y, const float* inverse, char* g_out, const char* v,
    const bool* mask, float* g_norms, float* v_norms, char* q_rows, char* k_rows,
    int64_t batch_heads, int64_t heads, int64_t queries, int64_t keys) {
  const Rows rows(batch_heads, queries, keys);
  const int lane = threadIdx.x % GROUP;
  const bool through = !rows.key && inverse;
  Row8<X> x_word[PARTS], u_word[PARTS];
  float factor[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const uint32_t row = rows[p];
    bool there = row < rows.count;
    if (rows.key && mask && there) {
      const uint32_t bh = row / rows.n;
      there = mask[bh / (uint32_t)heads * keys + row % rows.n];
    }
    x_word[p] = load(rows.key ? v : g, row, E, there);
    u_word[p] = load(y, row, E, there && through);
    factor[p] = there && through ? inverse[row] : 1;
  }
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const uint32_t row = rows[p];
    float x[8], u[8];
    x_word[p].unpack_to(x);
    if (through) {
      u_word[p].unpack_to(u);
      const float along = dot<GROUP>(x, u);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = (x[i] - along * u[i]) * factor[p];
    }
    const float square = dot<GROUP>(x, x);
    float shrink = inverse_root(square), norm = square * shrink;
    if (X == F16) {
      norm = power_of_two_above(norm);
      shrink = inverse_of(norm);
    }
    if (row >= rows.count) continue;
    if (through && lane * 8 < E) store8<G>(g_out + (int64_t)row * (E * Bytes<G>::each), lane, x);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= shrink;
    if (lane == 0) (rows.key ? v_norms : g_norms)[row] = norm;
    store8<F16>((rows.key ? k_rows : q_rows) + (int64_t)row * (4 * W), lane, x);
  }
}

// Sums of the norms over the tokens of a head, (2, BH): a block each, always in the same order. And where
// it is asked for, the largest of `most`, (BH, hashes), of the first `used` hashes: the tokens of the
// fullest bucket of queries and of keys, (2, BH). The queue of outer.cu is set to zero.
extern "C" __global__ void __launch_bounds__(1024) total(
    const float* g_norms, const float* v_norms, float* totals, const uint32_t* q_most,
    const uint32_t* k_most, uint32_t* fullest, int64_t batch_heads, int64_t queries, int64_t keys,
    int64_t hashes, int64_t used, uint32_t* queue) {
  __shared__ float parts[32];
  if (blockIdx.x == 0 && threadIdx.x == 0) *queue = 0;
  const bool key = blockIdx.x >= batch_heads;
  const int64_t n = key ? keys : queries;
  const int64_t bh = blockIdx.x - (key ? batch_heads : 0);
  const float* norms = (key ? v_norms : g_norms) + bh * n;
  float sum = 0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += 1024) sum += norms[i];
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = parts[threadIdx.x];
  for (int o = 16; o; o /= 2) sum += __shfl_xor_sync(~0u, sum, o);
  if (threadIdx.x == 0) totals[blockIdx.x] = sum;
  if (!fullest) return;
  uint32_t most = 0;
  for (int64_t i = threadIdx.x; i < used; i += 32)
    most = max(most, (key ? k_most : q_most)[bh * hashes + i]);
  most = __reduce_max_sync(~0u, most);
  if (threadIdx.x == 0) fullest[blockIdx.x] = most;
}

// The second half of what outer.cu reads, and zeros where it adds: to the queries of heads with a bucket of
// more than `above` keys and the other way round, or to all where no `fullest` is given.
extern "C" __global__ void __launch_bounds__(256) pair_rows(
    const char* q, const char* k, const float* g_norms, const float* v_norms, const float* totals,
    const uint32_t* fullest, char* q_rows, char* k_rows, char* q_sums, char* k_sums,
    int64_t batch_heads, int64_t queries, int64_t keys, int64_t above, float room) {
  const Rows rows(batch_heads, queries, keys);
  const int lane = threadIdx.x % GROUP;
  const float* norms = rows.key ? v_norms : g_norms;
  totals += rows.key ? batch_heads : 0;
  if (fullest) fullest += rows.key ? 0 : batch_heads;
  Row8<X> word[PARTS];
  float factor[PARTS];
  bool clear[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const uint32_t row = rows[p], bh = row / rows.n;
    const bool there = row < rows.count;
    word[p] = load(rows.key ? k : q, row, D, there);
    const float norm = there ? norms[row] : 0, total = there ? totals[bh] : 0;
    factor[p] = total == 0 ? 0 : __fdividef(norm * room, total);
    clear[p] = there && !(fullest && fullest[bh] <= above);
  }
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const uint32_t row = rows[p];
    float x[8];
    word[p].unpack_to(x);
    const float shrink = inverse_root(dot<GROUP>(x, x)) * factor[p];
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= shrink;
    if (row < rows.count)
      store8<F16>((rows.key ? k_rows : q_rows) + (int64_t)row * (4 * W) + 2 * W, lane, x);
    if (clear[p]) {
      Row8<SUMS> zeros;
      zeros.clear();
      zeros.store((rows.key ? k_sums : q_sums) + (int64_t)row * (W * Bytes<SUMS>::each), lane);
    }
  }
}

// Gradients of queries and keys from the sums that outer.cu left: scaled back by the factors that
// `pair_rows` took out, and through the norm of the row. Where D = W and sums are float16, a gradient takes
// the memory of its sums.
extern "C" __global__ void __launch_bounds__(256) finish(
    const char* q_sums, const char* k_sums, const char* q, const char* k, const float* g_norms,
    const float* v_norms, const float* totals, char* dq, char* dk, int64_t batch_heads,
    int64_t queries, int64_t keys, float scale) {
  const Rows rows(batch_heads, queries, keys);
  const int lane = threadIdx.x % GROUP;
  const float* norms = rows.key ? v_norms : g_norms;
  totals += rows.key ? 0 : batch_heads;
  Row8<X> word[PARTS];
  Row8<SUMS> sum[PARTS];
  float norm[PARTS], total[PARTS];
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const uint32_t row = rows[p];
    const bool there = row < rows.count;
    word[p] = load(rows.key ? k : q, row, D, there);
    const char* sums = (rows.key ? k_sums : q_sums) + (int64_t)row * (W * Bytes<SUMS>::each);
    if (there) sum[p] = load_sums<SUMS>(sums, lane);
    else sum[p].clear();
    norm[p] = there ? norms[row] : 0;
    total[p] = there ? totals[row / rows.n] : 0;
  }
  __syncwarp();  // all of a row is read before any of it is written
#pragma unroll
  for (int p = 0; p < PARTS; p++) {
    const uint32_t row = rows[p];
    float u[8], x[8];
    word[p].unpack_to(u);
    const float inverse = inverse_root(dot<GROUP>(u, u));
#pragma unroll
    for (int i = 0; i < 8; i++) u[i] *= inverse;
    sum[p].unpack_to(x);
    const float along = dot<GROUP>(x, u), factor = inverse * scale * norm[p] * total[p];
#pragma unroll
    for (int i = 0; i < 8; i++)
      x[i] = norm[p] == 0 ? 0 : (x[i] - along * u[i]) * factor;  // a masked key may hold anything
    if (row < rows.count && lane * 8 < D)
      store8<X>((rows.key ? dk : dq) + (int64_t)row * (D * 2), lane, x);
  }
}
