// Codes: hash_codes, hadamard_codes, compact_codes.
#pragma once
#include "random.h"

namespace longspan {
namespace LONGSPAN_ISA {

// hash_codes: signs of projections

static const int64_t BLOCK = 96;  // tokens hashed at a time, a multiple of ROWS

// A run of tokens of a head to hash: all runs of a head follow each other, queries and keys.
struct Run {
    const Rows* x;
    void* codes;
    int64_t b, h, first, count, tokens;
};

static inline int64_t runs_of_head(const Hashed& a, int64_t block) {
    return a.batch * ((a.queries + block - 1) / block + (a.keys + block - 1) / block);
}

static inline Run run_of(const Hashed& a, int64_t block, int64_t item) {
    int64_t of_q = (a.queries + block - 1) / block, of_k = (a.keys + block - 1) / block;
    int64_t of_head = a.batch * (of_q + of_k), i = item % of_head % (of_q + of_k);
    bool is_q = i < of_q;
    Run r = {is_q ? &a.q : &a.k, is_q ? a.q_codes : a.k_codes, item % of_head / (of_q + of_k),
             item / of_head, (is_q ? i : i - of_q) * block, 0, is_q ? a.queries : a.keys};
    r.count = least(block, r.tokens - r.first);
    return r;
}

// Where the codes of a hash begin.
static inline int64_t place(const Hashed& a, const Run& r, int64_t hash) {
    return ((r.b * a.heads + r.h) * a.hashes + hash) * r.tokens + r.first;
}

static void store_codes(void* codes, int64_t at, const uint32_t* x, int64_t count, int64_t bits) {
    if (bits <= 8)
        for (int64_t t = 0; t < count; t++) ((uint8_t*)codes)[at + t] = (uint8_t)x[t];
    else
        for (int64_t t = 0; t < count; t++) ((uint16_t*)codes)[at + t] = (uint16_t)x[t];
}

// One bit a column and token: 8 columns to a byte, octets[column / 8][token].
template <int R>
static inline void sign_tile(
    const float* x, int64_t ld, const float* panel, int64_t channels, uint8_t* octets
) {
    vf acc[R][NV] = {};
    product<R, NV>(
        acc, channels, [&](int r, int64_t d) { return x[r * ld + d]; },
        [&](int64_t d) { return panel + d * NV * W; });
    UNROLL for (int r = 0; r < R; r++) {
#if W == 4
        octets[r] = (uint8_t)(positive(acc[r][0]) | positive(acc[r][1]) << 4);
#else
        UNROLL for (int i = 0; i < NV; i++) {
            uint32_t bits = positive(acc[r][i]);
            UNROLL for (int o = 0; o < W / 8; o++)
                octets[(i * W / 8 + o) * BLOCK + r] = (uint8_t)(bits >> 8 * o);
        }
#endif
    }
}

static int hash_codes(const HashCodes* args) {
    const Hashed& a = args->x;
    const int64_t panel_columns = NV * W, columns = a.hashes * a.bits;
    const int64_t panels = (columns + panel_columns - 1) / panel_columns;
    const int64_t panel_size = a.channels * panel_columns, ld = padded(a.channels);
    const int64_t octet_bytes = (panels * panel_columns / 8 + 2) * BLOCK;
    const int64_t of_head = runs_of_head(a, BLOCK);
    auto carve = [&](Arena arena, float*& packed, float*& x, uint8_t*& octets) {
        packed = arena.take<float>(panels * panel_size);
        x = arena.take<float>(BLOCK * ld);
        octets = arena.take<uint8_t>(octet_bytes);
        return arena.size;
    };
    float *packed, *x;
    uint8_t* octets;
    size_t bytes = carve(Arena{nullptr, 0}, packed, x, octets);
    return parallel(a.heads * of_head, a.workers, bytes, [&](int64_t item, char* s, int64_t last) {
        float *packed, *x;
        uint8_t* octets;
        carve(Arena{s, 0}, packed, x, octets);
        Run run = run_of(a, BLOCK, item);
        if (last < 0 || last / of_head != run.h) {
            memset(packed, 0, sizeof(float) * (size_t)(panels * panel_size));
            memset(octets, 0, (size_t)octet_bytes);
            const float* plane = args->planes + run.h * columns * a.channels;
            for (int64_t c = 0; c < columns; c++) {
                float* out = packed + c / panel_columns * panel_size + c % panel_columns;
                for (int64_t d = 0; d < a.channels; d++) out[d * panel_columns] = *plane++;
            }
        }
        for (int64_t t = 0; t < run.count; t++)
            widen_row(*run.x, run.b, run.h, run.first + t, x + t * ld, a.channels);
        for (int64_t p = 0; p < panels; p++) {
            const float* panel = packed + p * panel_size;
            uint8_t* o = octets + p * panel_columns / 8 * BLOCK;
            int64_t t = 0;
            for (; t + ROWS <= run.count; t += ROWS)
                sign_tile<ROWS>(x + t * ld, ld, panel, a.channels, o + t);
            for (; t < run.count; t++) sign_tile<1>(x + t * ld, ld, panel, a.channels, o + t);
        }
        for (int64_t m = 0; m < a.hashes; m++) {
            const uint8_t* o = octets + m * a.bits / 8 * BLOCK;
            if (a.bits == 8) {
                memcpy((uint8_t*)run.codes + place(a, run, m), o, (size_t)run.count);
                continue;
            }
            uint32_t code[BLOCK], shift = m * a.bits % 8, mask = (1u << a.bits) - 1;
            for (int64_t t = 0; t < BLOCK; t++) {
                uint32_t word = o[t] | (uint32_t)o[BLOCK + t] << 8 | (uint32_t)o[2 * BLOCK + t] << 16;
                code[t] = word >> shift & mask;
            }
            store_codes(run.codes, place(a, run, m), code, run.count, a.bits);
        }
    });
}

// hadamard_codes: 2W tokens at a time, channel by channel, in 16-bit integers

static const int LANES = 2 * W;

template <int RADIX>
static inline void butterfly(vs* x) {
    UNROLL for (int step = 1; step < RADIX; step *= 2)
        UNROLL for (int i = 0; i < RADIX; i++)
            if (!(i & step)) {
                vs low = x[i], high = x[i + step];
                x[i] = low + high;
                x[i + step] = low - high;
            }
}

// The stages of strides stride … stride·RADIX/2, of change(x[i], i).
template <int RADIX, class Change>
static inline void stages(const vs* in, vs* out, int width, int stride, Change change) {
    for (int base = 0; base < width; base += RADIX * stride)
        for (int i = base; i < base + stride; i++) {
            vs x[RADIX];
            UNROLL for (int r = 0; r < RADIX; r++) {
                int at = i + r * stride;
                x[r] = change(in[at], at);
            }
            butterfly<RADIX>(x);
            UNROLL for (int r = 0; r < RADIX; r++) out[i + r * stride] = x[r];
        }
}

// out = H · change(in), unnormalised, width a power of two.
template <class Change>
static inline void hadamard(const vs* in, vs* out, int width, Change change) {
    auto same = [](vs x, int) { return x; };
    int stride = 1;
    switch (width) {
        case 1: out[0] = change(in[0], 0); return;
        case 2: stages<2>(in, out, width, 1, change); return;
        case 4: stages<4>(in, out, width, 1, change); return;
    }
    stages<8>(in, out, width, 1, change);
    for (stride = 8; stride * 8 <= width; stride *= 8) stages<8>(out, out, width, stride, same);
    if (stride * 4 == width) stages<4>(out, out, width, stride, same);
    if (stride * 2 == width) stages<2>(out, out, width, stride, same);
}

// Unit rows times `length`, rounded; then channel by channel.
static void quantise(const Run& run, int64_t channels, float length, int64_t ld, float* wide,
                     int16_t* rows, vs* out) {
    typedef int16_t narrow_any __attribute__((vector_size(2 * W), aligned(2), may_alias));
    typedef int16_t narrow_t __attribute__((vector_size(2 * W)));
    memset(rows, 0, sizeof(int16_t) * (size_t)(LANES * ld));
    for (int64_t t = 0; t < run.count; t++) {
        widen_row(*run.x, run.b, run.h, run.first + t, wide, channels);
        vf factor = splat(length * inverse_root(dot(wide, wide, channels)));
        for (int64_t c = 0; c < padded(channels); c += W) {
            vf y = load(wide + c) * factor;
            // NaN and infinity, which have no direction, become zero.
            y = pick(y * y <= length * length * 1.01f, y, vf{});
            y += pick(y > 0, splat(0.5f), splat(-0.5f));
            *(narrow_any*)(rows + t * ld + c) =
                __builtin_convertvector(__builtin_convertvector(y, vi), narrow_t);
        }
    }
    for (int64_t c = 0; c < ld; c += LANES) transpose(rows + c, ld, (int16_t*)(out + c));
}

// The signs of a head: ±1 for the first transform, ±`scale` for the second and third.
static void draw_signs(uint64_t seed, int64_t first, int64_t count, int64_t width, int16_t scale,
                       int16_t* out) {
    for (int64_t i = 0; i < count; i += W / 2) {
        vul place = {};
        for (int j = 0; j < W / 2; j++) place[j] = (uint64_t)(first + i + j);
        vul bits = random_bits(seed, place);
        for (int64_t j = i; j < least(count, i + W / 2); j++) {
            int16_t size = j / width % 3 ? scale : 1;
            out[j] = bits[j - i] & 1 ? size : (int16_t)-size;
        }
    }
}

static int hadamard_codes(const HadamardCodes* args) {
    const Hashed& a = args->x;
    const int width = (int)args->width;
    const int64_t ld = width < LANES ? LANES : width;
    const int64_t groups = (a.hashes + width - 1) / width, coins = groups * a.bits * 3 * width;
    const int64_t of_head = runs_of_head(a, LANES);
    // A product of a unit vector with H is at most √width long in any channel; three roundings of
    // at most half a unit a channel must not take it past 16 bits.
    const float root_width = sqrtf((float)width);
    const float length = 32767 / root_width - 1.5f * root_width - 2;
    const int16_t unscale = (int16_t)(32768 / root_width + 0.5f);
    auto carve = [&](Arena arena, vs** v, float*& wide, int16_t*& rows, int16_t*& signs) {
        for (int i = 0; i < 4; i++) v[i] = arena.take<vs>(ld);
        wide = arena.take<float>(ld);
        rows = arena.take<int16_t>(LANES * ld);
        signs = arena.take<int16_t>(coins);
        return arena.size;
    };
    vs* v[4];
    float* wide;
    int16_t *rows, *signs;
    size_t bytes = carve(Arena{nullptr, 0}, v, wide, rows, signs);
    return parallel(a.heads * of_head, a.workers, bytes, [&](int64_t item, char* s, int64_t last) {
        vs* v[4];
        float* wide;
        int16_t *rows, *signs;
        carve(Arena{s, 0}, v, wide, rows, signs);
        vs *x = v[0], *y = v[1], *z = v[2], *code = v[3];
        Run run = run_of(a, LANES, item);
        if (last < 0 || last / of_head != run.h)
            draw_signs((uint64_t)args->seed, run.h * coins, coins, width, unscale, signs);
        quantise(run, a.channels, length, ld, wide, rows, x);
        for (int64_t group = 0; group < groups; group++) {
            int64_t used = least((int64_t)width, a.hashes - group * width);
            int rows_used = 1;
            while (rows_used < used) rows_used *= 2;
            memset(code, 0, sizeof(vs) * (size_t)used);
            for (int64_t t = 0; t < a.bits; t++) {
                const int16_t* sign = signs + (group * a.bits + t) * 3 * width;
                hadamard(x, y, width, [&](vs u, int i) { return u * splat16(sign[i]); });
                hadamard(y, y, width, [&](vs u, int i) {
                    return multiply_high(u, splat16(sign[width + i]));
                });
                // The first rows of H repeat themselves: add up what they treat alike.
                for (int i = 0; i < rows_used; i++) {
                    vs total = {};
                    for (int j = i; j < width; j += rows_used)
                        total += multiply_high(y[j], splat16(sign[2 * width + j]));
                    z[i] = total;
                }
                hadamard(z, z, rows_used, [](vs u, int) { return u; });
                vs bit = splat16((int16_t)(1u << t));
                for (int64_t i = 0; i < used; i++) code[i] |= (vs)(z[i] > 0) & bit;
            }
            for (int64_t i = 0; i < used; i++) {
                typedef uint8_t bytes_t __attribute__((vector_size(2 * W)));
                bytes_t octets = __builtin_convertvector(code[i], bytes_t);
                int64_t at = place(a, run, group * width + i);
                if (a.bits > 8)
                    memcpy((uint16_t*)run.codes + at, &code[i], 2 * (size_t)run.count);
                else if (run.count == LANES)
                    memcpy((uint8_t*)run.codes + at, &octets, LANES);
                else
                    memcpy((uint8_t*)run.codes + at, &octets, (size_t)run.count);
            }
        }
    });
}

// compact_codes: no more buckets than keys, and one

template <class C>
static int compact(const CompactCodes* a) {
    const C none = (C)-1;
    const int64_t buckets = (int64_t)1 << a->bits, keys = a->keys;
    if (check_codes(a->q_codes, a->groups * a->queries, buckets, sizeof(C) == 2) ||
        check_codes(a->k_codes, a->groups * keys, buckets, sizeof(C) == 2))
        return BAD_CODE;
    size_t bytes = sizeof(C) * (size_t)(buckets + keys);
    return parallel(a->groups, a->workers, bytes, [&](int64_t group, char* s, int64_t last) {
        C *number = (C*)s, *seen = number + buckets;
        C *q = (C*)a->q_codes + group * a->queries, *k = (C*)a->k_codes + group * keys;
        if (last < 0) memset(number, 0xff, sizeof(C) * (size_t)buckets);
        int64_t count = 0;
        for (int64_t j = 0; j < keys; j++) {
            C code = k[j];
            if (number[code] == none) {
                number[code] = (C)count;
                seen[count++] = code;
            }
            k[j] = number[code];
        }
        for (int64_t i = 0; i < a->queries; i++)
            q[i] = number[q[i]] == none ? (C)keys : number[q[i]];
        for (int64_t j = 0; j < count; j++) number[seen[j]] = none;  // not all of a large table
    });
}

static int compact_codes(const CompactCodes* a) {
    return a->bits <= 8 ? compact<uint8_t>(a) : compact<uint16_t>(a);
}

}  // namespace LONGSPAN_ISA
}  // namespace longspan
