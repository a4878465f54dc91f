// Random numbers as a function of (seed, place): those of longspan.attention.random, bit for bit.
#pragma once
#include "work.h"

namespace longspan {
namespace LONGSPAN_ISA {

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

}  // namespace LONGSPAN_ISA
}  // namespace longspan
