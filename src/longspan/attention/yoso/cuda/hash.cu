// Codes of queries and keys: compiled by NVRTC for one set of
//
//   D       channels of a row, a multiple of 8 up to 256
//   BITS    bits of a code, 1 to 16; codes are uint8 up to 8 bits, uint16 above
//   X       number type of rows: BF16, F16 or F32
//   PLANES  bfloat16 pieces that add up to the projections, 1 or 2
//
// A code is the signs of BITS projections. Rows are split into as many bfloat16 pieces as hold their
// digits and multiplied on tensor cores; all bits of a token follow one another, whatever BITS is, 32
// to a word and four tiles of the product.

#include "buckets.cuh"
#include "common.cuh"

constexpr int GROUPS = (D + 31) / 32;  // of 32 channels: two steps of the product
constexpr int PIECES = X == BF16 ? 1 : X == F16 ? 2 : 3;
constexpr int MT = GROUPS * PIECES <= 2 && BITS <= 8 ? 4 : GROUPS * PIECES <= 4 ? 2 : 1;
constexpr int SETS = (MT + 1) / 2;  // of two tiles of 16 tokens; a warp holds MT tiles
constexpr int WARPS = 4, TOKENS = WARPS * 16 * MT;
constexpr int PER_SM = GROUPS * PIECES <= 2 ? 16 / MT : X == F16 && MT == 2 ? 4 : 2;  // blocks, at least
constexpr int HASHES = BITS <= 8 ? 32 : 16;  // at a time: 32 bytes of codes
constexpr int TILES = HASHES * BITS / 8, WORDS = (TILES + 3) / 4;
constexpr int EACH = 4 / sizeof(Code);  // codes in a word

// Where a word of a token's bits lies: four neighbouring tokens, and 32 neighbouring fours of them, meet
// different banks.
constexpr int PITCH = WORDS | 1, QUARTER = (TOKENS / 4 * PITCH + 31) / 32 * 32 + 8;
__device__ inline int word_at(int token, int word) {
  return token % 4 * QUARTER + token / 4 * PITCH + word;
}

__device__ inline uint32_t code_of(const uint32_t* bits, int token, int hash) {
  const int at = hash * BITS, word = at / 32, shift = at % 32;
  uint32_t code = bits[word_at(token, word)] >> shift;
  if (32 % BITS && shift + BITS > 32) code |= bits[word_at(token, word + 1)] << 32 - shift;
  return code & (BUCKETS - 1);
}

template <int N> __device__ inline void put(Code* to, const uint32_t (&code)[N]) {
  uint32_t word = 0;
#pragma unroll
  for (int u = 0; u < N; u++) word |= code[u] << 32 / EACH * u;
  if constexpr (N == 1) *to = word;
  else *(uint32_t*)to = word;
}

// N codes a store: those of a token in N hashes, with LANES lanes a token, or of N tokens in a hash.
template <int N, int LANES>
__device__ inline void store_by_token(const uint32_t* bits, int thread, int count, int now, Code* to,
                                      int64_t hashes) {
  constexpr int STEP = 32 * WARPS / LANES;
  const int h = thread % LANES * N;
  if (h >= now) return;
  to += thread / LANES * hashes + h;
  for (int token = thread / LANES; token < count; token += STEP, to += STEP * hashes) {
    if constexpr (BITS == 8 && N == 4) {
      *(uint32_t*)to = bits[word_at(token, h / 4)];
    } else {
      uint32_t code[N];
#pragma unroll
      for (int u = 0; u < N; u++) code[u] = code_of(bits, token, h + u);
      put(to, code);
    }
  }
}

template <int N>
__device__ inline void store_by_hash(const uint32_t* bits, int thread, int count, int now, Code* to,
                                     int64_t n) {
  if constexpr (BITS == 8 && N == 4) {  // four hashes of four tokens, byte by byte the other way round
    for (int i = thread; i < (now + 3) / 4 * (TOKENS / 4); i += 32 * WARPS) {
      const int h = i / (TOKENS / 4) * 4, token = i % (TOKENS / 4) * 4;
      if (token >= count) continue;
      uint32_t word[4], half[4];
#pragma unroll
      for (int u = 0; u < 4; u++) word[u] = bits[word_at(token + u, h / 4)];
#pragma unroll
      for (int u = 0; u < 4; u++)
        half[u] = __byte_perm(word[u & 2], word[u | 1], u % 2 ? 0x7362 : 0x5140);
      Code* at = to + h * n + token;
#pragma unroll
      for (int u = 0; u < 4; u++, at += n)
        if (h + u < now)
          *(uint32_t*)at = __byte_perm(half[u / 2], half[u / 2 + 2], u % 2 ? 0x7632 : 0x5410);
    }
  } else {
    for (int h = thread / 32; h < now; h += WARPS)
      for (int token = thread % 32 * N; token < count; token += 32 * N) {
        uint32_t code[N];
#pragma unroll
        for (int u = 0; u < N; u++) code[u] = code_of(bits, token + u, h);
        put(to + h * n + token, code);
      }
  }
}

// Bytes of this lane's word and that of the lane `by` further or before: chosen by `low` in the lane
// whose number has no `by` in it, by `high` in the other; 0 to 3 are the own bytes, 4 to 7 the other's.
__device__ inline uint32_t swap(uint32_t word, int by, uint32_t low, uint32_t high) {
  const uint32_t other = __shfl_xor_sync(~0u, word, by);
  return __byte_perm(word, other, threadIdx.x & by ? high : low);
}

// Eight channels of a row as words of bfloat16, piece by piece, with the opposite sign: the sign bit of
// a sum is then that of a code, and zero has none.
__device__ inline void load_pieces(const char* row, int channel, uint32_t (&piece)[PIECES][4]) {
  constexpr int LOADS = X == F32 ? 2 : 1;
  uint4 loaded[LOADS];
#pragma unroll
  for (int i = 0; i < LOADS; i++) {  // nobody reads them again soon: they are the first to leave the cache
    const uint4* from = (const uint4*)(row + channel * Bytes<X>::each) + i;
    loaded[i] = D % 32 == 0 || channel < D ? __ldcs(from) : make_uint4(0, 0, 0, 0);
  }
  const uint32_t* word = (const uint32_t*)loaded;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (X == BF16) {
      piece[0][i] = word[i] ^ 0x80008000;
    } else {
      float low, high;
      if constexpr (X == F16) unpack(word[i], low, high, F16);
      else low = __uint_as_float(word[2 * i]), high = __uint_as_float(word[2 * i + 1]);
#pragma unroll
      for (int p = 0; p < PIECES; p++) {
        piece[p][i] = pack(low, high, BF16);
        float a, b;
        unpack(piece[p][i], a, b, BF16);
        low -= a;
        high -= b;
        piece[p][i] ^= 0x80008000;
      }
    }
  }
}

struct Side {
  const char* x;  // rows at the given byte strides
  int64_t batch_bytes, head_bytes, row_bytes;
  Code *by_token, *by_hash;  // (BH, n, m) and (BH, m, n), or null
  int64_t n;
};

// planes (H, PLANES, m, BITS, channels padded to 32), and 31 more rows of any content, for words of bits
// are whole. One block TOKENS tokens of a head, the queries' first in the grid.
extern "C" __global__ void __launch_bounds__(32 * WARPS, PER_SM) hash_codes(
    const char* q, int64_t q_batch, int64_t q_head, int64_t q_row, Code* q_token, Code* q_hash,
    int64_t queries, const char* k, int64_t k_batch, int64_t k_head, int64_t k_row, Code* k_token,
    Code* k_hash, int64_t keys, const char* planes, int64_t batch_heads, int64_t heads,
    int64_t hashes) {
  __shared__ uint32_t bits[4 * QUARTER];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const uint32_t q_blocks = ((uint32_t)queries + TOKENS - 1) / TOKENS * (uint32_t)batch_heads;
  const bool key = blockIdx.x >= q_blocks;
  const Side side = key ? Side{k, k_batch, k_head, k_row, k_token, k_hash, keys}
                        : Side{q, q_batch, q_head, q_row, q_token, q_hash, queries};
  const uint32_t block = blockIdx.x - (key ? q_blocks : 0);
  const uint32_t blocks = ((uint32_t)side.n + TOKENS - 1) / TOKENS, bh = block / blocks;
  const int64_t from = (int64_t)(block % blocks) * TOKENS;
  const int count = (int)min((int64_t)TOKENS, side.n - from);
  const char* x = side.x + bh / (uint32_t)heads * side.batch_bytes +
                  bh % (uint32_t)heads * side.head_bytes + from * side.row_bytes;

  // A lane has channels 8 t to 8 t + 7 of every 32, of rows and of planes: any order of channels gives
  // the same product.
  uint32_t a[MT][2][GROUPS][PIECES][4];
#pragma unroll
  for (int i = 0; i < MT; i++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int c = 0; c < GROUPS; c++) {
        // Beyond the last token the last once more: nobody looks at its bits.
        const uint32_t token = min((warp * MT + i) * 16 + half * 8 + g, count - 1);
        load_pieces(x + (uint64_t)token * (uint32_t)side.row_bytes, c * 32 + t * 8, a[i][half][c]);
      }

  const int rows = (int)hashes * BITS;
  planes += bh % (uint32_t)heads * (int64_t)(PLANES * GROUPS * 64) * rows + t * 16 +
            (g / 2 * 8 + g % 2) * (GROUPS * 64);
  const int mine = word_at((warp * MT + t / 2) * 16 + t % 2 * 8 + g, 0);  // and 32 tokens further
#pragma unroll 1
  for (int h = 0; h < hashes; h += HASHES) {
    const int now = min(HASHES, (int)hashes - h);
    const char* plane = planes + (int64_t)h * (BITS * GROUPS * 64);
#pragma unroll 1
    for (int w = 0; w * 32 < now * BITS; w++, plane += 32 * GROUPS * 64) {
      uint32_t signs[4 * SETS] = {};  // of the tokens of rows g and g + 8 of each tile, two bits a tile
#pragma unroll
      for (int j = 3; j >= 0; j--) {
        // The planes of columns 2 t and 2 t + 1 are those of bits 8 t + 2 j and 8 t + 2 j + 1, so that a
        // lane finds a byte of each word. Beyond the last hash nobody looks at the bits.
        float sum[MT][4];
#pragma unroll
        for (int p = 0; p < PLANES; p++)
#pragma unroll
          for (int c = 0; c < GROUPS; c++) {
            const uint32_t row = p * rows + 2 * j;
            const uint4 b = __ldg((const uint4*)(plane + row * (GROUPS * 64) + c * 64));
#pragma unroll
            for (int i = 0; i < MT; i++)
#pragma unroll
              for (int u = 0; u < PIECES; u++) {
                const uint32_t(&low)[4] = a[i][0][c][u], (&high)[4] = a[i][1][c][u];
                const uint32_t a0[4] = {low[0], high[0], low[1], high[1]};
                const uint32_t a1[4] = {low[2], high[2], low[3], high[3]};
                multiply<BF16>(sum[i], a0, b.x, b.y, p == 0 && c == 0 && u == 0);
                multiply<BF16>(sum[i], a1, b.z, b.w);
              }
          }
#pragma unroll
        for (int i = 0; i < MT; i++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int e = 1; e >= 0; e--)
              signs[2 * i + half] =
                  __funnelshift_l(__float_as_uint(sum[i][2 * half + e]), signs[2 * i + half], 1);
      }
      // A lane has the byte t of up to four tokens' words; it gets all bytes of the word of token t.
#pragma unroll
      for (int i = 0; i < 4 * SETS; i += 4) {
        uint32_t word = signs[i] | signs[i + 1] << 8 | signs[i + 2] << 16 | signs[i + 3] << 24;
        word = swap(word, 1, 0x6240, 0x3715);
        word = swap(word, 2, 0x5410, 0x3276);
        if (t < 2 * MT) bits[mine + i / 4 * 8 * PITCH + w] = word;
      }
    }
    __syncthreads();
    const int thread = unknown(threadIdx.x);
    if (side.by_token) {
      Code* to = side.by_token + (bh * side.n + from) * hashes + h;
      constexpr int LANES = HASHES / EACH;
      if (hashes % EACH) store_by_token<1, HASHES>(bits, thread, count, now, to, hashes);
      else if (now > HASHES / 2) store_by_token<EACH, LANES>(bits, thread, count, now, to, hashes);
      else store_by_token<EACH, LANES / 2>(bits, thread, count, now, to, hashes);
    }
    if (side.by_hash) {
      Code* to = side.by_hash + (bh * hashes + h) * side.n + from;
      if (side.n % EACH == 0) store_by_hash<EACH>(bits, thread, count, now, to, side.n);
      else store_by_hash<1>(bits, thread, count, now, to, side.n);
    }
    __syncthreads();
  }
}
