// The verbs of YOSO on a CPU, behind plain C. kernels.cpp is compiled once for every instruction
// set; dispatch.cpp chooses among them when it is first asked.
//
// Shapes: x (B, H, N, D), any strides but channels in a row; codes (B, H, m, N), 8 bits wide for up
// to 8 hash bits, else 16; masks (B, N), nonzero = attend. Padded rows have a multiple of 16 floats.
#pragma once
#include <stdint.h>

namespace longspan {

enum Type { F32, BF16, F16 };
enum Status { OK, NO_MEMORY, BAD_CODE };

struct Rows {
    const void* data;
    int64_t type;
    int64_t batch, head, token;  // strides, in elements
};

// Queries and keys to hash, and where their codes go.
struct Hashed {
    Rows q, k;
    void *q_codes, *k_codes;
    int64_t batch, heads, queries, keys, channels, hashes, bits, workers;
};

// Σ_t 2^t [x · plane_t > 0], planes (H, m, τ, D).
struct HashCodes {
    Hashed x;
    const float* planes;
};

// The same for rows of H·D₃·H·D₂·H·D₁ with signs drawn from the seed as (H, groups, τ, 3, width),
// worked in 16-bit integers.
struct HadamardCodes {
    Hashed x;
    int64_t seed, width;
};

// Renumber codes in place, equal ones alike: those of keys from 0, all that no key has as `keys`.
struct CompactCodes {
    void *q_codes, *k_codes;
    int64_t groups, queries, keys, bits, workers;
};

// y_i = scale · Σ_h Σ_j [same bucket] x_j, then unit rows where `inverse` (1/norm) is wanted.
// total (B, H, N, padded D) holds the sums; it may be y where y is that wide and float32.
struct Collide {
    Rows x;
    const void* from_codes;
    const uint8_t* from_mask;
    const void* to_codes;
    const uint8_t* to_mask;
    float* total;
    void* y;
    int64_t y_type;
    float* inverse;
    float scale;
    int64_t batch, heads, from_tokens, to_tokens, channels, hashes, buckets, wide, workers;
};

// out = scale · (g − y (y · g)) · inverse, rows padded to float32; scale · g without `inverse`.
struct ThroughUnit {
    Rows g, y;
    const float* inverse;
    float* out;
    float scale;
    int64_t batch, heads, tokens, channels, workers;
};

// dq_i = scale Σ_h Σ_j [same bucket] w_ij (g_i · v_j) k_j and dk_j likewise, for unit q and k, then
// through their normalisation. w = 1, or the slope of p^τ by the cosine where `slope` is true;
// then crowded buckets are sampled, by `seed`.
// g (B, H, Nq, padded Dv) float32. `parts` (B, H, num_parts, Nq + Nk, padded D) holds the sums of
// runs of hashes where num_parts > 1.
struct PairGradients {
    Rows q, k, v;
    const float* g;
    const uint8_t* key_mask;
    const void *q_codes, *k_codes;
    void *dq, *dk;
    float* parts;
    float scale;
    int64_t batch, heads, queries, keys, channels, value_channels;
    int64_t hashes, used_hashes, bits, buckets, wide, slope, num_parts, seed, workers;
};

struct Kernels {
    const char* name;
    void (*gaussian)(int64_t seed, int64_t count, float* out, int64_t workers);
    int (*hash_codes)(const HashCodes*);
    int (*hadamard_codes)(const HadamardCodes*);
    int (*compact_codes)(const CompactCodes*);
    int (*collide)(const Collide*);
    int (*through_unit)(const ThroughUnit*);
    int (*pair_gradients)(const PairGradients*);
};

// torch's own thread pool (`torch_parallel_for` of its stable C interface), or null: one thread.
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain,
                               void (*body)(int64_t, int64_t, void*), void* context);
extern ParallelFor parallel_for;

}  // namespace longspan
