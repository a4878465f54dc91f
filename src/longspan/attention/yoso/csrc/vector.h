// Vectors of W floats for the instruction set this file is compiled for, and the loads, stores and
// shuffles on them. GCC's and Clang's vector types do most; intrinsics only where they do not.
//
// Everything is static and no standard template is used: code compiled for one instruction set must
// not be merged with that of another.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// A register tile is ROWS × NV vectors: what the accumulators of a matrix product fit into.
#if defined(__AVX512BW__)
#define W 16
#define NV 4
#define ROWS 4
#elif defined(__AVX2__)
#define W 8
#define NV 2
#define ROWS 6
#else
#define W 4
#define NV 2
#define ROWS 4
#endif

#define UNROLL _Pragma("GCC unroll 32")

namespace longspan {
namespace LONGSPAN_ISA {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

typedef float vf __attribute__((vector_size(4 * W), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * W), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * W), may_alias));
typedef int16_t vs __attribute__((vector_size(4 * W), may_alias));  // 2 W lanes
typedef uint16_t vh __attribute__((vector_size(2 * W), may_alias));  // W lanes
typedef float vf_any __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int16_t vs_any __attribute__((vector_size(4 * W), aligned(2), may_alias));
typedef uint16_t vh_any __attribute__((vector_size(2 * W), aligned(2), may_alias));

static const int PAD = 16;  // rows of floats are padded to multiples of this
static inline int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }
template <class A>
static inline A least(A a, A b) {
    return a < b ? a : b;
}

// x − 0 is x, so this costs no addition.
static inline vf splat(float x) { return x - vf{}; }
static inline vs splat16(int16_t x) { return x - vs{}; }

static inline vf load(const float* p) { return *(const vf_any*)p; }
static inline vf load(const bf16* p) {
    return (vf)(__builtin_convertvector(*(const vh_any*)p, vu) << 16);
}
static inline vf load(const f16* p) {
    vu h = __builtin_convertvector(*(const vh_any*)p, vu);
    vu magnitude = (h & 0x7fff) << 13;
    vu special = (vu)(magnitude >= (0x7c00u << 13)) & 0x7f800000;  // infinity and NaN
    vf value = (vf)magnitude * 0x1p112f;                           // the exponents' biases differ
    return (vf)((vu)value | special | (h & 0x8000) << 16);
}

static inline void store(float* p, vf x) { *(vf_any*)p = x; }
static inline void store(bf16* p, vf x) {
    vu b = (vu)x;
    vu even = (b + 0x7fff + (b >> 16 & 1)) >> 16;
    vu nan = (vu)((b & 0x7fffffff) > 0x7f800000);
    *(vh_any*)p = __builtin_convertvector((nan & 0x7fc0) | (~nan & even), vh);
}
static inline void store(f16* p, vf x) {
    vu b = (vu)x, sign = b >> 16 & 0x8000, m = b & 0x7fffffff;
    vu normal = (m - (112u << 23) + 0xfff + (m >> 13 & 1)) >> 13;
    vu small = (vu)((vf)m + 0.5f) - 0x3f000000;  // the addition rounds to 2^−24
    vu is_small = (vu)(m < 0x38800000u), is_large = (vu)(m >= 0x477ff000u);
    vu large = 0x7c00 | ((vu)(m > 0x7f800000u) & 0x200);
    vu h = (is_small & small) | (is_large & large) | (~is_small & ~is_large & normal);
    *(vh_any*)p = __builtin_convertvector(h | sign, vh);
}

template <class T>
static inline vf load_part(const T* p, int count) {  // zeros after the first `count`
    T part[W];
    memset(part, 0, sizeof part);
    for (int i = 0; i < count; i++) part[i] = p[i];
    return load(part);
}
template <class T>
static inline void store_part(T* p, vf x, int count) {
    T part[W];
    store(part, x);
    for (int i = 0; i < count; i++) p[i] = part[i];
}

// Rows of any type to padded rows of floats, and back.
template <class T>
static inline void widen(const T* x, float* out, int64_t channels) {
    int64_t c = 0;
    for (; c + W <= channels; c += W) store(out + c, load(x + c));
    if (c < channels) {
        store(out + c, load_part(x + c, (int)(channels - c)));
        c += W;
    }
    for (; c < padded(channels); c += W) store(out + c, vf{});
}
template <class T>
static inline void narrow(const float* x, T* out, int64_t channels) {
    int64_t c = 0;
    for (; c + W <= channels; c += W) store(out + c, load(x + c));
    if (c < channels) store_part(out + c, load(x + c), (int)(channels - c));
}

// Shuffles by rules on lane numbers.
template <int... L>
struct Lanes {};
template <int N, int... L>
struct Count : Count<N - 1, N - 1, L...> {};
template <int... L>
struct Count<0, L...> {
    typedef Lanes<L...> lanes;
};
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(index, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(index, a, b, ...) __builtin_shuffle(a, b, index{__VA_ARGS__})
#endif

// Of two vectors in runs of B lanes: add the runs of each by pairs, and take turns.
template <int B, int... L>
static inline vf fold(vf a, vf b, Lanes<L...>) {
    return SHUFFLE(vi, a, b, ((L / B) % 2 ? L - B + W : L)...) +
           SHUFFLE(vi, a, b, ((L / B) % 2 ? L + W : L + B)...);
}
// Lane i of the result is the sum of the lanes of x[i].
static inline vf sum_each(vf* x) {
    typedef Count<W>::lanes lanes;
#if W == 16
    UNROLL for (int i = 0; i < 8; i++) x[i] = fold<8>(x[i], x[i + 8], lanes());
#endif
#if W >= 8
    UNROLL for (int i = 0; i < 4; i++) x[i] = fold<4>(x[i], x[i + 4], lanes());
#endif
    UNROLL for (int i = 0; i < 2; i++) x[i] = fold<2>(x[i], x[i + 2], lanes());
    return fold<1>(x[0], x[1], lanes());
}
static inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}
static inline float dot(const float* x, const float* y, int64_t channels) {  // of padded rows
    vf total = {};
    for (int64_t c = 0; c < padded(channels); c += W) total += load(x + c) * load(y + c);
    return sum(total);
}

// Lanes of a and b taking turns: from the lower halves, from the upper ones.
template <int... L>
static inline vs zip_low(vs a, vs b, Lanes<L...>) {
    return SHUFFLE(vs, a, b, (L / 2 + (L % 2) * 2 * W)...);
}
template <int... L>
static inline vs zip_high(vs a, vs b, Lanes<L...>) {
    return SHUFFLE(vs, a, b, (L / 2 + W + (L % 2) * 2 * W)...);
}
// Transpose 2W rows of 2W integers: zipping row i with row i + W, log₂(2W) times.
static inline void transpose(const int16_t* x, int64_t stride, int16_t* out) {
    typedef Count<2 * W>::lanes lanes;
    vs a[2 * W], b[2 * W];
    for (int i = 0; i < 2 * W; i++) a[i] = *(const vs_any*)(x + i * stride);
    for (int step = 1; step < 2 * W; step *= 2) {
        for (int i = 0; i < W; i++) {
            b[2 * i] = zip_low(a[i], a[i + W], lanes());
            b[2 * i + 1] = zip_high(a[i], a[i + W], lanes());
        }
        memcpy(a, b, sizeof a);
    }
    memcpy(out, a, sizeof a);
}

// (x · y + 2^14) >> 15, rounded to nearest.
static inline vs multiply_high(vs x, vs y) {
#if defined(__AVX512BW__)
    return (vs)_mm512_mulhrs_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
    return (vs)_mm256_mulhrs_epi16((__m256i)x, (__m256i)y);
#elif defined(__ARM_NEON)
    return (vs)vqrdmulhq_s16((int16x8_t)x, (int16x8_t)y);
#else
    vs r;
    for (int i = 0; i < 2 * W; i++) r[i] = (int16_t)((x[i] * y[i] + (1 << 14)) >> 15);
    return r;
#endif
}

static inline vf root(vf x) {
#if defined(__AVX512BW__)
    return (vf)_mm512_maskz_sqrt_ps(0xffff, (__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#else
    for (int i = 0; i < W; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

static inline uint32_t positive(vf x) {  // one bit a lane
#if defined(__AVX512BW__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_GT_OQ);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps(
        _mm256_cmp_ps((__m256)x, _mm256_setzero_ps(), _CMP_GT_OQ));
#else
    uint32_t bits = 0;
    for (int i = 0; i < W; i++) bits |= (uint32_t)(x[i] > 0) << i;
    return bits;
#endif
}

static inline vf pick(vi condition, vf yes, vf no) {
    return (vf)((condition & (vi)yes) | (~condition & (vi)no));
}

}  // namespace LONGSPAN_ISA
}  // namespace longspan
