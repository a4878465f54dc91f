// dQ and dK of the surrogate gradient on tensor cores: compiled by NVRTC for one set of
//
//   W      columns of a row, 64 or 128; zero beyond the channels
//   INDEX  type of the numbers in the lists of tokens, uint16_t or uint32_t
//   LIGHT  tokens of a bucket that are taken in pairs, 48 or 64; zero for the kernels that take none so
//   SUMS   number type of the sums over hashes, F16 or F32
//
// A token is a row of 2 W float16 numbers: [ĝ | q̂ |g| s] for a query, [v̂ | k̂ |v| s] for a key, unit
// vectors and a factor s that keeps every sum in the range of float16. With them, over the tokens
// of a bucket,
//
//   dQ_i += Σ_j (ĝ_i·v̂_j) K_j = (Σ_j K_j v̂_jᵀ) ĝ_i,     dK_j += (Σ_i Q_i ĝ_iᵀ) v̂_j.
//
// The work is in proportion to the tokens, whatever the size of the bucket. Sums over hashes are
// additions in memory, whose order is not fixed.

#include "common.cuh"

constexpr int PER_SM = 8;  // warps of either kernel: as many as 255 registers each leave room for

__device__ inline uint32_t pack(float low, float high) { return pack(low, high, F16); }

// Float16 numbers that scores and tables are sums of: with one, float16 rows would be rounded too often.
constexpr int PIECES = SUMS == F16 ? 1 : 2;

// Two numbers rounded to float16. What that leaves out stays in them, for the next piece.
__device__ inline uint32_t take_piece(float& low, float& high) {
  const uint32_t piece = pack(low, high);
  if (PIECES > 1) {
    float x, y;
    unpack(piece, x, y, F16);
    low -= x, high -= y;
  }
  return piece;
}

constexpr int SUMS_ROW = W * Bytes<SUMS>::each;  // bytes

// Add a row of this lane's tiles, its upper or lower half, to the sums of a token.
template <int TILES>
__device__ inline void add_row(char* sums, uint32_t token, const float (&x)[TILES][4], int half) {
  char* to = sums + (int64_t)token * SUMS_ROW;
#pragma unroll
  for (int i = 0; i < TILES; i += 4) {
    if constexpr (SUMS == F16) {
      add8(to + 16 * i, pack(x[i][2 * half], x[i][2 * half + 1]),
           pack(x[i + 1][2 * half], x[i + 1][2 * half + 1]),
           pack(x[i + 2][2 * half], x[i + 2][2 * half + 1]),
           pack(x[i + 3][2 * half], x[i + 3][2 * half + 1]));
    } else {
#pragma unroll
      for (int j = i; j < i + 4; j += 2)
        add4(to + 32 * i + 8 * (j - i), x[j][2 * half], x[j][2 * half + 1], x[j + 1][2 * half],
             x[j + 1][2 * half + 1]);
    }
  }
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
  char* out = (side ? both.dk + bh * both.keys * SUMS_ROW : both.dq + bh * both.queries * SUMS_ROW) +
              warp * (32 * Bytes<SUMS>::each) + t * (8 * Bytes<SUMS>::each);
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
    uint32_t small[PIECES][MT][NT][2];
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
#pragma unroll
          for (int p = 0; p < PIECES; p++) {
            const uint32_t b0 = small[p][i / 2][2 * s][i % 2], b1 = small[p][i / 2][2 * s + 1][i % 2];
            multiply<F16>(sum[i], a, b0, b1, s == 0 && p == 0);
          }
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
    auto word_of = [&](int p, int i, int j) {  // where two tiles of a table are kept
      const int bucket = run - begin + __ffs(mine) - 1;
      return kept + ((bucket * PIECES + p) * (MT * NT) + i * NT + j) * 16 + lane;
    };
    take();
    while (here) {
      if (PART == APPLY) {
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
          for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j += 2) {
              const uint4 word = __ldcs(word_of(p, i, j));
              small[p][i][j][0] = word.x, small[p][i][j][1] = word.y;
              small[p][i][j + 1][0] = word.z, small[p][i][j + 1][1] = word.w;
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
          for (int j = 0; j < NT; j++)
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
              small[p][i][j][0] = take_piece(table[i][j][0], table[i][j][1]);
              small[p][i][j][1] = take_piece(table[i][j][2], table[i][j][3]);
            }
        take();
      }
      if (PART == BUILD) {
#pragma unroll
        for (int p = 0; p < PIECES; p++)
#pragma unroll
          for (int i = 0; i < MT; i++)
#pragma unroll
            for (int j = 0; j < NT; j += 2)
              __stcs(word_of(p, i, j), make_uint4(small[p][i][j][0], small[p][i][j][1],
                                                  small[p][i][j + 1][0], small[p][i][j + 1][1]));
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
  kept += (int64_t)(run % (2 * tasks)) * length * (PIECES * MT * NT * 16);
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
#include "pairs.cuh"

#if W == 64
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
#else
extern "C" __global__ void __launch_bounds__(32 * WARPS, 192 / LIGHT)
    outer_pairs(SIDES, int64_t heads, int64_t late, int64_t length, int64_t short_length,
                uint32_t* queue) {
  extern __shared__ __align__(128) char near[];
  run_pairs(near, queue, BOTH, heads, late, length, short_length);
}
#endif
#endif
