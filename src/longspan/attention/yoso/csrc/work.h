// Workers and their scratch memory, rows of any type, and the register tile of a matrix product.
#pragma once
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

}  // namespace LONGSPAN_ISA
}  // namespace longspan
