// Chooses the instruction set and exports the verbs.
#include "yoso.h"

#include <string.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace longspan {

ParallelFor parallel_for = nullptr;

namespace plain {
extern const Kernels kernels;
}
#ifdef __x86_64__
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

static const Kernels* best() {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return &avx512::kernels;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2::kernels;
#endif
    return &plain::kernels;
}

static const Kernels* chosen = nullptr;  // every thread would write the same

static const Kernels* found_kernels() {
    const Kernels* found = __atomic_load_n(&chosen, __ATOMIC_ACQUIRE);
    if (!found) {
        found = best();
        __atomic_store_n(&chosen, found, __ATOMIC_RELEASE);
    }
    return found;
}

}  // namespace longspan

using namespace longspan;

EXPORT void longspan_set_parallel_for(ParallelFor function) { parallel_for = function; }

EXPORT const char* longspan_instructions() { return found_kernels()->name; }

// For tests: run on a lesser instruction set. Returns 0 where this machine has not got it.
EXPORT int longspan_choose(const char* name) {
    const Kernels* most = best();
    const Kernels* found = nullptr;
    if (!strcmp(name, "plain")) found = &plain::kernels;
#ifdef __x86_64__
    if (!strcmp(name, "avx2") && most != &plain::kernels) found = &avx2::kernels;
#endif
    if (!strcmp(name, most->name)) found = most;
    if (found) __atomic_store_n(&chosen, found, __ATOMIC_RELEASE);
    return found != nullptr;
}

EXPORT void longspan_gaussian(int64_t seed, int64_t count, float* out, int64_t workers) {
    found_kernels()->gaussian(seed, count, out, workers);
}
EXPORT int longspan_hash_codes(const HashCodes* a) { return found_kernels()->hash_codes(a); }
EXPORT int longspan_hadamard_codes(const HadamardCodes* a) { return found_kernels()->hadamard_codes(a); }
EXPORT int longspan_compact_codes(const CompactCodes* a) { return found_kernels()->compact_codes(a); }
EXPORT int longspan_collide(const Collide* a) { return found_kernels()->collide(a); }
EXPORT int longspan_through_unit(const ThroughUnit* a) { return found_kernels()->through_unit(a); }
EXPORT int longspan_pair_gradients(const PairGradients* a) { return found_kernels()->pair_gradients(a); }
