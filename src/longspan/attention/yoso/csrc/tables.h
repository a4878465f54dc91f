// Sums over buckets and back to tokens: bucket_sum, bucket_gather, collide; through_unit.
#pragma once
#include "work.h"

namespace longspan {
namespace LONGSPAN_ISA {

// collide: bucket_sum and bucket_gather, some hashes and channels at a time

static const int64_t TABLE_BYTES = 256 << 10;  // what stays in a core's own cache
static const int64_t FAR_BYTES = 16 << 20;     // rows of a head that no longer do
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
    // Narrow slices where a table would not fit, where heads alone would leave workers idle, and where
    // rows come from memory each time: twice the tables then fit, and rows come half as often.
    const bool far = (a->from_tokens + a->to_tokens) * width * 4 > FAR_BYTES;
    int64_t columns = far ? 32 : 64;
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

}  // namespace LONGSPAN_ISA
}  // namespace longspan
