// The verbs of YOSO that scatter and gather rows: compiled by NVRTC for one set of
//
//   D      channels of a row, a multiple of 8 up to 256
//   BITS   bits of a code, 1 to 16; codes are uint8 up to 8 bits, uint16 above
//   X      number type of rows in and out: BF16, F16 or F32
//   TABLE  number type of table rows
//   INDEX  type of the numbers in the lists of tokens, uint16_t or uint32_t

#include "buckets.cuh"
#include "common.cuh"
#include "rows.cuh"

constexpr int GROUP = group_of(D);     // lanes that hold a row
constexpr bool FULL = D == GROUP * 8;  // no lane of a group is idle

// Table (BH, step, C, D) of hashes h0 … h0 + step − 1: rows of x, at the given byte strides, summed by
// bucket. Lists (BH, m, n) and the first place of every bucket (BH, m, C + 1).
#define BUCKET_SUM(NAME, PER_SM)                                                                   \
  extern "C" __global__ void __launch_bounds__(32, PER_SM)                                         \
      NAME(const INDEX* list, const uint32_t* first, const char* x, int64_t batch_bytes,           \
           int64_t head_bytes, int64_t row_bytes, char* table, int64_t heads, int64_t hashes,      \
           int64_t h0, int64_t step, int64_t n, int64_t span)

constexpr int STAGES = 3;  // chunks in shared memory: one in use, the others on their way
constexpr int CHUNK = 32, COLUMNS = 64, SLOT = CHUNK * COLUMNS * 2;

// 16-bit rows on tensor cores: a warp takes up to 16 neighbouring buckets, 64 columns, and the rows of
// all these buckets 32 at a time, as they follow each other in the list. With A_bk = [row k is in bucket
// b], the product A x adds each row to its bucket, whatever the sizes.
BUCKET_SUM(bucket_sum_16, 16) {
  constexpr int BLOCKS = (D + COLUMNS - 1) / COLUMNS;
  const uint32_t spans = (BUCKETS + (uint32_t)span - 1) / (uint32_t)span;
  constexpr Type T = X == BF16 ? BF16 : F16;
  constexpr uint32_t ONE = T == BF16 ? 0x3f80 : 0x3c00;
  __shared__ __align__(128) char memory[STAGES][SLOT];
  __shared__ __align__(16) uint32_t tokens[STAGES][CHUNK];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  const int column = blockIdx.x % BLOCKS * COLUMNS;
  const int base = blockIdx.x / BLOCKS % spans * (int)span, count = min((int)span, BUCKETS - base);
  const uint32_t bhs = blockIdx.x / BLOCKS / spans, bh = bhs / (uint32_t)step;
  const int64_t hash = bh * hashes + h0 + bhs % (uint32_t)step;
  list += hash * n;
  first += hash * (BUCKETS + 1) + base;
  x += bh / (uint32_t)heads * batch_bytes + bh % (uint32_t)heads * head_bytes + column * 2;
  uint32_t low[2], size[2];  // of buckets g and g + 8
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int b = g + 8 * i;
    low[i] = b < count ? first[b] : 0;
    size[i] = b < count ? first[b + 1] - low[i] : 0;
  }
  const uint32_t end = first[count];
  uint32_t at = first[0], ahead = at;
  const uint32_t shared = (uint32_t)__cvta_generic_to_shared(memory);
  const uint32_t notes = (uint32_t)__cvta_generic_to_shared(tokens);
  uint32_t token = ahead + lane < end ? __ldcs(list + ahead + lane) : 0;
  auto fetch = [&](int stage) {  // the rows whose numbers are in `token`, and the numbers after
    if (ahead < end) {
      store_word(notes + (stage * CHUNK + lane) * 4, token);
      __syncwarp();
      const int rows = end - ahead, from_row = lane / 8 * 8, piece = lane % 8;
      const bool holds = column + piece * 8 < D;
#pragma unroll
      for (int i = 0; i < 8; i += 4) {
        uint32_t id[4];
        load_words(notes + (stage * CHUNK + from_row + i) * 4, id);
#pragma unroll
        for (int u = 0; u < 4; u++) {
          const int row = from_row + i + u;
          const char* from = x + (uint64_t)id[u] * (uint32_t)row_bytes + piece * 16;
          copy16(shared + stage * SLOT + place<8>(row, piece), holds ? from : x,
                 holds && row < rows ? 16 : 0);
        }
      }
      ahead += CHUNK;
      token = ahead + lane < end ? __ldcs(list + ahead + lane) : 0;
    }
    commit_copies();
  };
  for (int i = 0; i < STAGES - 1; i++) fetch(i);
  float sum[8][4] = {};
  int stage = 0;
  for (; at < end; at += CHUNK) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();
    fetch(stage == 0 ? STAGES - 1 : stage - 1);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint32_t k = at + 16 * half + 2 * t - low[i];
        a[i] = (k < size[i] ? ONE : 0) | (k + 1 < size[i] ? ONE << 16 : 0);
        a[i + 2] = (k + 8 < size[i] ? ONE : 0) | (k + 9 < size[i] ? ONE << 16 : 0);
      }
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32_t b[4];
        load_matrix<true>(shared + stage * SLOT + place<8>(16 * half + lane % 16, j + lane / 16), b);
        multiply<T>(sum[j], a, b[0], b[1]);
        multiply<T>(sum[j + 1], a, b[2], b[3]);
      }
    }
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  // Lane (g, t) has columns 2 t and 2 t + 1 of every 8; through shared memory, a lane gets 8 in a row.
  wait_for_copies<0>();
  __syncwarp();
  float(*rows)[COLUMNS] = (float(*)[COLUMNS])memory;
#pragma unroll
  for (int j = 0; j < 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++)
      *(float2*)&rows[g + 8 * i][8 * j + 2 * t] = make_float2(sum[j][2 * i], sum[j][2 * i + 1]);
  __syncwarp();
  table += ((int64_t)bhs * BUCKETS + base) * (D * Bytes<TABLE>::each);
#pragma unroll
  for (int i = lane; i < 16 * 8; i += 32) {
    const int b = i / 8, piece = i % 8;
    float value[8];
#pragma unroll
    for (int c = 0; c < 8; c++) value[c] = rows[b][piece * 8 + c];
    if (b < count && column + piece * 8 < D)
      store8<TABLE>(table + (int64_t)b * (D * Bytes<TABLE>::each), column / 8 + piece, value);
  }
}

// Add rows begin, begin + step, … < end of the list to `sum`, eight loads in flight.
__device__ void add_rows(const INDEX* list, uint32_t begin, uint32_t end, uint32_t step,
                         const char* x, uint32_t row_bytes, int lane, float (&sum)[8]) {
  for (uint32_t i = begin; i < end; i += 8 * step) {
    Row8<X> row[8];
#pragma unroll
    for (int u = 0; u < 8; u++) {
      if (i + u * step < end) row[u].load(x + (uint64_t)list[i + u * step] * row_bytes, lane);
      else row[u].clear();
    }
#pragma unroll
    for (int u = 0; u < 8; u++) row[u].add_to(sum);
  }
}

// 32-bit rows: one warp a bucket, its groups of lanes taking turns.
BUCKET_SUM(bucket_sum_32, 1) {
  const int64_t at = blockIdx.x, bhs = at / BUCKETS;
  const uint32_t bh = (uint32_t)bhs / (uint32_t)step;
  const int64_t hash = bh * hashes + h0 + (uint32_t)bhs % (uint32_t)step;
  const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
  const bool holds = FULL || lane * 8 < D;
  list += hash * n;
  first += hash * (BUCKETS + 1) + at % BUCKETS;
  x += bh / (uint32_t)heads * batch_bytes + bh % (uint32_t)heads * head_bytes;
  float sum[8] = {};
  if (holds) add_rows(list, first[0] + group, first[1], 32 / GROUP, x, row_bytes, lane, sum);
#pragma unroll
  for (int i = 0; i < 8; i++)
    for (int o = GROUP; o < 32; o *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
  if (holds && group == 0) store8<TABLE>(table + at * (D * Bytes<TABLE>::each), lane, sum);
}

// Add the rows of a query's buckets in hashes 0 to 7, or fewer, from this lane's channels of the first row
// on; WORDS: codes lie on whole words.
template <bool ALL, bool WORDS>
__device__ inline void add_buckets(const Code* codes, int count, const char* rows, float (&sum)[8]) {
  constexpr uint32_t TABLE_ROW = D * Bytes<TABLE>::each;
  constexpr int EACH = sizeof(Code);
  uint32_t bucket[8];
  if constexpr (WORDS) {
    uint32_t word[2 * EACH];
    if constexpr (EACH == 1) *(uint2*)word = __ldg((const uint2*)codes);
    else *(uint4*)word = __ldg((const uint4*)codes);
#pragma unroll
    for (int u = 0; u < 8; u++)
      bucket[u] = word[u * EACH / 4] >> u * EACH % 4 * 8 & (EACH == 1 ? 0xff : 0xffff);
  } else {
#pragma unroll
    for (int u = 0; u < 8; u++) bucket[u] = ALL || u < count ? codes[u] : 0;
  }
  Row8<TABLE> row[8];
#pragma unroll
  for (int u = 0; u < 8; u++) {
    if (ALL || u < count)
      row[u].load(rows + bucket[u] * TABLE_ROW + u * (uint64_t)(BUCKETS * TABLE_ROW), 0);
    else row[u].clear();
  }
#pragma unroll
  for (int u = 0; u < 8; u++) row[u].add_to(sum);
}

// One group of lanes a query: read its bucket in every hash, add up, scale, normalise if asked.
// codes (BH, n, stride) from hash h0 on; table (BH, m, C, D); y (BH, n, D); total (BH, n, D) float32
// carries the sum between calls over parts of the hashes; inverse (BH, n): 1/norm of the row.
extern "C" __global__ void __launch_bounds__(256, 6) bucket_gather(
    const Code* codes, const bool* mask, const char* table, char* y, float* total, float* inverse,
    int64_t heads, int64_t hashes, int64_t stride, int64_t h0, int64_t n, int64_t queries,
    int64_t begin, int64_t finish, float scale) {
  const uint32_t query = blockIdx.x * (256 / GROUP) + threadIdx.x / GROUP;
  const int lane = threadIdx.x % GROUP;
  const bool there = query < (uint32_t)queries, holds = FULL || lane * 8 < D;
  const uint32_t bh = query / (uint32_t)n;
  constexpr int64_t TABLE_ROW = D * Bytes<TABLE>::each;
  float sum[8] = {};
  if (there && holds && (!mask || mask[bh / (uint32_t)heads * n + (query - bh * (uint32_t)n)])) {
    const Code* code = codes + query * stride + h0;
    const char* rows = table + bh * (hashes * BUCKETS * TABLE_ROW) + lane * 8 * Bytes<TABLE>::each;
    const int eights = (int)hashes / 8 * 8;
    if ((stride | h0) % 8 == 0) {
      for (int h = 0; h < eights; h += 8, rows += 8 * BUCKETS * TABLE_ROW)
        add_buckets<true, true>(code + h, 8, rows, sum);
    } else {
      for (int h = 0; h < eights; h += 8, rows += 8 * BUCKETS * TABLE_ROW)
        add_buckets<true, false>(code + h, 8, rows, sum);
    }
    const int left = (int)hashes - eights;
    if (left) add_buckets<false, false>(code + eights, left, rows, sum);
  }
  if (!begin && there && holds) {
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += total[(int64_t)query * D + lane * 8 + i];
  }
  if (!finish) {
    if (there && holds)
#pragma unroll
      for (int i = 0; i < 8; i++) total[(int64_t)query * D + lane * 8 + i] = sum[i];
    return;
  }
  if (inverse) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) square += sum[i] * sum[i];
    for (int o = 1; o < GROUP; o *= 2) square += __shfl_xor_sync(~0u, square, o);
    const float inverse_norm = square > 0 ? rsqrtf(square) : 0;
    if (there && lane == 0) inverse[query] = __fdividef(inverse_norm, scale);  // of the scaled row
    scale = inverse_norm;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] *= scale;
  if (there && holds) store8<X>(y + (int64_t)query * D * Bytes<X>::each, lane, sum);
}
