// Codes and what follows from them alone: compiled by NVRTC for
//
//   BITS   bits of a code, 1 to 16; codes are uint8 up to 8 bits, uint16 above
//
// A block sorts a run of tokens, and runs are merged; above 12 bits they are sorted without the low bits,
// which `bucket_refine` looks at.

#include "sort.cuh"

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
