// A block sorts a run of tokens by code, in shared memory: included by codes.cu, which defines BITS.
//
// Above 12 bits a run might have more buckets than tokens: it is sorted without the low bits.

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

// The bits to sort by of N neighbouring tokens from i on, a multiple of N, of n in all: NONE for what is
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
