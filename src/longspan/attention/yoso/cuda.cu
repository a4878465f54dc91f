// The verbs of YOSO that scatter and gather rows: compiled by NVRTC for one set of
//
//   D      channels of a row, a multiple of 8 up to 256
//   BITS   bits of a code, 1 to 16; codes are uint8 up to 8 bits, uint16 above
//   X      number type of rows in and out: BF16, F16 or F32
//   TABLE  number type of table rows
//
// A lane holds 8 neighbouring channels; a group of GROUP lanes holds a row.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

enum Type { BF16, F16, F32 };
constexpr int BUCKETS = 1 << BITS;
constexpr int DIGIT = 256, PASSES = BITS > 8 ? 2 : 1;  // radix sort of codes by bytes
constexpr int GROUP = D <= 8 ? 1 : D <= 16 ? 2 : D <= 32 ? 4 : D <= 64 ? 8 : D <= 128 ? 16 : 32;
constexpr bool FULL = D == GROUP * 8;  // no lane of a group is idle
constexpr int THREADS = 512, WARPS = THREADS / 32, GROUPS = THREADS / GROUP;
constexpr int HEAVY = 1024;  // rows of a bucket that a whole block adds up together

template <bool WIDE> struct CodeType { using type = uint8_t; };
template <> struct CodeType<true> { using type = uint16_t; };
using Code = CodeType<(BITS > 8)>::type;

template <Type T> struct Bytes { static constexpr int each = T == F32 ? 4 : 2; };

__device__ inline uint32_t pack(float low, float high, Type type) {
  uint32_t r;
  if (type == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ inline void unpack(uint32_t word, float& low, float& high, Type type) {
  if (type == BF16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  } else {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high) : "r"(word));
  }
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
  __device__ void add_to(float (&sum)[8]) const {
    const uint32_t* w = (const uint32_t*)word;
    if constexpr (T == F32) {
#pragma unroll
      for (int i = 0; i < 8; i++) sum[i] += __uint_as_float(w[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float low, high;
        unpack(w[i], low, high, T);
        sum[2 * i] += low;
        sum[2 * i + 1] += high;
      }
    }
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

// Places for tokens in shared memory, in two buffers where codes take two passes.
constexpr int NEAR = D > 128 ? 8192 : 16384;

// Bytes for counts while sorting, for partial sums after.
template <class Index> constexpr int WORK =
    WARPS * (DIGIT * sizeof(Index) > GROUP * 32 ? DIGIT * sizeof(Index) : GROUP * 32);

// Add one to a number in shared memory; 16-bit ones in their half of a word, which never overflows.
template <class Index> __device__ inline void increase(Index* numbers, uint32_t at) {
  constexpr int EACH = 4 / sizeof(Index);
  atomicAdd((uint32_t*)numbers + at / EACH, 1u << at % EACH * 16);
}

// Tokens of one (head, hash) in the order of their codes, and the first of every bucket.
// Order within a bucket depends on nothing but the codes: every run adds in the same order.
template <class Index>
__device__ void sort(const Code* codes, const bool* mask, int n, Index* to, Index* between,
                     uint32_t* first, char* work) {
  Index(*count)[DIGIT] = (Index(*)[DIGIT])work;
  __shared__ uint32_t start[DIGIT];
  __shared__ uint32_t warp_total[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t tokens = n;
  for (int pass = 0; pass < PASSES; pass++) {
    Index* out = pass == PASSES - 1 ? to : between;
    const int shift = 8 * pass;
    // A warp takes neighbouring tokens in order, BATCH loads of a lane at a time.
    constexpr uint32_t BATCH = 8, STEP = 32 * BATCH;
    const uint32_t share = (tokens + WARPS * STEP - 1) / (WARPS * STEP) * STEP;
    const uint32_t begin = warp * share, end = min(begin + share, tokens);
    auto load = [&](uint32_t from, uint32_t (&token)[BATCH], uint32_t (&digit)[BATCH]) {
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const uint32_t i = from + u * 32 + lane;
        token[u] = i >= end ? ~0u : pass == 0 ? i : (uint32_t)between[i];
        if (pass == 0 && mask && i < end && !mask[i]) token[u] = ~0u;
      }
#pragma unroll
      for (int u = 0; u < BATCH; u++)  // DIGIT for a token that is not there
        digit[u] = token[u] == ~0u ? DIGIT : ((uint32_t)codes[token[u]] >> shift) & (DIGIT - 1);
    };
    uint32_t token[BATCH], digit[BATCH];
    for (int i = threadIdx.x; i < WARPS * DIGIT * sizeof(Index) / 4; i += THREADS)
      ((uint32_t*)work)[i] = 0;
    __syncthreads();
    for (uint32_t from = begin; from < end; from += STEP) {
      load(from, token, digit);
#pragma unroll
      for (int u = 0; u < BATCH; u++)
        if (digit[u] < DIGIT) increase(count[0], warp * DIGIT + digit[u]);
    }
    __syncthreads();
    // Where each warp's tokens of each digit begin: scan over digits, then over warps.
    uint32_t total = 0;
    if (threadIdx.x < DIGIT) {
      for (int w = 0; w < WARPS; w++) {
        const uint32_t c = count[w][threadIdx.x];
        count[w][threadIdx.x] = total;
        total += c;
      }
    }
    uint32_t sum = total;
    for (int o = 1; o < 32; o *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, sum, o);
      if (lane >= o) sum += other;
    }
    if (lane == 31) warp_total[warp] = sum;
    __syncthreads();
    uint32_t before = 0;
    for (int w = 0; w < warp; w++) before += warp_total[w];
    if (threadIdx.x < DIGIT) start[threadIdx.x] = before + sum - total;
    __syncthreads();
    for (uint32_t from = begin; from < end; from += STEP) {
      if (share > STEP) load(from, token, digit);  // else they are still here
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const uint32_t d = digit[u], same = __match_any_sync(~0u, d);
        const uint32_t rank = __popc(same & ((1u << lane) - 1));
        uint32_t base = 0;
        if (d < DIGIT) {
          base = count[warp][d];
          out[start[d] + base + rank] = (Index)token[u];
        }
        __syncwarp();
        if (d < DIGIT && rank == 0) count[warp][d] = base + __popc(same);
        __syncwarp();
      }
    }
    tokens = 0;
    for (int w = 0; w < DIGIT / 32; w++) tokens += warp_total[w];
    __syncthreads();
  }
  if constexpr (PASSES == 1) {
    for (int c = threadIdx.x; c <= BUCKETS; c += THREADS)
      first[c] = c < BUCKETS ? start[c] : tokens;
  } else {
    for (uint32_t i = threadIdx.x; i <= tokens; i += THREADS) {
      const int here = i < tokens ? codes[to[i]] : BUCKETS;
      for (int c = i ? codes[to[i - 1]] + 1 : 0; c <= here; c++) first[c] = i;
    }
  }
  __syncthreads();
}

// Add rows begin, begin + step, … < end of the list to `sum`, eight loads in flight.
template <class Index>
__device__ void add_rows(const Index* list, uint32_t begin, uint32_t end, uint32_t step,
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

template <class Index>
__device__ void sum_buckets(const Index* list, const uint32_t* first, const char* x,
                            int64_t row_bytes, char* table, char* work) {
  float(*part)[GROUP * 8] = (float(*)[GROUP * 8])work;
  const int lane = threadIdx.x % GROUP, group = threadIdx.x / GROUP;
  const bool holds = FULL || lane * 8 < D;
  constexpr int TABLE_ROW = D * Bytes<TABLE>::each;
  int heavy = 0;
  for (int b = group; b < BUCKETS; b += GROUPS) {
    const uint32_t begin = first[b], end = first[b + 1];
    heavy |= end - begin > HEAVY;
    if (end - begin > HEAVY || !holds) continue;
    float sum[8] = {};
    add_rows(list, begin, end, 1, x, row_bytes, lane, sum);
    store8<TABLE>(table + (int64_t)b * TABLE_ROW, lane, sum);
  }
  if (!__syncthreads_or(heavy)) return;
  // One group would walk a heavy bucket alone while the others wait: all take a share.
  for (int b = 0; b < BUCKETS; b++) {
    const uint32_t begin = first[b], end = first[b + 1];
    if (end - begin <= HEAVY) continue;
    float sum[8] = {};
    if (holds) add_rows(list, begin + group, end, GROUPS, x, row_bytes, lane, sum);
#pragma unroll
    for (int i = 0; i < 8; i++)
      for (int o = GROUP; o < 32; o *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
    __syncthreads();
    if (threadIdx.x % 32 < GROUP)
      for (int i = 0; i < 8; i++) part[threadIdx.x / 32][lane * 8 + i] = sum[i];
    __syncthreads();
    if (group == 0 && holds) {
      float all[8] = {};
      for (int w = 0; w < WARPS; w++)
        for (int i = 0; i < 8; i++) all[i] += part[w][lane * 8 + i];
      store8<TABLE>(table + (int64_t)b * TABLE_ROW, lane, all);
    }
  }
}

// One block a (head, hash) and run of `tile` tokens: sort their codes, add up the rows by bucket.
// codes (BH, m, n); mask (B, n) or null; x rows at the given byte strides; table (BH, m, tiles, C, D)
// or null; list (BH, m, n) or null where a tile fits into shared memory; first (BH, m, tiles, C + 1).
template <class Index, int SHARED>
__device__ void run_bucket_sum(const Code* codes, const bool* mask, const char* x,
                               int64_t batch_bytes, int64_t head_bytes, int64_t row_bytes,
                               char* table, Index* list, Index* spare, uint32_t* first,
                               int64_t heads, int64_t hashes, int64_t n, int64_t tile) {
  __shared__ __align__(16) char work[WORK<Index>];
  __shared__ __align__(16) Index near[SHARED ? SHARED : 1];
  const int64_t at = blockIdx.x, tiles = (n + tile - 1) / tile;
  const int64_t bhm = at / tiles, from = at % tiles * tile, bh = bhm / hashes;
  const int64_t start = bhm * n + from;
  Index* to = SHARED ? near : list + start;
  Index* between = SHARED ? near + SHARED / PASSES * (PASSES - 1) : spare + (PASSES > 1 ? start : 0);
  first += at * (BUCKETS + 1);
  sort(codes + start, mask ? mask + bh / heads * n + from : nullptr, (int)min(tile, n - from), to,
       between, first, work);
  if (SHARED && list)
    for (uint32_t i = threadIdx.x; i < first[BUCKETS]; i += THREADS) list[start + i] = near[i];
  x += bh / heads * batch_bytes + bh % heads * head_bytes + from * row_bytes;
  if (table)
    sum_buckets(to, first, x, row_bytes, table + at * BUCKETS * D * Bytes<TABLE>::each, work);
}

#define BUCKET_SUM(NAME, INDEX, SHARED)                                                            \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(                                      \
      const Code* codes, const bool* mask, const char* x, int64_t batch_bytes, int64_t head_bytes, \
      int64_t row_bytes, char* table, INDEX* list, INDEX* spare, uint32_t* first, int64_t heads,   \
      int64_t hashes, int64_t n, int64_t tile) {                                                   \
    run_bucket_sum<INDEX, SHARED>(codes, mask, x, batch_bytes, head_bytes, row_bytes, table, list, \
                                  spare, first, heads, hashes, n, tile);                           \
  }
BUCKET_SUM(bucket_sum_4k, uint16_t, 4096 * PASSES)
BUCKET_SUM(bucket_sum_near, uint16_t, NEAR)
BUCKET_SUM(bucket_sum_far, uint32_t, 0)

// Add the table rows that the first `count` lanes of the warp name, eight loads in flight.
template <bool ALL>
__device__ void add_buckets(const char* rows, uint32_t bucket, int count, float (&sum)[8]) {
  constexpr int EACH = 32 / GROUP, LOADS = GROUP < 8 ? GROUP : 8;
  constexpr int64_t TABLE_ROW = D * Bytes<TABLE>::each;
  const int lane = threadIdx.x % GROUP, group = threadIdx.x % 32 / GROUP;
#pragma unroll
  for (int round = 0; round < GROUP / LOADS; round++) {
    Row8<TABLE> row[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++) {
      const int h = (round * LOADS + u) * EACH + group;
      const uint32_t b = __shfl_sync(~0u, bucket, h);
      if ((ALL || h < count) && (FULL || lane * 8 < D)) row[u].load(rows + b * TABLE_ROW, lane);
      else row[u].clear();
    }
#pragma unroll
    for (int u = 0; u < LOADS; u++) row[u].add_to(sum);
  }
}

// One warp a query: read its bucket in every hash, add up, scale, normalise if asked.
// codes (BH, n, stride) from hash h0 on; table (BH, m, C, D); y (BH, n, D); total (BH, n, D) float32
// carries the sum between calls over parts of the hashes; inverse (BH, n): 1/norm of the row.
extern "C" __global__ void __launch_bounds__(256) bucket_gather(
    const Code* codes, const bool* mask, const char* table, char* y, float* total, float* inverse,
    int64_t heads, int64_t hashes, int64_t stride, int64_t h0, int64_t n, int64_t queries,
    int64_t begin, int64_t finish, float scale) {
  const int64_t query = (int64_t)blockIdx.x * 8 + threadIdx.x / 32;
  if (query >= queries) return;
  const uint32_t bh = (uint32_t)query / (uint32_t)n;  // 64-bit division would cost more than the rest
  const int lane = threadIdx.x % GROUP, group = threadIdx.x % 32 / GROUP;
  constexpr int64_t TABLE_ROW = D * Bytes<TABLE>::each;
  const bool holds = FULL || lane * 8 < D;
  float sum[8] = {};
  if (!mask || mask[bh / (uint32_t)heads * n + query - bh * n]) {
    const Code* code = codes + query * stride + h0;
    const char* rows = table + bh * (hashes * BUCKETS * TABLE_ROW);
    for (int from = 0; from < hashes; from += 32) {
      const int mine = from + (int)threadIdx.x % 32;
      const uint32_t bucket = mine < hashes ? mine * BUCKETS + code[mine] : 0;
      if (from + 32 <= hashes) add_buckets<true>(rows, bucket, 32, sum);
      else add_buckets<false>(rows, bucket, hashes - from, sum);
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      for (int o = GROUP; o < 32; o *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
  }
  if (!begin && holds) {
#pragma unroll
    for (int i = 0; i < 8; i++) sum[i] += total[query * D + lane * 8 + i];
  }
  if (!finish) {
    if (group == 0 && holds)
#pragma unroll
      for (int i = 0; i < 8; i++) total[query * D + lane * 8 + i] = sum[i];
    return;
  }
  if (inverse) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) square += sum[i] * sum[i];
    for (int o = 1; o < GROUP; o *= 2) square += __shfl_xor_sync(~0u, square, o);
    const float inverse_norm = square > 0 ? rsqrtf(square) : 0;
    if (threadIdx.x % 32 == 0) inverse[query] = inverse_norm / scale;  // of the scaled row
    scale = inverse_norm;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] *= scale;
  if (group == 0 && holds) store8<X>(y + query * D * Bytes<X>::each, lane, sum);
}

// Gaussian projections (H, m, PLANES, DP) in bfloat16: the numbers of random.py, zero where padded.
// One thread a pair of Box–Muller; `count` numbers in all, laid out (H, m, BITS, channels) there.
__device__ inline uint32_t mix(uint32_t x) {
  x = (x ^ x >> 16) * 0x7FEB352Du;
  x = (x ^ x >> 15) * 0x846CA68Bu;
  return x ^ x >> 16;
}

extern "C" __global__ void gaussian_planes(const int64_t* seed, uint16_t* planes, int64_t count,
                                           int64_t channels, int64_t planes_padded,
                                           int64_t channels_padded) {
  const int64_t half = (count + 1) / 2;
  const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= half) return;
  const uint32_t low = (uint32_t)*seed, high = (uint32_t)(*seed >> 32);
  auto uniform = [&](int64_t i) {
    return ((double)mix(mix(mix((uint32_t)i) ^ low) ^ high) + 1) * 0x1p-32;
  };
  double sine, cosine;
  sincos(6.283185307179586 * uniform(half + at), &sine, &cosine);
  const double radius = sqrt(-2 * log(uniform(at)));
  auto put = [&](int64_t i, double value) {
    if (i >= count) return;
    const int64_t plane = i / channels, hash = plane / BITS;
    planes[(hash * planes_padded + plane % BITS) * channels_padded + i % channels] =
        (uint16_t)pack((float)value, 0, BF16);
  };
  put(at, radius * cosine);
  put(half + at, radius * sine);
}
