// YOSO's verbs for one instruction set. Threads own whole rows of the result: no atomics, and sums
// are added in one order, so every number of threads gives the same bits.
#include "vector.h"
#include "yoso.h"

#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace longspan {
namespace LONGSPAN_ISA {

// ---- Threads

template <class F>
struct Job {
    F* item;
    int64_t items, next;
    size_t bytes;
    int status;
};

static char* allocate(size_t bytes) {
    const size_t huge = 2 << 20, unit = bytes > 2 * huge ? huge : 64;
    char* p = (char*)aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
#ifdef MADV_HUGEPAGE
    // Rows in any order touch more small pages than a core remembers: a fifth of the time.
    if (p && unit == huge) madvise(p, bytes / unit * unit, MADV_HUGEPAGE);
#endif
    return p;
}

template <class F>
static void work(int64_t, int64_t, void* context) {
    Job<F>* job = (Job<F>*)context;
    if (__atomic_load_n(&job->next, __ATOMIC_RELAXED) >= job->items) return;
    char* scratch = nullptr;
    if (job->bytes) scratch = allocate(job->bytes);
    if (job->bytes && !scratch) {
        __atomic_store_n(&job->status, NO_MEMORY, __ATOMIC_RELAXED);
        return;
    }
    int64_t last = -1;  // items of a head follow each other, so that what it prepares is used again
    for (;;) {
        int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->items) break;
        (*job->item)(i, scratch, last);
        last = i;
    }
    free(scratch);
}

// Call item(i, scratch, the worker's item before or −1) for every i, by whichever worker is free.
template <class F>
static int parallel(int64_t items, int64_t workers, size_t bytes, F item) {
    Job<F> job = {&item, items, 0, bytes, OK};
    workers = least(workers, items);
    if (workers > 1 && parallel_for) {
        if (parallel_for(0, workers, 1, work<F>, &job)) return NO_MEMORY;
    } else {
        work<F>(0, 1, &job);
    }
    return job.status;
}

// Parts of a worker's scratch memory; the sanitizer sees the gaps between them.
struct Arena {
    char* start;
    size_t size;
    template <class T>
    T* take(int64_t count) {
        char* p = (char*)((uintptr_t)start + size);
        size_t used = (size_t)count * sizeof(T), room = (used + 63) / 64 * 64;
#ifdef __SANITIZE_ADDRESS__
        room += 64;
        if (start) __asan_poison_memory_region(p + used, room - used);
#endif
        size += room;
        return (T*)p;
    }
};

template <class T>
static inline const T* row(const Rows& x, int64_t b, int64_t h, int64_t n) {
    return (const T*)x.data + b * x.batch + h * x.head + n * x.token;
}

static void widen_row(const Rows& x, int64_t b, int64_t h, int64_t n, float* out, int64_t channels) {
    switch (x.type) {
        case F32: widen(row<float>(x, b, h, n), out, channels); break;
        case BF16: widen(row<bf16>(x, b, h, n), out, channels); break;
        default: widen(row<f16>(x, b, h, n), out, channels);
    }
}

static void narrow_row(const float* x, void* out, int64_t type, int64_t n, int64_t channels) {
    switch (type) {
        case F32: narrow(x, (float*)out + n * channels, channels); break;
        case BF16: narrow(x, (bf16*)out + n * channels, channels); break;
        default: narrow(x, (f16*)out + n * channels, channels);
    }
}

// 1/√x, and 0 for 0: a zero row stays zero and passes no gradient.
static inline float inverse_root(float x) { return x == 0 ? 0 : 1 / sqrtf(x); }

static inline void scale_row(float* x, float factor, int64_t channels) {
    for (int64_t c = 0; c < padded(channels); c += W) store(x + c, load(x + c) * factor);
}

static int check_codes(const void* codes, int64_t count, int64_t buckets, int64_t wide) {
    uint32_t most = 0;
    if (wide) {
        const uint16_t* c = (const uint16_t*)codes;
        for (int64_t i = 0; i < count; i++) most = c[i] > most ? c[i] : most;
    } else {
        const uint8_t* c = (const uint8_t*)codes;
        uint8_t top = 0;
        for (int64_t i = 0; i < count; i++) top = c[i] > top ? c[i] : top;
        most = top;
    }
    return (int64_t)most < buckets ? OK : BAD_CODE;
}

// ---- A register tile of a matrix product

// acc[r] += Σ_j scalar(r, j) · source(j), for R rows of V vectors.
template <int R, int V, class Scalar, class Source>
static inline void product(vf (*acc)[V], int64_t count, Scalar scalar, Source source) {
    for (int64_t j = 0; j < count; j++) {
        const float* s = source(j);
        vf x[V];
        UNROLL for (int i = 0; i < V; i++) x[i] = load(s + i * W);
        UNROLL for (int r = 0; r < R; r++) {
            vf factor = splat(scalar(r, j));
            UNROLL for (int i = 0; i < V; i++) acc[r][i] += factor * x[i];
        }
    }
}

template <int R, int V, class Out, class Scalar, class Source>
static inline void tile(Out out, int64_t count, Scalar scalar, Source source) {
    vf acc[R][V] = {};
    product<R, V>(acc, count, scalar, source);
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int i = 0; i < V; i++)
        store(out(r) + i * W, load(out(r) + i * W) + acc[r][i]);
}

template <int V, class Out, class Scalar, class Source>
static inline void tile_rows(int64_t rows, Out out, int64_t count, Scalar scalar, Source source) {
    int64_t r0 = 0;
    auto some_out = [&](int r) { return out(r0 + r); };
    auto some_scalar = [&](int r, int64_t j) { return scalar(r0 + r, j); };
    for (; r0 + ROWS <= rows; r0 += ROWS) tile<ROWS, V>(some_out, count, some_scalar, source);
    switch (rows - r0) {
#if ROWS == 6
        case 5: tile<5, V>(some_out, count, some_scalar, source); break;
        case 4: tile<4, V>(some_out, count, some_scalar, source); break;
#endif
        case 3: tile<3, V>(some_out, count, some_scalar, source); break;
        case 2: tile<2, V>(some_out, count, some_scalar, source); break;
        case 1: tile<1, V>(some_out, count, some_scalar, source); break;
    }
}

// out(r)[c] += Σ_j scalar(r, j) · source(j)[c] for c below `width`, a multiple of 16.
template <class Out, class Scalar, class Source>
static inline void add_product(
    int64_t rows, int64_t width, Out out, int64_t count, Scalar scalar, Source source
) {
    for (int64_t c = 0; c < width; c += NV * W) {
        auto out_c = [&](int64_t r) { return out(r) + c; };
        auto source_c = [&](int64_t j) { return source(j) + c; };
#if NV * W > 16
        switch ((width - c) / W) {
            case 1: tile_rows<1>(rows, out_c, count, scalar, source_c); continue;
            case 2: tile_rows<2>(rows, out_c, count, scalar, source_c); continue;
            case 3: tile_rows<3>(rows, out_c, count, scalar, source_c); continue;
        }
#endif
        tile_rows<NV>(rows, out_c, count, scalar, source_c);
    }
}

// ---- Random numbers: longspan.attention.random, number for number

typedef double vd __attribute__((vector_size(4 * W), may_alias));
typedef int64_t vl __attribute__((vector_size(4 * W), may_alias));
typedef uint64_t vul __attribute__((vector_size(4 * W), may_alias));

static inline vul mix(vul x) {
    const uint64_t low = 0xffffffff;
    x = ((x ^ x >> 16) * 0x7feb352d) & low;
    x = ((x ^ x >> 15) * 0x846ca68b) & low;
    return x ^ x >> 16;
}

static inline vul random_bits(uint64_t seed, vul place) {
    vul x = mix(mix(place) ^ (seed & 0xffffffff));
    return mix(x ^ (seed >> 32));
}

// Integers below 2^52 as doubles: the lower bits of 2^52 + x.
static inline vd as_double(vul x) { return (vd)(x | 0x4330000000000000) - 0x1p52; }
static inline vd pick(vl condition, vd yes, vd no) {
    return (vd)((condition & (vl)yes) | (~condition & (vl)no));
}

static inline vd logarithm(vd x) {  // of positive normal numbers
    vul bits = (vul)x;
    vd mantissa = (vd)((bits & 0xfffffffffffff) | 0x3ff0000000000000);
    vd exponent = as_double(bits >> 52) - 1023;
    vl large = mantissa > 1.4142135623730951;
    mantissa = pick(large, mantissa * 0.5, mantissa);
    exponent = pick(large, exponent + 1, exponent);
    // log m = 2 artanh((m − 1)/(m + 1)), whose argument is below 0.172: 0.172²² is 2^−56.
    vd f = (mantissa - 1) / (mantissa + 1), s = f * f, p = 1.0 / 23 - vd{};
    UNROLL for (int k = 21; k > 0; k -= 2) p = p * s + 1.0 / k;
    return exponent * 0.6931471805599453 + 2 * f * p;
}

// cos and sin of 2π x / 2^32, for x from 1 to 2^32.
static inline void turn(vul x, vd& cosine, vd& sine) {
    vul quarter = (x + (1u << 29)) >> 30;
    vd angle = (as_double(x) - as_double(quarter) * 0x1p30) * 1.4629180792671596e-09;
    vd s = angle * angle, c = vd{}, d = vd{};
    const double terms[] = {1. / 380, 1. / 306, 1. / 240, 1. / 182, 1. / 132,
                            1. / 90,  1. / 56,  1. / 30,  1. / 12,  1. / 2};
    const double odd_terms[] = {1. / 342, 1. / 272, 1. / 210, 1. / 156, 1. / 110,
                                1. / 72,  1. / 42,  1. / 20,  1. / 6};
    UNROLL for (int i = 0; i < 10; i++) c = (1 - c) * s * terms[i];
    UNROLL for (int i = 0; i < 9; i++) d = (1 - d) * s * odd_terms[i];
    vd near_cosine = 1 - c, near_sine = angle * (1 - d);
    vl odd = (vl)(0 - (quarter & 1));
    vul flip_cosine = ((quarter + 1) >> 1 & 1) << 63, flip_sine = (quarter >> 1 & 1) << 63;
    cosine = (vd)((vul)pick(odd, near_sine, near_cosine) ^ flip_cosine);
    sine = (vd)((vul)pick(odd, near_cosine, near_sine) ^ flip_sine);
}

// Numbers first to first + W/2 of the two halves, rounded as in `projections`: to float32, then bf16.
static void gaussian_lanes(uint64_t seed, int64_t half, int64_t first, float* low, float* high) {
    vul place = {};
    for (int i = 0; i < W / 2; i++) place[i] = (uint64_t)(first + i);
    vul u = random_bits(seed, place) + 1, w = random_bits(seed, place + (uint64_t)half) + 1;
    vd radius = -2 * logarithm(as_double(u) * 0x1p-32), cosine, sine;
    for (int i = 0; i < W / 2; i++) radius[i] = sqrt(radius[i]);
    turn(w, cosine, sine);
    cosine *= radius;
    sine *= radius;
    vf both;
    for (int i = 0; i < W / 2; i++) both[i] = (float)cosine[i], both[i + W / 2] = (float)sine[i];
    bf16 rounded[W];
    store(rounded, both);
    both = load(rounded);
    for (int i = 0; i < W / 2; i++) low[i] = both[i], high[i] = both[i + W / 2];
}

static void gaussian(int64_t seed, int64_t count, float* out, int64_t workers) {
    const int64_t block = 4096, half = (count + 1) / 2;
    parallel((half + block - 1) / block, workers, 0, [&](int64_t item, char*, int64_t) {
        int64_t end = least(half, (item + 1) * block);
        for (int64_t i = item * block; i < end; i += W / 2) {
            float low[W / 2], high[W / 2];
            gaussian_lanes((uint64_t)seed, half, i, low, high);
            for (int64_t j = i; j < least(end, i + W / 2); j++) {
                out[j] = low[j - i];
                if (half + j < count) out[half + j] = high[j - i];
            }
        }
    });
}

// ---- hash_codes: signs of projections

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

// ---- hadamard_codes: 2W tokens at a time, channel by channel, in 16-bit integers

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

// ---- compact_codes: no more buckets than keys, and one

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

// ---- collide: bucket_sum and bucket_gather, some hashes and channels at a time

static const int64_t TABLE_BYTES = 256 << 10;  // what stays in a core's own cache
static const int MAX_TABLES = 8;

// A slice of at most 64 channels, in vectors.
template <class T, int V>
static inline void load_slice(const T* x, int64_t channels, vf* out) {
    if (channels >= V * W) {
        UNROLL for (int i = 0; i < V; i++) out[i] = load(x + i * W);
        return;
    }
    for (int i = 0; i < V; i++) {
        int64_t left = channels - i * W;
        out[i] = left <= 0 ? vf{} : load_part(x + i * W, (int)least(left, (int64_t)W));
    }
}

template <class T, class C, int V>
static void bucket_sum(const Collide* a, int64_t b, int64_t h, int64_t slice, const C* const* codes,
                       int tables, float* table) {
    const int64_t size = a->buckets * V * W, channels = a->channels - slice;
    memset(table, 0, sizeof(float) * (size_t)(tables * size));
    const uint8_t* mask = a->from_mask ? a->from_mask + b * a->from_tokens : nullptr;
    const T* x = row<T>(a->x, b, h, 0) + slice;
    for (int64_t j = 0; j < a->from_tokens; j++, x += a->x.token) {
        if (mask && !mask[j]) continue;
        vf value[V];
        load_slice<T, V>(x, channels, value);
        float* t = table;
        for (int g = 0; g < tables; g++, t += size) {
            float* at = t + codes[g][j] * (int64_t)(V * W);
            UNROLL for (int i = 0; i < V; i++) store(at + i * W, load(at + i * W) + value[i]);
        }
    }
}

template <class C, int V>
static void bucket_gather(const Collide* a, const C* const* codes, int tables, const float* table,
                          float* total, int64_t ld, bool first) {
    const int64_t size = a->buckets * V * W;
    for (int64_t j = 0; j < a->to_tokens; j++, total += ld) {
        vf value[V];
        UNROLL for (int i = 0; i < V; i++) value[i] = first ? vf{} : load(total + i * W);
        const float* t = table;
        for (int g = 0; g < tables; g++, t += size) {
            const float* at = t + codes[g][j] * (int64_t)(V * W);
            UNROLL for (int i = 0; i < V; i++) value[i] += load(at + i * W);
        }
        UNROLL for (int i = 0; i < V; i++) store(total + i * W, value[i]);
    }
}

template <class T, class C, int V>
static void collide_slice(const Collide* a, int64_t b, int64_t h, int64_t slice, int tables,
                          float* table) {
    const int64_t group = b * a->heads + h, ld = padded(a->channels);
    float* total = a->total + group * a->to_tokens * ld + slice;
    for (int64_t m = 0; m < a->hashes; m += tables) {
        const C *from[MAX_TABLES], *to[MAX_TABLES];
        int some = (int)least((int64_t)tables, a->hashes - m);
        for (int g = 0; g < some; g++) {
            from[g] = (const C*)a->from_codes + (group * a->hashes + m + g) * a->from_tokens;
            to[g] = (const C*)a->to_codes + (group * a->hashes + m + g) * a->to_tokens;
        }
        bucket_sum<T, C, V>(a, b, h, slice, from, some, table);
        bucket_gather<C, V>(a, to, some, table, total, ld, m == 0);
    }
}

template <class T, class C>
static void collide_columns(const Collide* a, int64_t b, int64_t h, int64_t slice, int64_t columns,
                            int tables, float* table) {
    switch (columns / 16) {
        case 1: collide_slice<T, C, 16 / W>(a, b, h, slice, tables, table); break;
        case 2: collide_slice<T, C, 32 / W>(a, b, h, slice, tables, table); break;
        case 3: collide_slice<T, C, 48 / W>(a, b, h, slice, tables, table); break;
        default: collide_slice<T, C, 64 / W>(a, b, h, slice, tables, table);
    }
}

template <class C>
static void collide_item(const Collide* a, int64_t b, int64_t h, int64_t slice, int64_t columns,
                         int tables, float* table) {
    switch (a->x.type) {
        case F32: collide_columns<float, C>(a, b, h, slice, columns, tables, table); break;
        case BF16: collide_columns<bf16, C>(a, b, h, slice, columns, tables, table); break;
        default: collide_columns<f16, C>(a, b, h, slice, columns, tables, table);
    }
}

static void finish_total(const Collide* a, int64_t group, int64_t first, int64_t end) {
    const int64_t ld = padded(a->channels);
    const uint8_t* mask = a->to_mask ? a->to_mask + group / a->heads * a->to_tokens : nullptr;
    for (int64_t i = first; i < end; i++) {
        int64_t n = group * a->to_tokens + i;
        float *x = a->total + n * ld, factor = a->scale;
        if (a->inverse) {
            float inverse = inverse_root(factor * factor * dot(x, x, a->channels));
            a->inverse[n] = inverse;
            factor *= inverse;
        }
        if (mask && !mask[i])
            memset(x, 0, sizeof(float) * (size_t)ld);
        else
            scale_row(x, factor, a->channels);
        if ((void*)a->total != a->y) narrow_row(x, a->y, a->y_type, n, a->channels);
    }
}

static int collide(const Collide* a) {
    const int64_t groups = a->batch * a->heads, width = padded(a->channels), block = 256;
    if (check_codes(a->from_codes, groups * a->hashes * a->from_tokens, a->buckets, a->wide) ||
        check_codes(a->to_codes, groups * a->hashes * a->to_tokens, a->buckets, a->wide))
        return BAD_CODE;
    // Narrow slices where a table would not fit, or where heads alone would leave workers idle.
    int64_t columns = 64;
    while (columns > 16 && (a->buckets * columns * 4 > TABLE_BYTES ||
                            groups * ((width + columns - 1) / columns) < a->workers))
        columns /= 2;
    const int64_t slices = (width + columns - 1) / columns;
    int tables = (int)least(a->hashes, TABLE_BYTES / (a->buckets * columns * 4));
    tables = tables < 1 ? 1 : tables > MAX_TABLES ? MAX_TABLES : tables;
    const size_t bytes = sizeof(float) * (size_t)(tables * a->buckets * columns);
    int status = parallel(groups * slices, a->workers, bytes, [&](int64_t item, char* s, int64_t) {
        int64_t group = item / slices, slice = item % slices * columns;
        int64_t b = group / a->heads, h = group % a->heads, some = least(columns, width - slice);
        if (a->wide)
            collide_item<uint16_t>(a, b, h, slice, some, tables, (float*)s);
        else
            collide_item<uint8_t>(a, b, h, slice, some, tables, (float*)s);
        if (slices == 1) finish_total(a, group, 0, a->to_tokens);
    });
    if (status || slices == 1) return status;
    const int64_t blocks = (a->to_tokens + block - 1) / block;
    return parallel(groups * blocks, a->workers, 0, [&](int64_t item, char*, int64_t) {
        int64_t first = item % blocks * block;
        finish_total(a, item / blocks, first, least(first + block, a->to_tokens));
    });
}

static int through_unit(const ThroughUnit* a) {
    const int64_t ld = padded(a->channels), block = 256;
    const int64_t blocks = (a->tokens + block - 1) / block, groups = a->batch * a->heads;
    return parallel(groups * blocks, a->workers, sizeof(float) * (size_t)ld,
        [&](int64_t item, char* s, int64_t) {
            int64_t group = item / blocks, b = group / a->heads, h = group % a->heads;
            int64_t first = item % blocks * block, end = least(first + block, a->tokens);
            float* y = (float*)s;
            for (int64_t i = first; i < end; i++) {
                float *out = a->out + (group * a->tokens + i) * ld, factor = a->scale;
                widen_row(a->g, b, h, i, out, a->channels);
                if (a->inverse) {
                    widen_row(a->y, b, h, i, y, a->channels);
                    vf along = splat(dot(y, out, a->channels));
                    for (int64_t c = 0; c < ld; c += W)
                        store(out + c, load(out + c) - along * load(y + c));
                    factor *= a->inverse[group * a->tokens + i];
                }
                scale_row(out, factor, a->channels);
            }
        });
}

// ---- pair_gradients: bucket by bucket, by pairs or, where it is crowded, by sums of outer products

static const int64_t SIDE = 64;  // rows of either side of a block of pairs
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

// scores[i][j] = w_ij (g_i · v_j). Tiles reach into the next bucket; nobody reads what they find.
static inline void pair_scores(const Head& a, const int32_t* q, int64_t nq, const int32_t* k,
                               int64_t nk) {
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
            if (a.slope) score *= slope(dots(x, y, a.width), (float)a.bits);
            float lanes[W];
            store(lanes, score);
            UNROLL for (int r = 0; r < TILE_Q; r++)
                memcpy(a.scores + (i + r) * SIDE + j, lanes + r * TILE_K, TILE_K * sizeof(float));
        }
}

static inline void by_pairs(const Head& a, const int32_t* q, int64_t nq, const int32_t* k,
                            int64_t nk) {
    const int64_t ld = a.ld, width = a.width;
    const float* s = a.scores;
    for (int64_t j0 = 0; j0 < nk; j0 += SIDE)
        for (int64_t i0 = 0; i0 < nq; i0 += SIDE) {
            const int32_t *iq = q + i0, *ik = k + j0;
            int64_t rows = least(SIDE, nq - i0), columns = least(SIDE, nk - j0);
            pair_scores(a, iq, rows, ik, columns);
            add_product(
                rows, width, [&](int64_t r) { return a.sum(a.q, iq[r]); }, columns,
                [&](int64_t r, int64_t j) { return s[r * SIDE + j]; },
                [&](int64_t j) { return a.k.rows + ik[j] * ld; });
            add_product(
                columns, width, [&](int64_t r) { return a.sum(a.k, ik[r]); }, rows,
                [&](int64_t r, int64_t i) { return s[i * SIDE + r]; },
                [&](int64_t i) { return a.q.rows + iq[i] * ld; });
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
                     const uint8_t* mask) {
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
            by_pairs(head, iq, nq, ik, nk);
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
            if (a->wide)
                one_hash(a, head, (const uint16_t*)a->q_codes + at * a->queries,
                         (const uint16_t*)a->k_codes + at * a->keys, mask);
            else
                one_hash(a, head, (const uint8_t*)a->q_codes + at * a->queries,
                         (const uint8_t*)a->k_codes + at * a->keys, mask);
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

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)
extern const Kernels kernels;
const Kernels kernels = {
    NAME(LONGSPAN_ISA), gaussian,     hash_codes,     hadamard_codes,
    compact_codes,      collide,      through_unit,   pair_gradients,
};

}  // namespace LONGSPAN_ISA
}  // namespace longspan
