// Row by row work before and after outer.cu: compiled by NVRTC for one set of
//
//   D, E   channels of queries and keys, and of values and gradients; multiples of 8 up to 128
//   W      columns of what outer.cu reads, 64 or 128
//
// bfloat16 rows, eight channels a lane, a group of lanes a row. Queries come first in the grid, then
// keys: rows 0 … BH nq − 1, and BH nq … BH (nq + nk) − 1.

#include "common.cuh"
#include "rows.cuh"

constexpr int GROUP = W / 8, ROWS = 256 / GROUP;

struct Row {
  bool key, there;
  int64_t at;   // of its side
  uint32_t bh;  // its head
  __device__ Row(int64_t heads, int64_t queries, int64_t keys) {
    const int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.x / GROUP;
    key = row >= heads * queries;
    there = row < heads * (queries + keys);
    at = key ? row - heads * queries : row;
    bh = there ? (uint32_t)at / (uint32_t)(key ? keys : queries) : 0;
  }
};

__device__ inline void load8(const char* rows, int64_t row, int channels, bool there, float (&x)[8]) {
  const int lane = threadIdx.x % GROUP;
  Row8<BF16> word;
  if (there && lane * 8 < channels) word.load(rows + row * channels * 2, lane);
  else word.clear();
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = 0;
  word.add_to(x);
}

// The gradient through the unit vector of y: g ← (g − (g·y) y) / norm, where `inverse` is given; norms
// (B H, nq) of g and (B H, nk) of v, zero for masked keys; and the first half of what outer.cu reads of a
// token in float16, the unit vectors in [ĝ | q̂ |g| room/Σ|g|] or [v̂ | k̂ |v| room/Σ|v|].
extern "C" __global__ void __launch_bounds__(256) measure(
    const char* g, const char* y, const float* inverse, char* g_out, const char* v,
    const bool* mask, float* g_norms, float* v_norms, char* q_rows, char* k_rows,
    int64_t batch_heads, int64_t heads, int64_t queries, int64_t keys) {
  const Row row(batch_heads, queries, keys);
  const int lane = threadIdx.x % GROUP;
  bool there = row.there;
  if (row.key && there && mask)
    there = mask[row.bh / (uint32_t)heads * keys + row.at - row.bh * keys];
  float x[8];
  load8(row.key ? v : g, row.at, E, there, x);
  if (!row.key && inverse) {
    float u[8];
    load8(y, row.at, E, there, u);
    const float along = dot<GROUP>(x, u), factor = there ? inverse[row.at] : 0;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] = (x[i] - along * u[i]) * factor;
    if (there && lane * 8 < E) store8<BF16>(g_out + row.at * (E * 2), lane, x);
  }
  const float norm = sqrtf(dot<GROUP>(x, x));
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= inverse_of(norm);
  if (!row.there) return;
  if (lane == 0) (row.key ? v_norms : g_norms)[row.at] = norm;
  store8<F16>((row.key ? k_rows : q_rows) + row.at * (4 * W), lane, x);
}

// Sums of the norms over the tokens of a head, (2, BH): a block each, always in the same order. And where
// it is asked for, the largest of `most`, (BH, hashes), of the first `used` hashes: the tokens of the
// fullest bucket of queries and of keys, (2, BH).
extern "C" __global__ void __launch_bounds__(1024) total(
    const float* g_norms, const float* v_norms, float* totals, const uint32_t* q_most,
    const uint32_t* k_most, uint32_t* fullest, int64_t batch_heads, int64_t queries, int64_t keys,
    int64_t hashes, int64_t used) {
  __shared__ float parts[32];
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
  const Row row(batch_heads, queries, keys);
  const int lane = threadIdx.x % GROUP;
  const float norm = row.there ? (row.key ? v_norms : g_norms)[row.at] : 0;
  const float total = totals[row.bh + (row.key ? batch_heads : 0)];
  float x[8];
  load8(row.key ? k : q, row.at, D, row.there, x);
  const float factor = inverse_of(sqrtf(dot<GROUP>(x, x))) * norm * room * inverse_of(total);
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] *= factor;
  if (!row.there) return;
  store8<F16>((row.key ? k_rows : q_rows) + row.at * (4 * W) + 2 * W, lane, x);
  if (fullest && fullest[row.bh + (row.key ? 0 : batch_heads)] <= above) return;
  *((uint4*)((row.key ? k_sums : q_sums) + row.at * (2 * W)) + lane) = make_uint4(0, 0, 0, 0);
}

// Gradients of queries and keys from the sums that outer.cu left, in float16 and its order of columns:
// scaled back by the factors that `pair_rows` took out, and through the norm of the row. Where D = W,
// a gradient takes the memory of its sums.
extern "C" __global__ void __launch_bounds__(256) finish(
    const char* q_sums, const char* k_sums, const char* q, const char* k, const float* g_norms,
    const float* v_norms, const float* totals, char* dq, char* dk, int64_t batch_heads,
    int64_t queries, int64_t keys, float scale) {
  const Row row(batch_heads, queries, keys);
  const int lane = threadIdx.x % GROUP;
  const float norm = row.there ? (row.key ? v_norms : g_norms)[row.at] : 0;
  const bool there = norm > 0;  // a masked key may hold anything
  float u[8], x[8];
  load8(row.key ? k : q, row.at, D, there, u);
  const float inverse = inverse_of(sqrtf(dot<GROUP>(u, u)));
#pragma unroll
  for (int i = 0; i < 8; i++) u[i] *= inverse;
  const uint32_t* sums = (const uint32_t*)((row.key ? k_sums : q_sums) + row.at * (2 * W));
#pragma unroll
  for (int a = 0; a < 4; a++) {
    const uint32_t word = there ? sums[column_word(lane, a)] : 0;
    unpack(word, x[2 * a], x[2 * a + 1], F16);
  }
  const float along = dot<GROUP>(x, u);
  const float factor =
      inverse * scale * norm * totals[row.bh + (row.key ? 0 : (uint32_t)batch_heads)];
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = (x[i] - along * u[i]) * factor;
  __syncwarp();  // all of a row is read before any of it is written
  if (row.there && lane * 8 < D) store8<BF16>((row.key ? dk : dq) + row.at * (D * 2), lane, x);
}
