// Part of outer.cu: buckets of up to LIGHT queries and keys, S = ĝ v̂ᵀ, dQ = S K, dK = Sᵀ Q. Each warp of
// a block has 64 columns of dQ and dK; all of them compute S.
constexpr int WARPS = W / 64, OWN = NT / WARPS;  // OWN: tiles of a row of a warp's columns
constexpr int TILES = LIGHT / 16;
constexpr int RING = 2 * TILES, HALF = 16 * W * 2, PAIR_SLOT = 2 * HALF;  // bytes of 16 rows

struct Bucket {
  uint32_t bh;
  int q_count, k_count, slots;
  uint32_t q_token[2], k_token[2];  // of lane and of lane + 32
};

__device__ inline void sync_pairs() {
  if (WARPS == 1) __syncwarp();
  else __syncthreads();
}

__device__ inline uint32_t ring_slot(uint32_t shared, int i) {
  return shared + (i < RING ? i : i - RING) * PAIR_SLOT;
}

template <int QT>
__device__ inline void pairs(uint32_t shared, int at, const Bucket& bucket, char* dq, char* dk) {
  const int thread = threadIdx.x, warp = WARPS == 1 ? 0 : thread / 32, lane = thread - 32 * warp;
  const int g = lane / 4, own = warp * OWN;
  const int row = lane % 16, piece = lane / 16, b_row = lane % 8 + lane / 16 * 8,
            b_piece = lane / 8 % 2, k_at = at + QT;
  uint32_t q_slot[QT];
#pragma unroll
  for (int qt = 0; qt < QT; qt++) q_slot[qt] = ring_slot(shared, at + qt);
  float to_q[QT][OWN][4] = {};
#pragma unroll 1
  for (int kt = 0; kt * 16 < bucket.k_count; kt++) {
    const uint32_t k_slot = ring_slot(shared, k_at + kt);
    uint32_t v[NT / 2][4];
#pragma unroll
    for (int s = 0; s < NT / 2; s++)
      load_matrix<false>(k_slot + place<W / 8>(b_row, 2 * s + b_piece), v[s]);
    float to_k[OWN][4];
#pragma unroll
    for (int qt = 0; qt < QT; qt++) {
      float score[2][4];
#pragma unroll
      for (int s = 0; s < NT / 2; s++) {
        uint32_t a[4];
        load_matrix<false>(q_slot[qt] + place<W / 8>(row, 2 * s + piece), a);
        multiply<F16>(score[0], a, v[s][0], v[s][1], s == 0);
        multiply<F16>(score[1], a, v[s][2], v[s][3], s == 0);
      }
      uint32_t a[PIECES][4], turned[PIECES][4];
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
          a[p][i] = take_piece(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
        turned[p][0] = turn(a[p][0]), turned[p][1] = turn(a[p][2]);
        turned[p][2] = turn(a[p][1]), turned[p][3] = turn(a[p][3]);
      }
#pragma unroll
      for (int j = 0; j < OWN; j += 2) {
        uint32_t b[4];
        load_matrix<true>(k_slot + HALF + place<W / 8>(row, own + j + piece), b);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
          multiply<F16>(to_q[qt][j], a[p], b[0], b[1], false);
          multiply<F16>(to_q[qt][j + 1], a[p], b[2], b[3], false);
        }
      }
#pragma unroll
      for (int j = 0; j < OWN; j += 2) {
        uint32_t b[4];
        load_matrix<true>(q_slot[qt] + HALF + place<W / 8>(row, own + j + piece), b);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
          multiply<F16>(to_k[j], turned[p], b[0], b[1], qt == 0 && p == 0);
          multiply<F16>(to_k[j + 1], turned[p], b[2], b[3], qt == 0 && p == 0);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = kt * 16 + g + 8 * half;
      const uint32_t token = __shfl_sync(~0u, kt < 2 ? bucket.k_token[0] : bucket.k_token[1], r);
      if (r < bucket.k_count) add_row<OWN>(dk, token, to_k, half);
    }
  }
#pragma unroll
  for (int qt = 0; qt < QT; qt++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = qt * 16 + g + 8 * half;
      const uint32_t token = __shfl_sync(~0u, bucket.q_token[qt / 2], r);
      if (r < bucket.q_count) add_row<OWN>(dq, token, to_q[qt], half);
    }
}

// A block takes runs of buckets from a queue, which is how many were taken, and goes from the last bucket
// of one to the first of the next without a pause: runs of `length`, and of `short_length` in the last
// `late` heads, so that all blocks end together.
__device__ void run_pairs(char* memory, uint32_t* queue, const Sides& both, int64_t heads, int64_t late,
                          int64_t length, int64_t short_length) {
  __shared__ uint32_t told;  // to all warps: the run that they take
  const int thread = threadIdx.x, warp = WARPS == 1 ? 0 : thread / 32, lane = thread - 32 * warp;
  const int t = lane % 4;
  const uint32_t used = (uint32_t)both.used, early = (uint32_t)(heads - late);
  const uint32_t long_runs = (uint32_t)((both.buckets + length - 1) / length);  // of a hash
  const uint32_t short_runs = (uint32_t)((both.buckets + short_length - 1) / short_length);
  const uint32_t longs = early * used * long_runs, tasks = longs + (uint32_t)late * used * short_runs;
  const uint32_t shared = (uint32_t)__cvta_generic_to_shared(memory);
  uint32_t ticket = thread == 0 ? atomicAdd(queue, 1) : 0;  // of the run after this one
  uint32_t bh = 0, live = 0, my_q = 0, my_k = 0;  // of this one: a lane a bucket, where it begins
  int my_q_count = 0, my_k_count = 0;             // and how many tokens it has
  const INDEX *q_list = nullptr, *k_list = nullptr;

  auto next = [&]() {  // the next bucket and its tokens; no slots at the end
    Bucket b{};
    while (!live) {
      uint32_t task = __shfl_sync(~0u, ticket, 0);
      if (WARPS > 1) {
        if (thread == 0) told = task;
        __syncthreads();
        task = told;
        __syncthreads();
      }
      if (task >= tasks) return b;
      if (thread == 0) ticket = atomicAdd(queue, 1);
      const bool is_long = task < longs;
      const uint32_t at = is_long ? task : task - longs, runs = is_long ? long_runs : short_runs;
      const int count = (int)(is_long ? length : short_length), mine = at % runs * count + lane;
      bh = at / runs / used + (is_long ? 0 : early);
      const int64_t hash = (int64_t)bh * both.hashes + at / runs % used;
      const Side q = both.q(bh, hash), k = both.k(bh, hash);
      const bool there = lane < count && mine < both.buckets;
      q_list = q.list, k_list = k.list;
      my_q = there ? q.first[mine] : 0, my_k = there ? k.first[mine] : 0;
      my_q_count = there ? q.first[mine + 1] - my_q : 0;
      my_k_count = there ? k.first[mine + 1] - my_k : 0;
      live = __ballot_sync(
          ~0u, my_q_count > 0 && my_k_count > 0 && max(my_q_count, my_k_count) <= LIGHT);
    }
    const int i = __ffs(live) - 1;
    live &= live - 1;
    b.bh = bh;
    b.q_count = __shfl_sync(~0u, my_q_count, i);
    b.k_count = __shfl_sync(~0u, my_k_count, i);
    const uint32_t q_at = __shfl_sync(~0u, my_q, i), k_at = __shfl_sync(~0u, my_k, i);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int j = lane + 32 * i;
      b.q_token[i] = j < b.q_count ? __ldcs(q_list + q_at + j) : 0;
      b.k_token[i] = j < b.k_count ? __ldcs(k_list + k_at + j) : 0;
    }
    b.slots = (b.q_count + 15) / 16 + (b.k_count + 15) / 16;
    return b;
  };
  auto copy = [&](const char* rows, const uint32_t (&tokens)[2], int count, int at) {
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      if (tile * 16 >= count) break;
      const uint32_t slot = ring_slot(shared, at + tile);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int row = i * 4 + thread / (W / 8), piece = thread % (W / 8);
        const uint32_t token = __shfl_sync(~0u, tokens[tile / 2], tile * 16 + row);
        const char* from = rows + (int64_t)token * (4 * W) + piece * 16;
        const int bytes = tile * 16 + row < count ? 16 : 0;
        copy16(slot + place<W / 8>(row, piece), from, bytes);
        copy16(slot + HALF + place<W / 8>(row, piece), from + 2 * W, bytes);
      }
    }
  };
  auto fetch = [&](const Bucket& b, int at) {
    copy(both.q(b.bh, 0).rows, b.q_token, b.q_count, at);
    copy(both.k(b.bh, 0).rows, b.k_token, b.k_count, at + (b.q_count + 15) / 16);
    commit_copies();
  };
  Bucket now = next(), soon = next();
  int at = 0;
  fetch(now, 0);
  while (now.slots) {
    int then = at + now.slots;
    if (then >= RING) then -= RING;
    const Bucket later = next();
    const bool fits = now.slots + soon.slots <= RING;
    if (fits) {
      fetch(soon, then);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    sync_pairs();
    const int q_tiles = (now.q_count + 15) / 16, mine = warp * (64 * Bytes<SUMS>::each) + t * (8 * Bytes<SUMS>::each);
    char* dq = both.dq + (int64_t)now.bh * both.queries * SUMS_ROW + mine;
    char* dk = both.dk + (int64_t)now.bh * both.keys * SUMS_ROW + mine;
    if (q_tiles == 1) pairs<1>(shared, at, now, dq, dk);
    else if (q_tiles == 2) pairs<2>(shared, at, now, dq, dk);
    else if (q_tiles == 3) pairs<3>(shared, at, now, dq, dk);
    else pairs<TILES>(shared, at, now, dq, dk);
    sync_pairs();
    if (!fits) fetch(soon, then);
    now = soon;
    soon = later;
    at = then;
  }
}

constexpr int PAIRS_MEMORY = RING * PAIR_SLOT;
