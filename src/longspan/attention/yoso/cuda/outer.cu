// dQ and dK of the surrogate gradient on tensor cores: compiled by NVRTC for one set of
//
//   W      columns of a row, 64 or 128; zero beyond the channels
//   INDEX  type of the numbers in the lists of tokens, uint16_t or uint32_t
//   LIGHT  tokens of a bucket that are taken in pairs, 48 or 64; zero for the kernels that take none so
//
// A token is a row of 2 W float16 numbers: [ĝ | q̂ |g| s] for a query, [v̂ | k̂ |v| s] for a key, unit
// vectors and a factor s that keeps every sum in the range of float16. With them, over the tokens
// of a bucket,
//
//   dQ_i += Σ_j (ĝ_i·v̂_j) K_j = (Σ_j K_j v̂_jᵀ) ĝ_i,     dK_j += (Σ_i Q_i ĝ_iᵀ) v̂_j.
//
// The work is in proportion to the tokens, whatever the size of the bucket. Sums over hashes are
// float16 additions in memory, whose order is not fixed.

#include "common.cuh"

constexpr int PER_SM = 8;  // warps of either kernel: as many as 255 registers each leave room for

__device__ inline uint32_t pack(float low, float high) { return pack(low, high, F16); }

// Add a row of this lane's tiles, its upper or lower half, to the sums of a token.
template <int TILES>
__device__ inline void add_row(char* sums, uint32_t token, const float (&x)[TILES][4], int half) {
  char* to = sums + (int64_t)token * (2 * W);
#pragma unroll
  for (int i = 0; i < TILES; i += 4)
    add8(to + 16 * i, pack(x[i][2 * half], x[i][2 * half + 1]),
         pack(x[i + 1][2 * half], x[i + 1][2 * half + 1]),
         pack(x[i + 2][2 * half], x[i + 2][2 * half + 1]),
         pack(x[i + 3][2 * half], x[i + 3][2 * half + 1]));
}

// What a warp knows of one side of one hash.
struct Side {
  const char* rows;   // of the head
  const INDEX* list;  // of the hash
  const uint32_t* first;
};

// All there is: rows (BH, n, 2 W); lists (BH, m, n), the first place of each bucket (BH, m, C + 1); sums
// (BH, n, W), columns in the order of the registers: 8 a + 2 b + c of every 32 hold what belongs to
// 8 b + 2 a + c. Of the hashes, the first `used` count.
struct Sides {
  const char *q_rows, *k_rows;
  const INDEX *q_list, *k_list;
  const uint32_t *q_first, *k_first;
  char *dq, *dk;
  int64_t queries, keys, hashes, used, buckets;
  __device__ Side q(int64_t bh, int64_t hash) const {
    return {q_rows + bh * queries * (4 * W), q_list + hash * queries, q_first + hash * (buckets + 1)};
  }
  __device__ Side k(int64_t bh, int64_t hash) const {
    return {k_rows + bh * keys * (4 * W), k_list + hash * keys, k_first + hash * (buckets + 1)};
  }
};

#define SIDES                                                                                   \
  const char *q_rows, const char *k_rows, const INDEX *q_list, const INDEX *k_list,             \
      const uint32_t *q_first, const uint32_t *k_first, char *dq, char *dk, int64_t queries,    \
      int64_t keys, int64_t hashes, int64_t used, int64_t buckets
#define BOTH \
  {q_rows, k_rows, q_list, k_list, q_first, k_first, dq, dk, queries, keys, hashes, used, buckets}

constexpr int CHUNK = 32;                   // rows that a warp works on at a time
constexpr int BLOCK = 64 * 64 / W;          // rows of a table that one warp holds in registers
constexpr int BLOCKS = W / BLOCK;
constexpr int MT = BLOCK / 16, NT = W / 8;  // tiles of a table
constexpr int STAGES = W == 64 ? 3 : 2;  // chunks in shared memory: in use, and on their way
constexpr int HALF_SLOT = CHUNK * W * 2;  // bytes: ĝ or v̂, and as many of Q or K
constexpr int SLOT = 2 * HALF_SLOT + 4 * CHUNK + 16;  // and tokens, and a note

__device__ inline void sync_block() {
  if (BLOCKS == 1) __syncwarp();
  else __syncthreads();
}

// Buckets with more than `own_above` tokens of the own side or `other_above` of the other: one block a
// run of buckets and side, each of its warps some rows of the table. Side 0 builds Σ_j K_j v̂_jᵀ from
// the keys and applies it to the queries, giving dQ; side 1 the other way round. The work is in
// proportion to the tokens, whatever the size of a bucket. A block looks through `each` runs of `length`
// buckets; most (BH, m): the tokens of the fullest. BUILD leaves the tables of a run at `kept`, a place
// for each of its buckets, and APPLY takes them from there: both for the buckets that are not above.
enum Part { ALL, BUILD, APPLY };

template <Part PART>
__device__ void run_tables(char* memory, uint32_t task, const Sides& both, int64_t length, int64_t each,
                           const uint32_t* q_most, const uint32_t* k_most, int64_t own_above,
                           int64_t other_above, uint4* kept = nullptr) {
  __shared__ uint32_t edges[2][33];  // first places, of the own and of the other side
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int stretch = (int)(length * each);  // buckets, `each` runs of them
  const uint32_t runs = (uint32_t)((both.buckets + stretch - 1) / stretch);
  // All hashes of a side one after another: what they read of a head stays in the L2 cache.
  const uint32_t bhs = task / runs / (uint32_t)both.used, bh = bhs / 2;
  const bool side = bhs % 2;
  const int64_t hash = (int64_t)bh * both.hashes + task / runs % (uint32_t)both.used;
  const Side q = both.q(bh, hash), k = both.k(bh, hash);
  if (PART == ALL && (side ? q_most : k_most)[hash] <= own_above &&
      (side ? k_most : q_most)[hash] <= other_above)
    return;  // no bucket of this hash is for this kernel
  const Side own = side ? q : k, other = side ? k : q;
  char* out = (side ? both.dk + bh * both.keys * (2 * W) : both.dq + bh * both.queries * (2 * W)) +
              warp * 64 + t * 16;
  const int begin = task % runs * stretch, end = min(begin + stretch, (int)both.buckets);
#pragma unroll 1
  for (int run = begin; run < end; run += (int)length) {
    uint32_t live;  // buckets of the run that are still to come
    {
      const int count = min((int)length, (int)both.buckets - run);
      sync_block();
      for (int i = threadIdx.x; i <= count; i += 32 * BLOCKS) {
        edges[0][i] = own.first[run + i];
        edges[1][i] = other.first[run + i];
      }
      sync_block();
      const uint32_t a = lane < count ? edges[0][lane + 1] - edges[0][lane] : 0;
      const uint32_t b = lane < count ? edges[1][lane + 1] - edges[1][lane] : 0;
      const bool above = a > own_above || b > other_above;
      live = __ballot_sync(~0u, a > 0 && b > 0 && above == (PART == ALL));
    }
    if (!live) continue;

    // Chunks in the order of their use: of each bucket its own side, then the other. `index` and `note`
    // are those of the chunk to be fetched next: token of each lane, 64 at the end of a side + rows.
    uint32_t at = 0, index = 0, note = 0;
    int left = 0, bucket = 0;
    bool on_other = PART != BUILD;
    uint32_t mine = live;  // buckets whose tables are still to come
    auto next = [&]() {
      if (left == 0) {
        if (on_other || PART != ALL) {
          bucket = __ffs(live) - 1;
          if (!live) {
            note = 0;
            return;
          }
          live &= live - 1;
        }
        if (PART == ALL) on_other = !on_other;
        at = edges[on_other][bucket];
        left = edges[on_other][bucket + 1] - at;
      }
      const int count = min(left, CHUNK);
      const INDEX* list = (on_other ? other.list : own.list) + at;
      index = lane < count ? __ldcs(list + lane) : 0;
      at += count;
      left -= count;
      note = count + (left == 0 ? 64 : 0);
    };
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(memory);
    auto fetch = [&](uint32_t slot) {
      constexpr int PIECES = W / 8, EACH = CHUNK * PIECES / (32 * BLOCKS);  // rows, some of each lane
      const uint32_t notes = slot + 2 * HALF_SLOT;
      if (warp == 0) store_word(notes + 4 * lane, index);
      if (threadIdx.x == 0) store_word(notes + 4 * CHUNK, note);
      if (BLOCKS == 1) __syncwarp();
      const int count = note & 63, from_row = threadIdx.x / PIECES * EACH;
      const int piece = threadIdx.x % PIECES;
      const char* rows = (on_other ? other.rows : own.rows) + piece * 16;
#pragma unroll
      for (int i = 0; i < EACH; i += 4) {
        uint32_t token[4];
        if (BLOCKS == 1) load_words(notes + 4 * (from_row + i), token);
#pragma unroll
        for (int u = 0; u < 4; u++) {
          const int row = from_row + i + u;
          if (BLOCKS > 1) token[u] = __shfl_sync(~0u, index, row);
          const char* from = rows + (uint64_t)token[u] * (4 * W);
          const int bytes = row < count ? 16 : 0;  // zeros beyond the last row
          copy16(slot + place<PIECES>(row, piece), from, bytes);
          if (!on_other) copy16(slot + HALF_SLOT + place<PIECES>(row, piece), from + 2 * W, bytes);
        }
      }
      commit_copies();
      next();
    };

    next();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) fetch(shared + i * SLOT);
    uint32_t slot = shared + (STAGES - 1) * SLOT, spent, here;
    auto take = [&]() {  // wait for the next chunk
      wait_for_copies<STAGES - 2>();
      sync_block();
      spent = slot;
      slot = slot == shared + (STAGES - 1) * SLOT ? shared : slot + SLOT;
      here = load_word(slot + 2 * HALF_SLOT + 4 * CHUNK);
    };

    // Rows and pieces that a lane names for ldmatrix: A transposed; A, and B transposed.
    const int a_row = lane % 8 + lane / 16 * 8, a_piece = lane / 8 % 2;
    const int row = lane % 16, piece = lane / 16;
    float table[MT][NT][4];
    uint32_t small[MT][NT][2];
    auto build = [&](int from, bool is_new) {  // with rows from … from + 15
      uint32_t a[MT][4];
#pragma unroll
      for (int i = 0; i < MT; i++)
        load_matrix<true>(
            slot + HALF_SLOT + place<W / 8>(from + a_row, warp * (BLOCK / 8) + 2 * i + a_piece), a[i]);
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        uint32_t b[4];
        load_matrix<true>(slot + place<W / 8>(from + row, j + piece), b);
#pragma unroll
        for (int i = 0; i < MT; i++) {
          multiply<F16>(table[i][j], a[i], b[0], b[1], is_new);
          multiply<F16>(table[i][j + 1], a[i], b[2], b[3], is_new);
        }
      }
    };
    auto apply = [&](int from, float (&sum)[2 * MT][4]) {
#pragma unroll
      for (int s = 0; s < NT / 2; s++) {
        uint32_t a[4];
        load_matrix<false>(slot + place<W / 8>(from + row, 2 * s + piece), a);
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
          const uint32_t b0 = small[i / 2][2 * s][i % 2], b1 = small[i / 2][2 * s + 1][i % 2];
          multiply<F16>(sum[i], a, b0, b1, s == 0);
        }
      }
    };
    auto emit = [&](int from, const float (&sum)[2 * MT][4]) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = from + g + 8 * half;
        const uint32_t token = load_word(slot + 2 * HALF_SLOT + 4 * r);
        if (r < (here & 63)) add_row<2 * MT>(out, token, sum, half);
      }
    };
    // With three stages a fetch can wait until the tensor cores are busy; with two it must come first.
    auto fetch_early = [&]() {
      if (STAGES == 2) fetch(spent);
    };
    auto fetch_late = [&]() {
      if (STAGES > 2) fetch(spent);
    };
    auto word_of = [&](int i, int j) {  // where two tiles of a table are kept
      const int bucket = run - begin + __ffs(mine) - 1;
      return kept + (bucket * (MT * NT) + i * NT + j) * 16 + lane;
    };
    take();
    while (here) {
      if (PART == APPLY) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int j = 0; j < NT; j += 2) {
            const uint4 word = __ldcs(word_of(i, j));
            small[i][j][0] = word.x, small[i][j][1] = word.y;
            small[i][j + 1][0] = word.z, small[i][j + 1][1] = word.w;
          }
        mine &= mine - 1;
      } else {
        fetch_early();
        build(0, true);
        if ((here & 63) > 16) build(16, false);
        fetch_late();
        while (here < 64) {
          take();
          fetch_early();
          build(0, false);
          if ((here & 63) > 16) build(16, false);
          fetch_late();
        }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int j = 0; j < NT; j++) {
            small[i][j][0] = pack(table[i][j][0], table[i][j][1]);
            small[i][j][1] = pack(table[i][j][2], table[i][j][3]);
          }
        take();
      }
      if (PART == BUILD) {
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int j = 0; j < NT; j += 2)
            __stcs(word_of(i, j), make_uint4(small[i][j][0], small[i][j][1], small[i][j + 1][0],
                                             small[i][j + 1][1]));
        mine &= mine - 1;
        continue;
      }
      while (true) {
        float sum[2 * MT][4];
        fetch_early();
        apply(0, sum);
        fetch_late();
        emit(0, sum);
        if ((here & 63) > 16) {
          apply(16, sum);
          emit(16, sum);
        }
        const bool last = here >= 64;
        take();
        if (last) break;
      }
    }
    wait_for_copies<0>();
  }
}

constexpr int TABLES_MEMORY = STAGES * SLOT;

#if LIGHT == 0
extern "C" __global__ void __launch_bounds__(32 * BLOCKS, PER_SM / BLOCKS)
    outer_tables(SIDES, int64_t length, int64_t each, const uint32_t* q_most, const uint32_t* k_most,
                 int64_t own_above, int64_t other_above) {
  __shared__ __align__(128) char memory[TABLES_MEMORY];
  run_tables<ALL>(memory, blockIdx.x, BOTH, length, each, q_most, k_most, own_above, other_above);
}

#if W == 64
// Buckets of up to `above` queries and keys: the tables of all hashes of a side of a head, then what they
// are applied to. At a time, the cache has to hold half of what it must for both. `kept` has room for the
// tables of two sides. `order`, all zero at first: a ticket, how many runs of each side are applied, which
// runs are built. A block waits for those with lower tickets alone, which have begun.
extern "C" __global__ void __launch_bounds__(32, PER_SM)
    outer_phased(SIDES, int64_t length, int64_t above, uint4* kept, uint32_t* order, int64_t sides) {
  __shared__ __align__(128) char memory[TABLES_MEMORY];
  const uint32_t tasks = (uint32_t)((buckets + length - 1) / length * used);  // of a side
  uint32_t ticket = 0;
  if (threadIdx.x == 0) ticket = atomicAdd(order, 1);
  ticket = __shfl_sync(~0u, ticket, 0);
  const uint32_t side = ticket / (2 * tasks), run = side * tasks + ticket % tasks;
  uint32_t* applied = order + 1 + side;
  uint32_t* built = order + 1 + sides + run;
  kept += (int64_t)(run % (2 * tasks)) * length * (MT * NT * 16);
  if (ticket / tasks % 2 == 0) {
    if (side >= 2) wait_for(applied - 2, tasks);
    run_tables<BUILD>(memory, run, BOTH, length, 1, nullptr, nullptr, above, above, kept);
    tell(built);
  } else {
    wait_for(built, 1);
    run_tables<APPLY>(memory, run, BOTH, length, 1, nullptr, nullptr, above, above, kept);
    tell(applied);
  }
}

extern "C" __global__ void __launch_bounds__(256) clear(uint32_t* x, int64_t count) {
  const int64_t i = blockIdx.x * 256 + threadIdx.x;
  if (i < count) x[i] = 0;
}
#endif

#else
// Buckets of up to LIGHT queries and keys: S = ĝ v̂ᵀ, dQ = S K, dK = Sᵀ Q. Arguments as above.
constexpr int TILES = LIGHT / 16;
constexpr int RING = 2 * TILES, HALF = 16 * W * 2, PAIR_SLOT = 2 * HALF;  // bytes of 16 rows

struct Bucket {
  uint32_t bh;
  int q_count, k_count, slots;
  uint32_t q_token[2], k_token[2];  // of lane and of lane + 32
};

__device__ inline uint32_t ring_slot(uint32_t shared, int i) {
  return shared + (i < RING ? i : i - RING) * PAIR_SLOT;
}

template <int QT>
__device__ inline void pairs(uint32_t shared, int at, const Bucket& bucket, char* dq, char* dk) {
  const int lane = threadIdx.x, g = lane / 4;
  const int row = lane % 16, piece = lane / 16, b_row = lane % 8 + lane / 16 * 8,
            b_piece = lane / 8 % 2, k_at = at + QT;
  uint32_t q_slot[QT];
#pragma unroll
  for (int qt = 0; qt < QT; qt++) q_slot[qt] = ring_slot(shared, at + qt);
  float to_q[QT][NT][4] = {};
#pragma unroll 1
  for (int kt = 0; kt * 16 < bucket.k_count; kt++) {
    const uint32_t k_slot = ring_slot(shared, k_at + kt);
    uint32_t v[NT / 2][4];
#pragma unroll
    for (int s = 0; s < NT / 2; s++)
      load_matrix<false>(k_slot + place<W / 8>(b_row, 2 * s + b_piece), v[s]);
    float to_k[NT][4];
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
      const uint32_t a[4] = {pack(score[0][0], score[0][1]), pack(score[0][2], score[0][3]),
                             pack(score[1][0], score[1][1]), pack(score[1][2], score[1][3])};
      const uint32_t turned[4] = {turn(a[0]), turn(a[2]), turn(a[1]), turn(a[3])};
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        uint32_t b[4];
        load_matrix<true>(k_slot + HALF + place<W / 8>(row, j + piece), b);
        multiply<F16>(to_q[qt][j], a, b[0], b[1], false);
        multiply<F16>(to_q[qt][j + 1], a, b[2], b[3], false);
      }
#pragma unroll
      for (int j = 0; j < NT; j += 2) {
        uint32_t b[4];
        load_matrix<true>(q_slot[qt] + HALF + place<W / 8>(row, j + piece), b);
        multiply<F16>(to_k[j], turned, b[0], b[1], qt == 0);
        multiply<F16>(to_k[j + 1], turned, b[2], b[3], qt == 0);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = kt * 16 + g + 8 * half;
      const uint32_t token = __shfl_sync(~0u, kt < 2 ? bucket.k_token[0] : bucket.k_token[1], r);
      if (r < bucket.k_count) add_row<NT>(dk, token, to_k, half);
    }
  }
#pragma unroll
  for (int qt = 0; qt < QT; qt++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = qt * 16 + g + 8 * half;
      const uint32_t token = __shfl_sync(~0u, bucket.q_token[qt / 2], r);
      if (r < bucket.q_count) add_row<NT>(dq, token, to_q[qt], half);
    }
}

// A warp takes runs of buckets from a queue, which is how many were taken, and goes from the last bucket of
// one to the first of the next without a pause: runs of `length`, and of the last `late` heads of `short_length`,
// so that all warps end together.
__device__ void run_pairs(char* memory, uint32_t* queue, const Sides& both, int64_t heads, int64_t late,
                          int64_t length, int64_t short_length) {
  const int lane = threadIdx.x, t = lane % 4;
  const uint32_t used = (uint32_t)both.used, early = (uint32_t)(heads - late);
  const uint32_t long_runs = (uint32_t)((both.buckets + length - 1) / length);  // of a hash
  const uint32_t short_runs = (uint32_t)((both.buckets + short_length - 1) / short_length);
  const uint32_t longs = early * used * long_runs, tasks = longs + (uint32_t)late * used * short_runs;
  const uint32_t shared = (uint32_t)__cvta_generic_to_shared(memory);
  uint32_t ticket = lane == 0 ? atomicAdd(queue, 1) : 0;  // of the run after this one
  uint32_t bh = 0, live = 0, my_q = 0, my_k = 0;  // of this one: a lane a bucket, where it begins
  int my_q_count = 0, my_k_count = 0;             // and how many tokens it has
  const INDEX *q_list = nullptr, *k_list = nullptr;

  auto next = [&]() {  // the next bucket and its tokens; no slots at the end
    Bucket b{};
    while (!live) {
      const uint32_t task = __shfl_sync(~0u, ticket, 0);
      if (task >= tasks) return b;
      if (lane == 0) ticket = atomicAdd(queue, 1);
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
        const int row = i * 4 + lane / 8, piece = lane % 8;
        const uint32_t token = __shfl_sync(~0u, tokens[tile / 2], tile * 16 + row);
        const char* from = rows + (int64_t)token * (4 * W) + piece * 16;
        const int bytes = tile * 16 + row < count ? 16 : 0;
        copy16(slot + place<8>(row, piece), from, bytes);
        copy16(slot + HALF + place<8>(row, piece), from + 2 * W, bytes);
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
    __syncwarp();
    const int q_tiles = (now.q_count + 15) / 16;
    char* dq = both.dq + (int64_t)now.bh * both.queries * (2 * W) + t * 16;
    char* dk = both.dk + (int64_t)now.bh * both.keys * (2 * W) + t * 16;
    if (q_tiles == 1) pairs<1>(shared, at, now, dq, dk);
    else if (q_tiles == 2) pairs<2>(shared, at, now, dq, dk);
    else if (q_tiles == 3) pairs<3>(shared, at, now, dq, dk);
    else pairs<TILES>(shared, at, now, dq, dk);
    __syncwarp();
    if (!fits) fetch(soon, then);
    now = soon;
    soon = later;
    at = then;
  }
}

constexpr int PAIRS_MEMORY = RING * PAIR_SLOT;

// Where few buckets are left to tables: they take long and come first, and pairs fill what they leave idle.
extern "C" __global__ void __launch_bounds__(32, PER_SM)
    outer_both(SIDES, int64_t length, int64_t each, const uint32_t* q_most, const uint32_t* k_most,
               int64_t own_above, int64_t other_above, int64_t tables, int64_t heads, int64_t late,
               int64_t pairs_length, int64_t short_length, uint32_t* queue) {
  __shared__ __align__(128) char memory[TABLES_MEMORY > PAIRS_MEMORY ? TABLES_MEMORY : PAIRS_MEMORY];
  if (blockIdx.x < tables)
    run_tables<ALL>(memory, blockIdx.x, BOTH, length, each, q_most, k_most, own_above, other_above);
  else
    run_pairs(memory, queue, BOTH, heads, late, pairs_length, short_length);
}
#endif
