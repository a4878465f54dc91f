// YOSO's verbs for one instruction set. Threads own whole rows of the result: no atomics, and sums
// are added in one order, so every number of threads gives the same bits.
#include "gradients.h"
#include "hashing.h"
#include "tables.h"

namespace longspan {
namespace LONGSPAN_ISA {

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)
extern const Kernels kernels;
const Kernels kernels = {
    NAME(LONGSPAN_ISA), gaussian,     hash_codes,     hadamard_codes,
    compact_codes,      collide,      through_unit,   pair_gradients,
};

}  // namespace LONGSPAN_ISA
}  // namespace longspan
