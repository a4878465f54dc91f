// Codes and what follows from them alone: compiled by NVRTC for
//
//   BITS   bits of a code, 1 to 16; codes are uint8 up to 8 bits, uint16 above
//
// A block sorts a run of tokens, and runs are merged. Above 12 bits a run might have more buckets than
// tokens: there runs are sorted without the low bits of codes, which `bucket_refine` looks at.

#include "buckets.cuh"
#include "common.cuh"

#if BITS > 12
#define SHIFT 8  // the low bits
#else
#define SHIFT 0
#endif

constexpr int BINS = BUCKETS >> SHIFT;  // what a run is sorted by
constexpr int DIGIT = 256, PASSES = BINS > DIGIT ? 2 : 1;  // radix sort of codes by bytes

// What is sorted: numbers of tokens, and above them the low bits of their codes if they are left out.
template <bool LOW> struct EntryType { using type = uint16_t; };
template <> struct EntryType<true> { using type = uint32_t; };
using Entry = EntryType<(SHIFT > 0)>::type;

__device__ inline Entry entry(const Code* codes, int token) {
  return SHIFT ? token | codes[token] % DIGIT << 16 : token;
}

// What counts of N codes of neighbouring tokens from i on, a multiple of N, of n in all: NONE for what is
// beyond, or hidden by a mask. Those that lie on words are read at once.
template <int N, uint32_t NONE>
__device__ inline void load_codes(const Code* codes, const bool* mask, int i, int n,
                                  uint32_t* code) {
  constexpr int EACH = 4 / sizeof(Code), BYTES = N * sizeof(Code);
  if ((uint64_t)codes % BYTES == 0 && i + N <= n) {
    uint32_t word[N / EACH];
    if constexpr (BYTES == 4) word[0] = *(const uint32_t*)(codes + i);
    else if constexpr (BYTES == 8) *(uint2*)word = *(const uint2*)(codes + i);
    else *(uint4*)word = *(const uint4*)(codes + i);
#pragma unroll
    for (int u = 0; u < N; u++)
      code[u] = (word[u / EACH] >> u % EACH * (32 / EACH) & (EACH == 4 ? 0xff : 0xffff)) >> SHIFT;
  } else {
#pragma unroll
    for (int u = 0; u < N; u++) code[u] = i + u < n ? codes[i + u] >> SHIFT : NONE;
  }
  if (mask) {
#pragma unroll
    for (int u = 0; u < N; u++)
      if (i + u < n && !mask[i + u]) code[u] = NONE;
  }
}

// How many tokens of this warp had the digit before this lane's. One step for all lanes: with PASSES
// of two the order of equal digits must be that of the lanes; else any order that is always the same
// will do, and the hardware's order of additions to one warp's own counters is.
__device__ inline uint32_t take_rank(uint16_t* count, uint32_t digit) {
  if constexpr (PASSES == 1) {
    if (digit >= DIGIT) return 0;
    const uint32_t shift = digit % 2 * 16;  // half a word, which never overflows
    return atomicAdd((uint32_t*)count + digit / 2, 1u << shift) >> shift & 0xffff;
  } else {
    const uint32_t same = __match_any_sync(~0u, digit);
    const uint32_t before = __popc(same & ((1u << threadIdx.x % 32) - 1));
    const uint32_t base = digit < DIGIT ? (uint32_t)count[digit] : 0;
    __syncwarp();
    if (digit < DIGIT && before == 0) count[digit] = base + __popc(same);
    __syncwarp();
    return base + before;
  }
}

// Tokens of one (head, hash) in the order of their codes, how many there are; the first of every bucket
// in `first`, and the tokens of the fullest, if that is more. Order within a bucket depends on nothing
// but the codes: every run adds in the same order.
template <int WARPS, int PER>
__device__ int sort(const Code* codes, const bool* mask, int n, Entry* to, Entry* between,
                    uint32_t* first, uint32_t* fullest, uint16_t (*count)[DIGIT]) {
  constexpr int THREADS = 32 * WARPS;
  __shared__ uint32_t start[DIGIT];
  __shared__ uint32_t warp_total[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int tokens = n;
  for (int pass = 0; pass < PASSES; pass++) {
    Entry* out = pass == PASSES - 1 ? to : between;
    // A warp takes neighbouring tokens, `rounds` of a lane: their digits and ranks stay here. Where the
    // order of equal digits does not matter, a lane takes four neighbours at a time.
    constexpr int FOUR = PASSES == 1 ? 4 : 1;
    const int rounds = (tokens + FOUR * THREADS - 1) / (FOUR * THREADS) * FOUR;
    auto token_of = [&](int u) {
      return warp * 32 * rounds + u / FOUR * (32 * FOUR) + lane * FOUR + u % FOUR;
    };
    uint32_t held[PER];
#pragma unroll
    for (int u = 0; u < PER; u += FOUR) {
      if (u >= rounds) break;
      const int i = token_of(u);
      if constexpr (PASSES == 1) {
        load_codes<4, DIGIT>(codes, mask, i, tokens, held + u);
      } else {
        const bool there = i < tokens && !(pass == 0 && mask && !mask[i]);
        const int token = there && pass > 0 ? between[i] : i;
        held[u] = there ? (uint32_t)codes[token] >> 8 * pass & (DIGIT - 1) : DIGIT;
      }
    }
    for (int i = threadIdx.x; i < WARPS * DIGIT / 2; i += THREADS) ((uint32_t*)count)[i] = 0;
    __syncthreads();
#pragma unroll
    for (int u = 0; u < PER; u++) {
      if (u >= rounds) break;
      held[u] |= take_rank(count[warp], held[u]) << 16;
    }
    __syncthreads();
    // Where each warp's tokens of each digit begin: scan over digits, then over warps.
    uint32_t total = 0;
    if (threadIdx.x < DIGIT) {
#pragma unroll
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
#pragma unroll
    for (int u = 0; u < PER; u++) {
      if (u >= rounds) break;
      const uint32_t digit = held[u] & 0xffff;
      const int i = token_of(u);
      if (digit < DIGIT)
        out[start[digit] + count[warp][digit] + (held[u] >> 16)] = pass ? between[i] : entry(codes, i);
    }
    tokens = 0;
    for (int w = 0; w < DIGIT / 32; w++) tokens += warp_total[w];
    __syncthreads();
  }
  uint32_t most = 0;
  if constexpr (PASSES == 1) {
    for (int c = threadIdx.x; c <= BINS; c += THREADS) {
      first[c] = c < BINS ? start[c] : tokens;
      if (c < BINS) most = max(most, (c + 1 < BINS ? start[c + 1] : tokens) - start[c]);
    }
  } else {
    for (int i = threadIdx.x; i <= tokens; i += THREADS) {
      const int here = i < tokens ? codes[to[i]] : BINS;
      for (int c = i ? codes[to[i - 1]] + 1 : 0; c <= here; c++) first[c] = i;
    }
    __syncthreads();
    for (int c = threadIdx.x; c < BINS; c += THREADS) most = max(most, first[c + 1] - first[c]);
  }
  atomicMax(fullest, __reduce_max_sync(~0u, most));
  __syncthreads();
  return tokens;
}

// The same where all buckets are small: a count a bucket, places in them by additions in any order, and
// then each token to its rank among those of its bucket. Less than none where a bucket is not small:
// nothing is done then.
template <int WARPS, int PER>
__device__ int sort_small(const Code* codes, const bool* mask, int n, uint16_t* to,
                          uint16_t* between, uint32_t* first, uint32_t* fullest, uint16_t* count) {
  constexpr int THREADS = 32 * WARPS, EACH = (BUCKETS + THREADS - 1) / THREADS, SMALL = 32;
  __shared__ uint32_t warp_total[WARPS];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, mine = threadIdx.x * EACH;
  for (int i = threadIdx.x; i < BUCKETS / 2; i += THREADS) ((uint32_t*)count)[i] = 0;
  __syncthreads();
  const int begin = threadIdx.x * PER;  // a thread takes neighbouring tokens
  uint32_t held[PER];
#pragma unroll
  for (int u = 0; u < PER; u += 8)
    load_codes<8, 0xffff>(codes, mask, begin + u, n, held + u);
#pragma unroll
  for (int u = 0; u < PER; u++) {
    if (held[u] == 0xffff) continue;
    const uint32_t shift = held[u] % 2 * 16;
    held[u] |= (atomicAdd((uint32_t*)count + held[u] / 2, 1u << shift) >> shift & 0xffff) << 16;
  }
  __syncthreads();
  uint32_t own[EACH], total = 0, most = 0;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    own[i] = mine + i < BUCKETS ? count[mine + i] : 0;
    total += own[i];
    most = max(most, own[i]);
  }
  uint32_t at = total;
  for (int o = 1; o < 32; o *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, at, o);
    if (lane >= o) at += other;
  }
  if (lane == 31) warp_total[warp] = at;
  if (__syncthreads_or(most > SMALL)) return -1;
  atomicMax(fullest, __reduce_max_sync(~0u, most));
  at -= total;
  uint32_t all = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    if (w < warp) at += warp_total[w];
    all += warp_total[w];
  }
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    if (mine + i < BUCKETS) count[mine + i] = at;
    at += own[i];
  }
  __syncthreads();
  for (int c = threadIdx.x; c <= BUCKETS; c += THREADS) first[c] = c < BUCKETS ? count[c] : all;
#pragma unroll
  for (int u = 0; u < PER; u++)
    if (held[u] != 0xffff)
      between[count[held[u] & 0xffff] + (held[u] >> 16)] = begin + u;
  __syncthreads();
#pragma unroll
  for (int u = 0; u < PER; u++) {
    if (held[u] == 0xffff) continue;
    const uint32_t c = held[u] & 0xffff, token = begin + u;
    const uint32_t low = count[c], high = c + 1 < BUCKETS ? (uint32_t)count[c + 1] : all;
    uint32_t rank = low;
    for (uint32_t i = low; i < high; i++) rank += between[i] < token;
    to[rank] = token;
  }
  __syncthreads();
  return all;
}

// One block a (head, hash) and run of `tile` tokens, PER of a thread at most; near: as many numbers a pass.
// codes (BH, m, n); mask (B, n) or null; list (BH, m, n), numbers within the run; first (BH, m, tiles,
// BINS + 1); most (BH, m): the tokens of the fullest bucket, where there is one run. If SHIFT, low
// (BH, m, n) of the tokens of the list, and most is zero.
template <int WARPS, int PER>
__device__ void run_bucket_lists(Entry* near, const Code* codes, const bool* mask, uint16_t* list,
                                 uint8_t* low, uint32_t* first, uint32_t* most, int64_t heads,
                                 int64_t hashes, int64_t n, int64_t tile) {
  __shared__ __align__(16) uint16_t count[WARPS][DIGIT];
  __shared__ uint32_t fullest;
  const int64_t at = blockIdx.x, tiles = (n + tile - 1) / tile;
  const int64_t bhm = at / tiles, from = at % tiles * tile, start = bhm * n + from;
  const int tokens = (int)min(tile, n - from);
  Entry* between = near + (PASSES - 1) * PER * 32 * WARPS;
  first += at * (BINS + 1);
  codes += start;
  if (mask) mask += bhm / hashes / heads * n + from;
  if (threadIdx.x == 0) fullest = 0;
  int kept = -1;
  if constexpr (PASSES == 2)
    kept = sort_small<WARPS, PER>(codes, mask, tokens, near, between, first, &fullest, count[0]);
  if (kept < 0)
    kept = sort<WARPS, PER>(codes, mask, tokens, near, between, first, &fullest, count);
  for (int i = threadIdx.x; i < kept; i += 32 * WARPS) {
    list[start + i] = (uint16_t)near[i];
    if (SHIFT) low[start + i] = near[i] >> 16;
  }
  if (threadIdx.x == 0 && (SHIFT || tiles == 1)) most[bhm] = SHIFT ? 0 : fullest;
}

#define BUCKET_LISTS(NAME, WARPS, PER, PER_SM, NEAR)                                              \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, PER_SM)                                \
      NAME(const Code* codes, const bool* mask, uint16_t* list, uint8_t* low, uint32_t* first,    \
           uint32_t* most, int64_t heads, int64_t hashes, int64_t n, int64_t tile) {              \
    NEAR;                                                                                         \
    run_bucket_lists<WARPS, PER>(near, codes, mask, list, low, first, most, heads, hashes, n, tile); \
  }
#define NEAR(TOKENS) __shared__ __align__(16) Entry near[PASSES * TOKENS]
#define LARGE_NEAR extern __shared__ __align__(16) Entry near[]
BUCKET_LISTS(bucket_lists_4k, 16, 8, PASSES == 1 ? 4 : 3, NEAR(4096))
#if SHIFT
BUCKET_LISTS(bucket_lists_16k, 16, 32, 2, LARGE_NEAR)
#else
BUCKET_LISTS(bucket_lists_16k, 16, 32 / PASSES, 2, NEAR(16384 / PASSES))
BUCKET_LISTS(bucket_lists_32k, 32, 32 / PASSES, 1, LARGE_NEAR)
#endif

#if SHIFT
constexpr int REFINERS = 4;  // warps of a block

// Lists of runs of `tile` tokens by the high bits of codes, as one list by all of them. One warp a
// (head, hash) and high bits, `bins` in all. from, low, to (BH, m, n); first (BH, m, tiles, BINS + 1)
// within the run; whole (BH, m, C + 1); most (BH, m), zero before.
template <class Index>
__device__ void run_bucket_refine(const uint16_t* from, const uint8_t* low, const uint32_t* first,
                                  Index* to, uint32_t* whole, uint32_t* most, int64_t bins,
                                  int64_t n, int64_t tile) {
  __shared__ __align__(16) uint32_t counts[REFINERS][DIGIT];
  const int lane = threadIdx.x % 32, tiles = (int)((n + tile - 1) / tile);
  const int64_t at = (int64_t)blockIdx.x * REFINERS + threadIdx.x / 32;
  if (at >= bins) return;
  const int64_t bhm = at / BINS, bin = at % BINS;
  first += bhm * tiles * (BINS + 1) + bin;
  from += bhm * n;
  low += bhm * n;
  to += bhm * n;
  uint32_t* count = counts[threadIdx.x / 32];
  // Twice over all runs: to count the digits, and to put each token in its place, in an order of equal
  // digits that is always the same (as in take_rank).
  constexpr int LOADS = 4;  // in flight
  auto sweep = [&](bool put) {
    uint32_t before = 0;  // of this lane's runs
    for (int t0 = 0; t0 < tiles; t0 += 32) {
      const bool mine = t0 + lane < tiles;
      const uint32_t begins = mine ? first[(int64_t)(t0 + lane) * (BINS + 1)] : 0;
      const uint32_t ends = mine ? first[(int64_t)(t0 + lane) * (BINS + 1) + 1] : 0;
      before += begins;
      for (int t = t0; t < min(t0 + 32, tiles); t++) {
        const uint32_t end = __shfl_sync(~0u, ends, t - t0);
        const int64_t offset = t * tile;
        for (uint32_t i = __shfl_sync(~0u, begins, t - t0) + lane; i < end; i += LOADS * 32) {
          uint32_t digit[LOADS], token[LOADS];
#pragma unroll
          for (int u = 0; u < LOADS; u++) {
            const bool there = i + u * 32 < end;
            digit[u] = there ? low[offset + i + u * 32] : DIGIT;
            token[u] = put && there ? from[offset + i + u * 32] : 0;
          }
#pragma unroll
          for (int u = 0; u < LOADS; u++) {
            if (digit[u] == DIGIT) continue;
            const uint32_t place = atomicAdd(count + digit[u], 1u);
            if (put) to[place] = (Index)(offset + token[u]);
          }
        }
        __syncwarp();
      }
    }
    return before;
  };
  constexpr int EACH = DIGIT / 32;  // neighbouring digits of a lane
  __align__(16) uint32_t own[EACH] = {};
  uint32_t sum = 0, fullest = 0;
#pragma unroll
  for (int i = 0; i < EACH; i += 4) *(uint4*)(count + lane * EACH + i) = *(const uint4*)(own + i);
  __syncwarp();
  uint32_t place = __reduce_add_sync(~0u, sweep(false));
#pragma unroll
  for (int i = 0; i < EACH; i += 4) *(uint4*)(own + i) = *(const uint4*)(count + lane * EACH + i);
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    sum += own[i];
    fullest = max(fullest, own[i]);
  }
  place -= sum;
  for (int o = 1; o < 32; o *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, o);
    if (lane >= o) sum += other;
  }
  place += sum;
  whole += bhm * (BUCKETS + 1) + bin * DIGIT + lane * EACH;
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    whole[i] = place;
    const uint32_t next = place + own[i];
    own[i] = place;
    place = next;
  }
  if (bin == BINS - 1 && lane == 31) whole[EACH] = place;
#pragma unroll
  for (int i = 0; i < EACH; i += 4) *(uint4*)(count + lane * EACH + i) = *(const uint4*)(own + i);
  fullest = __reduce_max_sync(~0u, fullest);
  if (lane == 0) atomicMax(most + bhm, fullest);
  __syncwarp();
  sweep(true);
}

#define BUCKET_REFINE(NAME, INDEX)                                                               \
  extern "C" __global__ void __launch_bounds__(32 * REFINERS, 2048 / (32 * REFINERS))            \
      NAME(const uint16_t* from, const uint8_t* low, const uint32_t* first, INDEX* to,           \
           uint32_t* whole, uint32_t* most, int64_t bins, int64_t n, int64_t tile) {             \
    run_bucket_refine(from, low, first, to, whole, most, bins, n, tile);                         \
  }
BUCKET_REFINE(bucket_refine_16, uint16_t)
BUCKET_REFINE(bucket_refine_32, uint32_t)
#else
constexpr int THREADS = 512, WARPS = THREADS / 32;  // of those that merge

// Places in the whole sequence, from those within its runs, for one (head, hash): of each bucket of
// each run in `place` (BH, m, tiles, C), of each bucket in `whole` (BH, m, C + 1); first (BH, m, tiles,
// C + 1) and most (BH, m) as above.
extern "C" __global__ void __launch_bounds__(THREADS) bucket_places(
    const uint32_t* first, uint32_t* place, uint32_t* whole, uint32_t* most, int64_t tiles) {
  __shared__ uint32_t warp_total[WARPS], fullest;
  if (threadIdx.x == 0) fullest = 0;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  first += blockIdx.x * tiles * (BUCKETS + 1);
  place += blockIdx.x * tiles * BUCKETS;
  whole += (int64_t)blockIdx.x * (BUCKETS + 1);
  uint32_t begin = 0;
  for (int from = 0; from < BUCKETS; from += THREADS) {
    const int c = from + threadIdx.x;
    uint32_t total = 0;
    if (c < BUCKETS)
      for (int i = 0; i < tiles; i++)
        total += first[(int64_t)i * (BUCKETS + 1) + c + 1] - first[(int64_t)i * (BUCKETS + 1) + c];
    uint32_t at = total;
    for (int o = 1; o < 32; o *= 2) {
      const uint32_t other = __shfl_up_sync(~0u, at, o);
      if (lane >= o) at += other;
    }
    if (lane == 31) warp_total[warp] = at;
    __syncthreads();
    atomicMax(&fullest, __reduce_max_sync(~0u, total));
    at += begin - total;
    for (int w = 0; w < WARPS; w++) {
      if (w < warp) at += warp_total[w];
      begin += warp_total[w];
    }
    if (c < BUCKETS) {
      whole[c] = at;
      for (int i = 0; i < tiles; i++) {
        place[(int64_t)i * BUCKETS + c] = at;
        at += first[(int64_t)i * (BUCKETS + 1) + c + 1] - first[(int64_t)i * (BUCKETS + 1) + c];
      }
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) whole[BUCKETS] = begin, most[blockIdx.x] = fullest;
}

// Lists of runs of `tile` tokens as one list of the whole sequence: entry by entry to its place.
// from, to (BH, m, n); first (BH, m, tiles, C + 1) within the tile; place (BH, m, tiles, C) of each
// bucket of each tile in the whole.
template <class Index>
__device__ void run_bucket_merge(const Code* codes, const uint16_t* from, const uint32_t* first,
                                 const uint32_t* place, Index* to, int64_t n, int64_t tile) {
  const int64_t at = blockIdx.x, tiles = (n + tile - 1) / tile;
  const int64_t bhm = at / tiles, start = bhm * n + at % tiles * tile;
  first += at * (BUCKETS + 1);
  place += at * BUCKETS;
  from += start;
  codes += start;
  to += bhm * n;
  const Index offset = (Index)(at % tiles * tile);
  const uint32_t count = first[BUCKETS];
  constexpr int LOADS = 4;  // in flight
  for (uint32_t i = threadIdx.x; i < count; i += LOADS * THREADS) {
    uint32_t token[LOADS], bucket[LOADS], ahead[LOADS];
#pragma unroll
    for (int u = 0; u < LOADS; u++) token[u] = i + u * THREADS < count ? from[i + u * THREADS] : 0;
#pragma unroll
    for (int u = 0; u < LOADS; u++) bucket[u] = codes[token[u]];
#pragma unroll
    for (int u = 0; u < LOADS; u++) ahead[u] = place[bucket[u]] - first[bucket[u]];
#pragma unroll
    for (int u = 0; u < LOADS; u++)
      if (i + u * THREADS < count) to[ahead[u] + i + u * THREADS] = offset + (Index)token[u];
  }
}

#define BUCKET_MERGE(NAME, INDEX)                                                                 \
  extern "C" __global__ void __launch_bounds__(THREADS)                                           \
      NAME(const Code* codes, const uint16_t* from, const uint32_t* first, const uint32_t* place, \
           INDEX* to, int64_t n, int64_t tile) {                                                  \
    run_bucket_merge(codes, from, first, place, to, n, tile);                                     \
  }
BUCKET_MERGE(bucket_merge_16, uint16_t)
BUCKET_MERGE(bucket_merge_32, uint32_t)
#endif

// Gaussian projections (H, m, BITS, channels padded) in bfloat16: the numbers of random.py, zero where padded.
// One thread a pair of Box–Muller; `count` numbers in all, laid out (H, m, BITS, channels) there.
// The seed is read at `seed_at` where that is given.
extern "C" __global__ void gaussian_planes(const int64_t* seed_at, int64_t seed, uint16_t* planes,
                                           int64_t count, int64_t channels, int64_t padded) {
  const int64_t half = (count + 1) / 2;
  const int64_t at = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (at >= half) return;
  if (seed_at) seed = *seed_at;
  const uint32_t low = (uint32_t)seed, high = (uint32_t)(seed >> 32);
  auto uniform = [&](int64_t i) {
    return ((double)mix(mix(mix((uint32_t)i) ^ low) ^ high) + 1) * 0x1p-32;
  };
  double sine, cosine;
  sincos(6.283185307179586 * uniform(half + at), &sine, &cosine);
  const double radius = sqrt(-2 * log(uniform(at)));
  auto put = [&](int64_t i, double value) {
    if (i >= count) return;
    planes[i / channels * padded + i % channels] = (uint16_t)pack((float)value, 0, BF16);
  };
  put(at, radius * cosine);
  put(half + at, radius * sine);
}
