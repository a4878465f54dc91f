// Token by token through the lists of the other side, for buckets so small that tables do not pay, and
// for the true gradient, whose weight depends on the pair: compiled by NVRTC for one set of
//
//   D, E   channels of queries and keys, and of values and gradients, multiples of 8 up to 256
//   BITS   bits of a code, 1 to 16; codes are uint8 up to 8 bits, uint16 above
//   X      number type of rows in and out: BF16, F16 or F32
//   INDEX  type of the numbers in the lists of tokens, uint16_t or uint32_t
//
// A group of lanes takes a token: each lane eight channels, and one hash of as many as there are lanes.
// Every sum is in float32, in one order.

#include "buckets.cuh"
#include "common.cuh"
#include "rows.cuh"

constexpr int MOST = 20;   // tokens of a bucket that are looked at one by one
constexpr int DRAWN = 16;  // for the true gradient, and drawn from larger buckets
constexpr int THREADS = 128;
constexpr uint32_t NONE = ~0u;
constexpr Type SUM = X == BF16 ? BF16 : F32;  // number type of the sums of heavy buckets

// Where the sum of a heavy bucket of one hash is kept: buckets follow one another in the list, and each
// covers a multiple of MOST that no other does.
__device__ inline uint32_t heavy_slot(uint32_t at) { return (at + MOST - 1) / MOST; }

struct Lists {  // of the other side, for one head
  const INDEX* order;     // (m, n)
  const uint32_t* first;  // (m, C + 1)
  int64_t n;
};

// What a token meets in ROUNDS GROUP hashes from h on: how many tokens, and their numbers in `met`. Of
// buckets of more than MOST, this lane has the slots in `heavy`, else NONE. With SAMPLE, DRAWN tokens of a
// bucket of more than those are met, each as likely as any other, and `weight` is what they stand for.
template <int GROUP, int ROUNDS, bool SAMPLE>
__device__ int meet(const Lists& lists, const Code* codes, int h, int hashes, bool there,
                    uint32_t random, INDEX* met, float* weight, uint32_t (&heavy)[ROUNDS]) {
  constexpr int LIMIT = SAMPLE ? DRAWN : MOST;
  const int lane = threadIdx.x % GROUP;
  uint32_t at[ROUNDS], count[ROUNDS], entries = 0;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int hash = h + r * GROUP + lane;
    at[r] = count[r] = 0;
    if (!there || hash >= hashes) continue;
    const uint32_t* edge = lists.first + hash * (int64_t)(BUCKETS + 1) + codes[hash];
    at[r] = edge[0];
    count[r] = edge[1] - at[r];
  }
#pragma unroll
  for (int r = 0; r < ROUNDS; r++)
    entries += count[r] <= LIMIT ? count[r] : SAMPLE ? DRAWN : 0;
  uint32_t end = entries;
  for (int o = 1; o < GROUP; o *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, end, o, GROUP);
    if (lane >= o) end += other;
  }
  uint32_t to = end - entries;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    const int hash = h + r * GROUP + lane;
    const INDEX* order = lists.order + hash * lists.n + at[r];
    heavy[r] = NONE;
    if (count[r] <= LIMIT) {
      for (uint32_t e = 0; e < count[r]; e++, to++) {
        met[to] = order[e];
        if (SAMPLE) weight[to] = 1;
      }
    } else if (SAMPLE) {
      const float stride = (float)count[r] / DRAWN;
      const float start = (mix(random ^ mix(hash)) >> 8) * 0x1p-24f;
      for (uint32_t e = 0; e < DRAWN; e++, to++) {
        met[to] = order[min((uint32_t)((start + e) * stride), count[r] - 1)];
        weight[to] = stride;
      }
    } else {
      heavy[r] = (uint32_t)(hash * (lists.n / MOST + 1) + heavy_slot(at[r]));
    }
  }
  __syncwarp();
  return __shfl_sync(~0u, end, GROUP - 1, GROUP);
}

// Sums of the rows of heavy buckets, (BH, m, n / MOST + 1, E), the only ones that are written. A warp
// looks at 1,024 buckets, 32 at a time. Rows of x at the given byte strides; most (BH, m): the tokens of
// the fullest bucket.
extern "C" __global__ void __launch_bounds__(THREADS) heavy_sum(
    const INDEX* order, const uint32_t* first, const uint32_t* most, const char* x,
    int64_t batch_bytes, int64_t head_bytes, int64_t row_bytes, char* sums, int64_t heads,
    int64_t hashes, int64_t n, int64_t warps) {
  constexpr int GROUP = group_of(E), STRETCH = 1024, PARTS = (BUCKETS + STRETCH - 1) / STRETCH;
  const int64_t id = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32, hash = id / PARTS;
  if (id >= warps || most[hash] <= MOST) return;
  const int lane = threadIdx.x % 32, piece = lane % GROUP, begin_bucket = id % PARTS * STRETCH;
  const int64_t bh = hash / hashes;
  first += hash * (BUCKETS + 1);
  order += hash * n;
  x += bh / heads * batch_bytes + bh % heads * head_bytes;
  for (int run = begin_bucket; run < min(begin_bucket + STRETCH, BUCKETS); run += 32) {
    const bool there = run + lane < BUCKETS;
    const uint32_t at = there ? first[run + lane] : 0;
    const uint32_t count = there ? first[run + lane + 1] - at : 0;
    for (uint32_t heavy = __ballot_sync(~0u, count > MOST); heavy; heavy &= heavy - 1) {
      const uint32_t begin = __shfl_sync(~0u, at, __ffs(heavy) - 1);
      const uint32_t end = begin + __shfl_sync(~0u, count, __ffs(heavy) - 1);
      float sum[8] = {};
      if (piece * 8 < E)
        for (uint32_t i = begin + lane / GROUP; i < end; i += 8 * (32 / GROUP)) {
          Row8<X> row[8];
#pragma unroll
          for (int u = 0; u < 8; u++) {
            const uint32_t j = i + u * (32 / GROUP);
            if (j < end) row[u].load(x + (int64_t)order[j] * row_bytes, piece);
            else row[u].clear();
          }
#pragma unroll
          for (int u = 0; u < 8; u++) row[u].add_to(sum);
        }
#pragma unroll
      for (int i = 0; i < 8; i++)
        for (int o = GROUP; o < 32; o *= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], o);
      const int64_t slot = hash * (n / MOST + 1) + heavy_slot(begin);
      if (lane < GROUP && piece * 8 < E) store8<SUM>(sums + slot * (E * Bytes<SUM>::each), piece, sum);
    }
  }
}

// Add the sums of the heavy buckets that the lanes of a group have found.
template <int GROUP, int ROUNDS>
__device__ inline void add_heavy(const char* sums, const uint32_t (&heavy)[ROUNDS], float (&sum)[8]) {
  const int lane = threadIdx.x % GROUP, begin = threadIdx.x % 32 - lane;
#pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    uint32_t found = __ballot_sync(~0u, heavy[r] != NONE) >> begin;
    if (GROUP < 32) found &= (1u << GROUP % 32) - 1;
    while (__any_sync(~0u, found)) {
      const uint32_t slot = __shfl_sync(~0u, heavy[r], begin + __ffs(found | 1u << 31) - 1);
      if (found && lane * 8 < E) {
        Row8<SUM> row;
        row.load(sums + (int64_t)slot * (E * Bytes<SUM>::each), lane);
        row.add_to(sum);
      }
      found &= found - 1;
    }
  }
}

// y (BH, nq, E) = 1/m Σ of the rows of x that a token meets, or its unit vector, with 1/norm in
// `inverse`. codes (BH, nq, m); mask (B, nq) or null; lists and heavy sums of the side of x.
extern "C" __global__ void __launch_bounds__(THREADS) walk_gather(
    const Code* codes, const bool* mask, const INDEX* order, const uint32_t* first, const char* x,
    int64_t batch_bytes, int64_t head_bytes, int64_t row_bytes, const char* heavy, char* y,
    float* inverse, int64_t heads, int64_t hashes, int64_t n, int64_t tokens, int64_t rows,
    float scale) {
  constexpr int GROUP = group_of(E), ROUNDS = 1;
  __shared__ INDEX room[THREADS / GROUP][GROUP * ROUNDS * MOST];
  INDEX* met = room[threadIdx.x / GROUP];
  uint32_t slots[ROUNDS];
  const int64_t row = (int64_t)blockIdx.x * (THREADS / GROUP) + threadIdx.x / GROUP;
  const int lane = threadIdx.x % GROUP;
  const bool there = row < rows, holds = lane * 8 < E;
  const uint32_t bh = there ? (uint32_t)row / (uint32_t)tokens : 0;
  const bool seen = there && !(mask && !mask[bh / (uint32_t)heads * tokens + row - bh * tokens]);
  const Lists lists{order + bh * hashes * n, first + bh * hashes * (BUCKETS + 1), n};
  x += bh / (uint32_t)heads * batch_bytes + bh % (uint32_t)heads * head_bytes;
  heavy += bh * hashes * (n / MOST + 1) * (E * Bytes<SUM>::each);
  float sum[8] = {};
  for (int h = 0; h < hashes; h += ROUNDS * GROUP) {
    const int count = meet<GROUP, ROUNDS, false>(lists, codes + row * hashes, h, hashes, seen, 0, met,
                                                 nullptr, slots);
    for (int i = 0; i < count; i += 8) {
      Row8<X> part[8];
#pragma unroll
      for (int u = 0; u < 8; u++) {
        if (holds && i + u < count) part[u].load(x + (int64_t)met[i + u] * row_bytes, lane);
        else part[u].clear();
      }
#pragma unroll
      for (int u = 0; u < 8; u++) part[u].add_to(sum);
    }
    add_heavy<GROUP>(heavy, slots, sum);
    __syncwarp();
  }
  if (inverse) {
    float square = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) square += sum[i] * sum[i];
    for (int o = 1; o < GROUP; o *= 2) square += __shfl_xor_sync(~0u, square, o);
    const float inverse_norm = square > 0 ? rsqrtf(square) : 0;
    if (there && lane == 0) inverse[row] = inverse_norm / scale;  // of the scaled row
    scale = inverse_norm;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] *= scale;
  if (there && holds) store8<X>(y + row * E * Bytes<X>::each, lane, sum);
}

// One side of a pair: the tokens whose gradient is wanted, and what is known of the others.
struct Side {
  const Code* codes;      // (BH, n, m) of the tokens
  const INDEX* order;     // lists of the others
  const uint32_t* first;
  const char *x, *a;      // rows of the tokens: what is hashed, and g or v
  const char *other_x, *other_a;
  const float *norms, *other_norms;
  int64_t n, other_n;
};

// Take a gradient of the unit vector of x through its norm, and write it.
template <int GROUP>
__device__ inline void through_norm(float (&sum)[8], const float (&unit)[8], float factor, bool there,
                                    char* to) {
  const int lane = threadIdx.x % GROUP;
  const float along = dot<GROUP>(sum, unit);
#pragma unroll
  for (int c = 0; c < 8; c++) sum[c] = there ? (sum[c] - along * unit[c]) * factor : 0;
  if (to && lane * 8 < D) store8<X>(to, lane, sum);
}

template <int GROUP, Type T>
__device__ inline void load8(const char* row, int channels, bool there, float (&x)[8]) {
  const int lane = threadIdx.x % GROUP;
  Row8<T> word;
  if (there && lane * 8 < channels) word.load(row, lane);
  else word.clear();
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = 0;
  word.add_to(x);
}

#if D <= 128 && E <= 128
// Gradients of the surrogate from 16-bit rows: queries come first in the grid, then keys, and dV with dK.
// Rows as outer.cu reads them, [ĝ | q̂ |g| s] and [v̂ | k̂ |v| s]; its sums over the heavy buckets are in
// q_sums and k_sums, for the heads that have some: `fullest` (2, BH) are the tokens of the fullest bucket
// of queries and of keys. `heavy` has the sums of g over the heavy buckets of queries. Of all hashes, dQ
// and dK take the first `used`.
constexpr int W = D <= 64 && E <= 64 ? 64 : 128, LANES = W / 8, ROUNDS = 2;
constexpr Type SUMS = sums_of(X);
constexpr bool IN_FLOAT16 = X == BF16;  // products, and sums of four rows: digits enough for bfloat16

template <bool KEY>
__device__ void walk_outer_side(const Side& s, const float* totals, const uint32_t* fullest,
                                const char* sums, const char* heavy, const bool* mask, int64_t row,
                                bool there, uint32_t batch_heads, uint32_t heads, int hashes, int used,
                                float scale, char* out, char* dv, INDEX* met) {
  const int lane = threadIdx.x % LANES;
  const uint32_t bh = there ? (uint32_t)row / (uint32_t)s.n : 0;
  const bool seen = there && !(KEY && mask && !mask[bh / heads * s.n + row - bh * s.n]);
  const int64_t from = bh * s.other_n;
  const Lists lists{s.order + from * hashes, s.first + bh * (int64_t)hashes * (BUCKETS + 1),
                    s.other_n};
  const char* rows = s.other_a + from * (4 * W);
  heavy += bh * (int64_t)hashes * (s.other_n / MOST + 1) * (E * Bytes<SUM>::each);
  const float g_total = KEY ? totals[bh] : 0;
  // Four rows at a time fit float16, even four times the one that holds all of g.
  const float g_scale = 8192 * inverse_of(g_total), g_back = g_total / 8192;
  Row8<F16> own;
  float sum[8] = {}, v_sum[8] = {};
  uint32_t slots[ROUNDS];
  if (seen) own.load(s.a + row * (4 * W), lane);
  else own.clear();
  for (int h = 0, next; h < (KEY ? hashes : used); h = next) {
    next = h < used ? min(h + ROUNDS * LANES, used) : h + ROUNDS * LANES;
    // Beyond the first `used`, hashes count for dV alone; they come in rounds of their own.
    const int limit = h < used ? used : hashes;
    const int count = meet<LANES, ROUNDS, false>(lists, s.codes + row * hashes, h, limit, seen, 0, met,
                                                 nullptr, slots);
    const int most = __reduce_max_sync(~0u, count);  // the groups of a warp go together
    for (int i = 0; i < most; i += 4) {
      Row8<F16> a[4], b[4];
      float size[4];
#pragma unroll
      for (int u = 0; u < 4; u++) {
        a[u].clear(), b[u].clear(), size[u] = 0;
        if (i + u >= count) continue;
        const uint32_t j = met[i + u];
        a[u].load(rows + (int64_t)j * (4 * W), lane);
        if (!KEY || h < used) b[u].load(rows + (int64_t)j * (4 * W) + 2 * W, lane);
        if (KEY) size[u] = s.other_norms[from + j] * g_scale;
      }
      float score[4];
#pragma unroll
      for (int u = 0; u < 4; u++) score[u] = IN_FLOAT16 ? dot16(own, a[u]) : dot32(own, a[u]);
      sum4<LANES>(score);
      if constexpr (IN_FLOAT16) {
        Row8<F16> part, v_part;  // four at a time, then on to float32
        part.clear(), v_part.clear();
#pragma unroll
        for (int u = 0; u < 4; u++) {
          part.add_scaled(score[u], b[u]);
          if (KEY) v_part.add_scaled(size[u], a[u]);
        }
        part.add_to(sum);
        if (KEY) v_part.add_to(v_sum, g_back);
      } else {
#pragma unroll
        for (int u = 0; u < 4; u++) {
          b[u].add_to(sum, score[u]);
          if (KEY) a[u].add_to(v_sum, size[u] * g_back);
        }
      }
    }
    if (KEY) add_heavy<LANES>(heavy, slots, v_sum);
    __syncwarp();
  }
  const uint32_t other_side = bh + (KEY ? 0 : batch_heads);
  if (seen && fullest[other_side] > MOST) {
    load_sums<SUMS>(sums + row * (W * Bytes<SUMS>::each), lane).add_to(sum);
  }
  __syncwarp();  // all of a row is read before any of it is written
  float unit[8];
  load8<LANES, X>(s.x + row * (D * 2), D, seen, unit);
  const float inverse = inverse_of(sqrtf(dot<LANES>(unit, unit)));
#pragma unroll
  for (int c = 0; c < 8; c++) {
    unit[c] *= inverse;
    v_sum[c] *= 1.f / hashes;
  }
  const float total = totals[other_side], norm = seen ? s.norms[row] : 0;
  through_norm<LANES>(sum, unit, inverse * scale * norm * total, seen,
                      there ? out + row * (D * 2) : nullptr);
  if (KEY && there && lane * 8 < E) store8<X>(dv + row * (E * 2), lane, v_sum);
}

extern "C" __global__ void __launch_bounds__(THREADS, IN_FLOAT16 ? 7 : 5) walk_outer(
    const Code* q_codes, const Code* k_codes, const INDEX* q_order, const INDEX* k_order,
    const uint32_t* q_first, const uint32_t* k_first, const char* q, const char* k,
    const char* q_rows, const char* k_rows, const float* g_norms, const float* v_norms,
    const float* totals, const uint32_t* fullest, const char* q_sums, const char* k_sums,
    const char* heavy, const bool* mask, char* dq, char* dk, char* dv, int64_t batch_heads, int64_t heads,
    int64_t hashes, int64_t used, int64_t queries, int64_t keys, float scale) {
  __shared__ INDEX room[THREADS / LANES][LANES * ROUNDS * MOST];
  INDEX* met = room[threadIdx.x / LANES];
  constexpr int EACH = THREADS / LANES;
  const int64_t blocks = (batch_heads * queries + EACH - 1) / EACH;
  const bool key = blockIdx.x >= blocks;
  const int64_t row = (blockIdx.x - (key ? blocks : 0)) * EACH + threadIdx.x / LANES;
  if (key) {
    const Side side{k_codes, q_order, q_first, k, k_rows, q, q_rows, v_norms, g_norms, keys, queries};
    walk_outer_side<true>(side, totals, fullest, k_sums, heavy, mask, row, row < batch_heads * keys,
                          batch_heads, heads, hashes, used, scale, dk, dv, met);
  } else {
    const Side side{q_codes, k_order, k_first, q, q_rows, k, k_rows, g_norms, v_norms, queries, keys};
    walk_outer_side<false>(side, totals, fullest, q_sums, heavy, mask, row, row < batch_heads * queries,
                           batch_heads, heads, hashes, used, scale, dq, dv, met);
  }
}
#endif

// The true gradient: queries come first in the grid, then keys. Rows as given, x = q or k with their
// norms, a = g or v. A pair counts (a·a') slope(x̂·x̂') x̂'; of a bucket of more than DRAWN tokens, so
// many are drawn, each token afresh.
template <bool KEY>
__device__ void walk_true_side(const Side& s, const bool* mask, int64_t row, bool there,
                               uint32_t heads, int hashes, int used, uint32_t random, float scale,
                               char* out, INDEX* met, float* weight) {
  constexpr int GROUP = group_of(D > E ? D : E);
  constexpr int64_t X_ROW = D * Bytes<X>::each, A_ROW = E * Bytes<X>::each;
  const int lane = threadIdx.x % GROUP;
  const uint32_t bh = there ? (uint32_t)row / (uint32_t)s.n : 0;
  const bool seen = there && !(KEY && mask && !mask[bh / heads * s.n + row - bh * s.n]);
  const int64_t from = bh * s.other_n;
  const Lists lists{s.order + from * hashes, s.first + bh * (int64_t)hashes * (BUCKETS + 1),
                    s.other_n};
  float unit[8], own[8], sum[8] = {};
  uint32_t slots[1];
  load8<GROUP, X>(s.x + row * X_ROW, D, seen, unit);
  load8<GROUP, X>(s.a + row * A_ROW, E, seen, own);
  const float inverse = seen ? inverse_of(s.norms[row]) : 0;
#pragma unroll
  for (int c = 0; c < 8; c++) unit[c] *= inverse;
  random = mix(random ^ mix((uint32_t)row * 2 + KEY));
  for (int h = 0; h < used; h += GROUP) {
    const int count = meet<GROUP, 1, true>(lists, s.codes + row * hashes, h, used, seen, random, met,
                                           weight, slots);
    const int most = __reduce_max_sync(~0u, count);  // the groups of a warp go together
    for (int i = 0; i < most; i++) {
      const bool one = i < count;
      const int64_t j = from + (one ? met[i] : 0);
      float x[8], a[8];
      load8<GROUP, X>(s.other_x + j * X_ROW, D, one, x);
      load8<GROUP, X>(s.other_a + j * A_ROW, E, one, a);
      const float length = one ? inverse_of(s.other_norms[j]) : 0;
      const float cosine = dot<GROUP>(unit, x) * length, score = dot<GROUP>(own, a);
      // τ / (π p √(1 − x²)), kept finite where a sine or a chance of zero is within rounding.
      constexpr float FLOOR = 4 * 1.1920929e-7f, PI = 3.14159265f;
      const float sine = sqrtf(fmaxf(1 - cosine * cosine, FLOOR));
      const float chance = fmaxf(1 - acosf(fminf(fmaxf(cosine, -1.f), 1.f)) / PI, FLOOR);
      const float factor = one ? score * weight[i] * length / (PI * chance * sine) : 0;
#pragma unroll
      for (int c = 0; c < 8; c++) sum[c] += factor * x[c];
    }
    __syncwarp();
  }
  through_norm<GROUP>(sum, unit, inverse * scale, seen, there ? out + row * X_ROW : nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS) walk_true(
    const Code* q_codes, const Code* k_codes, const INDEX* q_order, const INDEX* k_order,
    const uint32_t* q_first, const uint32_t* k_first, const char* q, const char* k, const char* v,
    const char* g, const float* q_norms, const float* k_norms, const bool* mask, char* dq, char* dk,
    int64_t batch_heads, int64_t heads, int64_t hashes, int64_t used, int64_t queries, int64_t keys,
    const int64_t* seed_at, int64_t seed, float scale) {
  constexpr int GROUP = group_of(D > E ? D : E), EACH = THREADS / GROUP;
  __shared__ INDEX room[EACH][GROUP * DRAWN];
  __shared__ float weights[EACH][GROUP * DRAWN];
  INDEX* met = room[threadIdx.x / GROUP];
  float* weight = weights[threadIdx.x / GROUP];
  const int64_t blocks = (batch_heads * queries + EACH - 1) / EACH;
  const bool key = blockIdx.x >= blocks;
  const int64_t row = (blockIdx.x - (key ? blocks : 0)) * EACH + threadIdx.x / GROUP;
  if (seed_at) seed = *seed_at;
  const uint32_t random = mix((uint32_t)seed) ^ (uint32_t)(seed >> 32);
  if (key) {
    const Side side{k_codes, q_order, q_first, k, v, q, g, k_norms, q_norms, keys, queries};
    walk_true_side<true>(side, mask, row, row < batch_heads * keys, heads, hashes, used, random,
                         scale, dk, met, weight);
  } else {
    const Side side{q_codes, k_order, k_first, q, g, k, v, q_norms, k_norms, queries, keys};
    walk_true_side<false>(side, mask, row, row < batch_heads * queries, heads, hashes, used, random,
                          scale, dq, met, weight);
  }
}
