// pair_gradients: bucket by bucket, by pairs or, where it is crowded, by sums of outer products, or by
// some of the pairs where the weight of a pair allows no such sum.
#pragma once
#include "work.h"

namespace longspan {
namespace LONGSPAN_ISA {

static const int64_t SIDE = 64;  // rows of either side of a block of pairs
static const int64_t SOME = 2;   // blocks that a block of a crowded bucket meets, of the other side
#if W == 16
enum { TILE_Q = 4, TILE_K = 4 };
#elif W == 8
enum { TILE_Q = 2, TILE_K = 4 };
#else
enum { TILE_Q = 2, TILE_K = 2 };
#endif

// Queries or keys of a head: rows [unit vector | gradient or value | sum], which lie together
// because hashes visit them in any order.
struct Side {
    float* rows;
    int32_t *order, *first;  // tokens by bucket, and the first of each bucket
    int64_t tokens;
};

struct Head {
    Side q, k;
    float *scores, *table;
    int64_t width, value_width, ld, bits, slope;
    float* sum(const Side& side, int64_t i) const { return side.rows + i * ld + width + value_width; }
};

// The derivative of p^τ by the cosine, divided by p^τ: τ / (p π √(1 − x²)), as in the reference.
static inline vf slope(vf x, float bits) {
    const float floor = 4 * 1.1920929e-7f, pi = 3.14159265f;
    vf square = 1 - x * x, size = pick(x < 0, -x, x);
    size = pick(size > 1, splat(1), size);
    // arccos |x| / √(1 − |x|), fitted to 2·10⁻⁸.
    const float fit[] = {-0.00121173777f, 0.00649152143f, -0.0168410524f, 0.0307221224f,
                         -0.0501143031f,  0.0889688532f,  -0.214598156f,  1.5707963f};
    vf angle = {};
    UNROLL for (int i = 0; i < 8; i++) angle = angle * size + fit[i];
    angle *= root(1 - size);
    vf p = pick(x < 0, angle * (1 / pi), 1 - angle * (1 / pi));
    p = pick(p < floor, splat(floor), p);
    square = pick(square < floor, splat(floor), square);
    return bits / (pi * p * root(square));
}

// Dot products of a tile of rows, `width` floats each: lane i · TILE_K + j is that of q_i and k_j.
static inline vf dots(const float* const* q, const float* const* k, int64_t width) {
    vf acc[W] = {};
    for (int64_t c = 0; c < width; c += W) {
        vf x[TILE_K];
        UNROLL for (int j = 0; j < TILE_K; j++) x[j] = load(k[j] + c);
        UNROLL for (int i = 0; i < TILE_Q; i++) {
            vf y = load(q[i] + c);
            UNROLL for (int j = 0; j < TILE_K; j++) acc[i * TILE_K + j] += y * x[j];
        }
    }
    return sum_each(acc);
}

// scores[i][j] = weight w_ij (g_i · v_j). Tiles reach into the next bucket; nobody reads what they find.
static inline void pair_scores(const Head& a, const int32_t* q, int64_t nq, const int32_t* k,
                               int64_t nk, float weight) {
    for (int64_t i = 0; i < nq; i += TILE_Q)
        for (int64_t j = 0; j < nk; j += TILE_K) {
            const float *x[TILE_Q], *y[TILE_K], *gx[TILE_Q], *vy[TILE_K];
            UNROLL for (int r = 0; r < TILE_Q; r++) {
                x[r] = a.q.rows + q[i + r] * a.ld;
                gx[r] = x[r] + a.width;
            }
            UNROLL for (int r = 0; r < TILE_K; r++) {
                y[r] = a.k.rows + k[j + r] * a.ld;
                vy[r] = y[r] + a.width;
            }
            vf score = dots(gx, vy, a.value_width);
            if (a.slope) score *= slope(dots(x, y, a.width), (float)a.bits) * weight;
            float lanes[W];
            store(lanes, score);
            UNROLL for (int r = 0; r < TILE_Q; r++)
                memcpy(a.scores + (i + r) * SIDE + j, lanes + r * TILE_K, TILE_K * sizeof(float));
        }
}

// Block i of the queries and block j of the keys of a bucket.
static inline void pair_block(const Head& a, const int32_t* q, int64_t nq, int64_t i, const int32_t* k,
                              int64_t nk, int64_t j, float weight) {
    const int64_t ld = a.ld, width = a.width;
    const float* s = a.scores;
    const int32_t *iq = q + i * SIDE, *ik = k + j * SIDE;
    const int64_t rows = least(SIDE, nq - i * SIDE), columns = least(SIDE, nk - j * SIDE);
    pair_scores(a, iq, rows, ik, columns, weight);
    add_product(
        rows, width, [&](int64_t r) { return a.sum(a.q, iq[r]); }, columns,
        [&](int64_t r, int64_t c) { return s[r * SIDE + c]; },
        [&](int64_t c) { return a.k.rows + ik[c] * ld; });
    add_product(
        columns, width, [&](int64_t r) { return a.sum(a.k, ik[r]); }, rows,
        [&](int64_t r, int64_t c) { return s[c * SIDE + r]; },
        [&](int64_t c) { return a.q.rows + iq[c] * ld; });
}

static inline uint32_t mixed(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352d;
    x = (x ^ x >> 15) * 0x846ca68b;
    return x ^ x >> 16;
}

// All pairs of a bucket; or, of a crowded one with slopes, SOME blocks of the shorter side for each
// of the longer, drawn afresh, each as likely as any other, which stand for all: linear.
static inline void by_pairs(const Head& a, const int32_t* q, int64_t nq, const int32_t* k, int64_t nk,
                            uint32_t random) {
    const int64_t blocks_q = (nq + SIDE - 1) / SIDE, blocks_k = (nk + SIDE - 1) / SIDE;
    const bool by_query = blocks_q >= blocks_k;
    const int64_t longer = by_query ? blocks_q : blocks_k, shorter = by_query ? blocks_k : blocks_q;
    const int64_t each = a.slope ? least(SOME, shorter) : shorter;
    const float weight = (float)shorter / (float)each;
    for (int64_t i = 0; i < longer; i++) {
        const int64_t start = each < shorter ? mixed(random ^ mixed((uint32_t)i)) % shorter : 0;
        for (int64_t c = 0; c < each; c++) {
            const int64_t j = (start + c) % shorter;
            pair_block(a, q, nq, by_query ? i : j, k, nk, by_query ? j : i, weight);
        }
    }
}

// table = Σ_j (value_j) (unit_j)ᵀ over one side of a bucket, then sums_i += table of the values of i
// on the other side: linear, however crowded the bucket.
static inline void outer_sums(const Head& a, const Side& from, const int32_t* f, int64_t nf,
                              const Side& to, const int32_t* t, int64_t nt) {
    const int64_t ld = a.ld, width = a.width, values = a.value_width, some = 32;
    memset(a.table, 0, sizeof(float) * (size_t)(values * width));
    for (int64_t j0 = 0; j0 < nf; j0 += some) {
        const int32_t* at = f + j0;
        add_product(
            values, width, [&](int64_t r) { return a.table + r * width; }, least(some, nf - j0),
            [&](int64_t r, int64_t j) { return from.rows[at[j] * ld + width + r]; },
            [&](int64_t j) { return from.rows + at[j] * ld; });
    }
    add_product(
        nt, width, [&](int64_t r) { return a.sum(to, t[r]); }, values,
        [&](int64_t r, int64_t v) { return to.rows[t[r] * ld + width + v]; },
        [&](int64_t v) { return a.table + v * width; });
}

// Tokens in the order of their buckets, the masked left out.
template <class C>
static void sort(const C* codes, const uint8_t* mask, int64_t buckets, Side& side) {
    int32_t* first = side.first;
    memset(first, 0, sizeof(int32_t) * (size_t)(buckets + 2));
    for (int64_t i = 0; i < side.tokens; i++) first[codes[i] + 2] += !mask || mask[i];
    for (int64_t b = 2; b < buckets + 2; b++) first[b] += first[b - 1];
    for (int64_t i = 0; i < side.tokens; i++)
        if (!mask || mask[i]) side.order[first[codes[i] + 1]++] = (int32_t)i;
    for (int64_t i = 0; i < PAD; i++) side.order[first[buckets] + i] = 0;
}

// Ask for the rows of a bucket while the one before it is worked on, into the second-level cache.
static inline void fetch(const Side& side, int64_t bucket, int64_t ld) {
    int64_t first = side.first[bucket], end = least(first + 2 * SIDE, (int64_t)side.first[bucket + 1]);
    for (int64_t i = first; i < end; i++)
        for (int64_t c = 0; c < ld; c += 64 / (int64_t)sizeof(float))
            __builtin_prefetch(side.rows + side.order[i] * ld + c, 0, 2);
}

template <class C>
static void one_hash(const PairGradients* a, Head& head, const C* cq, const C* ck,
                     const uint8_t* mask, uint32_t random) {
    Side &q = head.q, &k = head.k;
    sort(cq, nullptr, a->buckets, q);
    sort(ck, mask, a->buckets, k);
    for (int64_t b = 0; b < a->buckets; b++) {
        int64_t nq = q.first[b + 1] - q.first[b], nk = k.first[b + 1] - k.first[b];
        if (b + 1 < a->buckets) {
            fetch(q, b + 1, head.ld);
            fetch(k, b + 1, head.ld);
        }
        if (!nq || !nk) continue;
        const int32_t *iq = q.order + q.first[b], *ik = k.order + k.first[b];
        int64_t pair_cost = nq * nk * (2 * head.width + head.value_width);
        int64_t table_cost = 2 * (nq + nk) * head.width * head.value_width;
        if (head.slope || pair_cost <= table_cost) {
            by_pairs(head, iq, nq, ik, nk, mixed(random ^ (uint32_t)b));
        } else {
            outer_sums(head, k, ik, nk, q, iq, nq);
            outer_sums(head, q, iq, nq, k, ik, nk);
        }
    }
}

static void unit_row(const Rows& x, int64_t b, int64_t h, int64_t n, float* out, int64_t channels) {
    widen_row(x, b, h, n, out, channels);
    scale_row(out, inverse_root(dot(out, out, channels)), channels);
}

// The gradient of x from `scale` times that of unit(x).
static void finish_gradient(const Rows& x, int64_t b, int64_t h, int64_t n, float* sums, float scale,
                            float* scratch, void* out, int64_t at, int64_t channels) {
    widen_row(x, b, h, n, scratch, channels);
    float inverse = inverse_root(dot(scratch, scratch, channels));
    float along = dot(scratch, sums, channels) * inverse * inverse;
    for (int64_t c = 0; c < padded(channels); c += W)
        store(sums + c, (load(sums + c) - along * load(scratch + c)) * (inverse * scale));
    narrow_row(sums, out, x.type, at, channels);
}

// Row i of the queries and then the keys of a head.
static void finish_pair_row(const PairGradients* a, int64_t b, int64_t h, int64_t i, float* sums,
                            float* scratch) {
    const int64_t group = b * a->heads + h, j = i - a->queries;
    if (j < 0) {
        int64_t at = group * a->queries + i;
        finish_gradient(a->q, b, h, i, sums, a->scale, scratch, a->dq, at, a->channels);
        return;
    }
    int64_t at = group * a->keys + j;
    if (a->key_mask && !a->key_mask[b * a->keys + j]) {
        memset(sums, 0, sizeof(float) * (size_t)padded(a->channels));
        narrow_row(sums, a->dk, a->k.type, at, a->channels);
        return;
    }
    finish_gradient(a->k, b, h, j, sums, a->scale, scratch, a->dk, at, a->channels);
}

static int pair_gradients(const PairGradients* a) {
    const int64_t groups = a->batch * a->heads, rows = a->queries + a->keys;
    const int64_t width = padded(a->channels), value_width = padded(a->value_channels);
    if (check_codes(a->q_codes, groups * a->hashes * a->queries, a->buckets, a->wide) ||
        check_codes(a->k_codes, groups * a->hashes * a->keys, a->buckets, a->wide))
        return BAD_CODE;
    auto carve = [&](Arena arena, Head& head, float*& scratch) {
        head.width = width, head.value_width = value_width, head.ld = 2 * width + value_width;
        head.bits = a->bits, head.slope = a->slope;
        head.q.rows = arena.take<float>(rows * head.ld);
        head.k.rows = head.q.rows + a->queries * head.ld;
        head.q.order = arena.take<int32_t>(a->queries + PAD);
        head.k.order = arena.take<int32_t>(a->keys + PAD);
        head.q.first = arena.take<int32_t>(a->buckets + 2);
        head.k.first = arena.take<int32_t>(a->buckets + 2);
        head.scores = arena.take<float>(SIDE * SIDE);
        head.table = arena.take<float>(width * value_width);
        scratch = arena.take<float>(width);
        head.q.tokens = a->queries, head.k.tokens = a->keys;
        return arena.size;
    };
    Head head;
    float* scratch;
    size_t bytes = carve(Arena{nullptr, 0}, head, scratch);
    const int64_t parts = a->num_parts;
    int status = parallel(groups * parts, a->workers, bytes, [&](int64_t item, char* s, int64_t) {
        Head head;
        float* scratch;
        carve(Arena{s, 0}, head, scratch);
        int64_t group = item / parts, part = item % parts, b = group / a->heads, h = group % a->heads;
        memset(head.q.rows, 0, sizeof(float) * (size_t)(rows * head.ld));
        const uint8_t* mask = a->key_mask ? a->key_mask + b * a->keys : nullptr;
        for (int64_t i = 0; i < a->queries; i++) {
            float* x = head.q.rows + i * head.ld;
            unit_row(a->q, b, h, i, x, a->channels);
            memcpy(x + width, a->g + (group * a->queries + i) * value_width,
                   sizeof(float) * (size_t)value_width);
        }
        for (int64_t j = 0; j < a->keys; j++) {
            float* x = head.k.rows + j * head.ld;
            if (mask && !mask[j]) continue;
            unit_row(a->k, b, h, j, x, a->channels);
            widen_row(a->v, b, h, j, x + width, a->value_channels);
        }
        int64_t end = a->used_hashes * (part + 1) / parts;
        for (int64_t m = a->used_hashes * part / parts; m < end; m++) {
            int64_t at = group * a->hashes + m;
            const uint32_t random = mixed(mixed((uint32_t)a->seed ^ (uint32_t)at) ^ a->seed >> 32);
            if (a->wide)
                one_hash(a, head, (const uint16_t*)a->q_codes + at * a->queries,
                         (const uint16_t*)a->k_codes + at * a->keys, mask, random);
            else
                one_hash(a, head, (const uint8_t*)a->q_codes + at * a->queries,
                         (const uint8_t*)a->k_codes + at * a->keys, mask, random);
        }
        for (int64_t i = 0; i < rows; i++) {
            if (parts == 1)
                finish_pair_row(a, b, h, i, head.sum(head.q, i), scratch);
            else
                memcpy(a->parts + (item * rows + i) * width, head.sum(head.q, i),
                       sizeof(float) * (size_t)width);
        }
    });
    if (status || parts == 1) return status;
    const int64_t block = 256, blocks = (rows + block - 1) / block;
    bytes = sizeof(float) * (size_t)width;
    return parallel(groups * blocks, a->workers, bytes, [&](int64_t item, char* s, int64_t) {
        int64_t group = item / blocks, end = least((item % blocks + 1) * block, rows);
        for (int64_t i = item % blocks * block; i < end; i++) {
            float* total = a->parts + (group * parts * rows + i) * width;
            for (int64_t part = 1; part < parts; part++)
                for (int64_t c = 0; c < width; c += W)
                    store(total + c, load(total + c) + load(total + part * rows * width + c));
            finish_pair_row(a, group / a->heads, group % a->heads, i, total, (float*)s);
        }
    });
}

}  // namespace LONGSPAN_ISA
}  // namespace longspan
