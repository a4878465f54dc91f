// CUDA C++ on a CPU, for tests: takes the place of ptx.cuh, and of what NVRTC knows by itself.
//
// The threads of a block are contexts that one thread of the CPU runs in turn, until each meets the others of
// its warp or block; blocks run one after the other. Which thread and block is first, and whether copies to
// shared memory arrive at once or as late as they may, is the schedule's: results must not depend on it.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __CUDA_ARCH__ 900

struct Dimension {
  unsigned x;
};
static Dimension threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int STACK = 1 << 17;

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
};
struct Thread {
  ucontext_t start;
  jmp_buf at;
  bool begun, done;
  std::vector<std::vector<Copy>> copies;  // groups of them, the last one still open
};
struct Meeting {
  unsigned arrived, generation, alive;
};

static std::vector<Thread> threads;
static std::vector<char> stacks;
static std::vector<Meeting> warps;
static Meeting block;
static jmp_buf scheduler;
static unsigned now, progress;
static void (*body)(void**);
static void** arguments;

// In which order threads and blocks run: 0 by number, all as far as the next meeting of any, 1 the other way
// round, else drawn from it, and then a warp runs as far as it can alone; and whether copies arrive at once.
extern "C" {
uint32_t schedule[2];
}

// Who runs as the i-th of `count`, in a round: numbers i, i + step, i + 2 step … where the step has no part
// in common with the count.
inline unsigned turn_of(unsigned i, unsigned count, uint32_t round) {
  const uint32_t order = schedule[0];
  if (order < 2) return order ? count - 1 - i : i;
  const uint32_t drawn = (order * 0x9e3779b9u + round) * 0x85ebca6bu ^ (order + round) >> 3;
  unsigned step = drawn % count;
  while (std::gcd(step, count) != 1) step++;
  return ((drawn >> 16) + (uint64_t)i * step) % count;
}

inline void stop(const char* why) {
  fprintf(stderr, "emulator: %s\n", why);
  abort();
}

inline void pause() {
  if (!_setjmp(threads[now].at)) _longjmp(scheduler, 1);
}

// Wait until all that have not ended are here.
inline void meet(Meeting& m) {
  const unsigned mine = m.generation;
  m.arrived++;
  while (m.generation == mine) {
    if (m.arrived == m.alive) m.arrived = 0, m.generation++, progress++;
    else pause();
  }
}
inline void meet_warp() { meet(warps[now / 32]); }

inline void run() {
  body(arguments);
  threads[now].done = true;
  warps[now / 32].alive--, block.alive--, progress++;
  _longjmp(scheduler, 1);
}

// Let a thread run until it waits, or ends.
inline void go_on(unsigned thread) {
  now = threadIdx.x = thread;
  Thread& t = threads[thread];
  if (t.done || _setjmp(scheduler)) return;
  if (t.begun) _longjmp(t.at, 1);
  t.begun = true;
  t.copies.resize(1);
  getcontext(&t.start);
  t.start.uc_stack.ss_sp = &stacks[(size_t)thread * STACK];
  t.start.uc_stack.ss_size = STACK;
  t.start.uc_link = nullptr;
  makecontext(&t.start, run, 0);
  setcontext(&t.start);
}

inline void launch(unsigned grid, unsigned count, void (*kernel)(void**), void** values) {
  body = kernel, arguments = values;
  gridDim.x = grid, blockDim.x = count;
  stacks.resize((size_t)count * STACK);
  for (unsigned b = 0; b < grid; b++) {
    blockIdx.x = turn_of(b, grid, 0);
    threads.clear();
    threads.resize(count);
    block = {0, 0, count};
    warps.clear();
    for (unsigned i = 0; i < count; i += 32) warps.push_back({0, 0, std::min(32u, count - i)});
    uint32_t round = blockIdx.x;
    for (unsigned before = ~0u; block.alive; round++) {
      if (progress == before) stop("threads wait for each other");
      before = progress;
      for (unsigned w = 0; w < warps.size(); w++) {
        const unsigned first = 32 * turn_of(w, warps.size(), round), lanes = std::min(32u, count - first);
        unsigned here;
        do {
          here = progress;
          for (unsigned i = 0; i < lanes; i++) go_on(first + turn_of(i, lanes, round));
        } while (schedule[0] && progress != here);
      }
    }
  }
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** values, std::index_sequence<I...>) {
  kernel(*(A*)values[I]...);
}

static unsigned char words[32][32][16];  // that lanes show each other, by warp

// What `read` makes of the words of all lanes.
template <class T, class Read> auto show(const T& word, const Read& read) {
  static_assert(sizeof(T) <= 16);
  auto& mine = words[now / 32];
  memcpy(mine[now % 32], &word, sizeof(T));
  meet_warp();
  const auto result = read([&mine](int lane) {
    T x;
    memcpy(&x, mine[lane & 31], sizeof(T));
    return x;
  });
  meet_warp();
  return result;
}

static char anchor;  // addresses in shared memory are counted from here
inline char* shared(uint32_t at) { return &anchor + (int32_t)at; }

inline uint16_t round_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint16_t bits(_Float16 x) {
  uint16_t r;
  memcpy(&r, &x, 2);
  return r;
}
inline _Float16 half(uint32_t x) {
  const uint16_t low = (uint16_t)x;
  _Float16 r;
  memcpy(&r, &low, 2);
  return r;
}

}  // namespace emulator

#define LAUNCH(NAME)                                                                           \
  extern "C" void launch_##NAME(unsigned grid, unsigned block, void** values) {                \
    emulator::launch(grid, block, [](void** v) {                                               \
      auto with = [v]<class... A>(void (*kernel)(A...)) {                                      \
        emulator::call(kernel, v, std::index_sequence_for<A...>());                            \
      };                                                                                       \
      with(NAME);                                                                              \
    }, values);                                                                                \
  }

// What NVRTC knows by itself.

template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return y < x ? y : x;
}
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) {
  const std::common_type_t<A, B> x = a, y = b;
  return x < y ? y : x;
}

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

inline void __syncthreads() { emulator::meet(emulator::block); }
inline void __syncwarp() { emulator::meet_warp(); }
inline void __threadfence() {}
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
inline int unknown(int x) { return x; }
template <class T> inline void __stcs(T* p, T x) { *p = x; }
template <class T> inline T atomicAdd(T* p, std::common_type_t<T> x) { return std::exchange(*p, *p + x); }
template <class T> inline T atomicMax(T* p, std::common_type_t<T> x) {
  return std::exchange(*p, std::max(*p, x));
}
inline float __uint_as_float(uint32_t x) {
  float r;
  memcpy(&r, &x, 4);
  return r;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t r;
  memcpy(&r, &x, 4);
  return r;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(uint32_t x) { return __builtin_ffs((int)x); }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t by) {
  return (uint32_t)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= (uint32_t)(both >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline uint64_t __cvta_generic_to_shared(const void* p) { return (uint32_t)((const char*)p - &emulator::anchor); }

inline void whole(uint32_t mask) {
  if (mask != ~0u) emulator::stop("a part of a warp was to meet");
}
template <class T> inline T __shfl_sync(uint32_t mask, T x, int from, int width = 32) {
  whole(mask);
  from = (int)(threadIdx.x % 32) / width * width + from % width;
  return emulator::show(x, [=](const auto& of) { return of(from); });
}
template <class T> inline T __shfl_xor_sync(uint32_t mask, T x, int by) {
  return __shfl_sync(mask, x, (int)(threadIdx.x % 32) ^ by);
}
template <class T> inline T __shfl_up_sync(uint32_t mask, T x, int by, int width = 32) {
  const int lane = threadIdx.x % width;
  return __shfl_sync(mask, x, lane < by ? lane : lane - by, width);
}
inline uint32_t __ballot_sync(uint32_t mask, bool is) {
  whole(mask);
  return emulator::show(is, [](const auto& of) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (uint32_t)of(i) << i;
    return r;
  });
}
inline bool __any_sync(uint32_t mask, bool is) { return __ballot_sync(mask, is); }
inline uint32_t __match_any_sync(uint32_t mask, uint32_t x) {
  whole(mask);
  return emulator::show(x, [=](const auto& of) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= (uint32_t)(of(i) == x) << i;
    return r;
  });
}
inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t x) {
  whole(mask);
  return emulator::show(x, [=](const auto& of) {
    uint32_t r = x;
    for (int i = 0; i < 32; i++) r = std::max(r, of(i));
    return r;
  });
}
inline uint32_t __reduce_add_sync(uint32_t mask, uint32_t x) {
  whole(mask);
  return emulator::show(x, [=](const auto& of) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r += of(i);
    return r;
  });
}
inline int __syncthreads_or(int is) {
  static int any;
  __syncthreads();
  any = 0;
  __syncthreads();
  any |= is;
  __syncthreads();
  return any;
}

// What ptx.cuh has.

enum Type { BF16, F16, F32 };

inline uint32_t pack(float low, float high, Type type) {
  using namespace emulator;
  return type == BF16 ? round_bf16(low) | (uint32_t)round_bf16(high) << 16
                      : bits((_Float16)low) | (uint32_t)bits((_Float16)high) << 16;
}
inline void unpack(uint32_t word, float& low, float& high, Type type) {
  low = type == BF16 ? __uint_as_float(word << 16) : (float)emulator::half(word);
  high = type == BF16 ? __uint_as_float(word & 0xffff0000u) : (float)emulator::half(word >> 16);
}
inline uint32_t multiply_add2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r = 0;
  for (int i = 0; i < 32; i += 16) {
    using emulator::half;
    const double exact = (double)half(a >> i) * (double)half(b >> i) + (double)half(c >> i);
    r |= (uint32_t)emulator::bits((_Float16)exact) << i;
  }
  return r;
}
inline uint32_t multiply2(uint32_t a, uint32_t b) { return multiply_add2(a, b, 0x80008000); }

inline void arrive(const emulator::Copy& c) {
  memset(emulator::shared(c.to), 0, 16);
  memcpy(emulator::shared(c.to), c.from, c.bytes);
}
inline void copy16(uint32_t to, const void* from, int bytes) {
  if (emulator::schedule[1]) arrive({to, from, bytes});
  else emulator::threads[emulator::now].copies.back().push_back({to, from, bytes});
}
inline void commit_copies() { emulator::threads[emulator::now].copies.emplace_back(); }
template <int N> inline void wait_for_copies() {
  auto& groups = emulator::threads[emulator::now].copies;
  while (groups.size() > N + 1) {
    for (const emulator::Copy& c : groups.front()) arrive(c);
    groups.erase(groups.begin());
  }
}

inline void store_word(uint32_t to, uint32_t value) { memcpy(emulator::shared(to), &value, 4); }
inline uint32_t load_word(uint32_t from) {
  uint32_t r;
  memcpy(&r, emulator::shared(from), 4);
  return r;
}
inline void load_words(uint32_t from, uint32_t (&r)[4]) { memcpy(r, emulator::shared(from), 16); }

template <bool TRANSPOSED> inline void load_matrix(uint32_t from, uint32_t (&r)[4]) {
  const int lane = threadIdx.x % 32;
  struct Four {
    uint32_t word[4];
  };
  const Four four = emulator::show(from, [=](const auto& of) {
    Four four = {};
    for (int m = 0; m < 4; m++)
      for (int i = 0; i < 2; i++) {
        const int a = lane / 4, b = lane % 4 * 2 + i;
        uint16_t number;
        memcpy(&number, emulator::shared(of(m * 8 + (TRANSPOSED ? b : a))) + 2 * (TRANSPOSED ? a : b), 2);
        four.word[m] |= (uint32_t)number << 16 * i;
      }
    return four;
  });
  std::copy(four.word, four.word + 4, r);
}

template <Type T>
inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                     bool is_new = false) {
  const int lane = threadIdx.x % 32;
  struct A {
    uint32_t word[4];
  };
  struct B {
    uint32_t word[2];
  };
  float left[2][16], right[2][16];  // the rows and columns of this lane's results
  auto number = [](uint32_t word, int i) {
    float low, high;
    unpack(word, low, high, T);
    return i % 2 ? high : low;
  };
  emulator::show(A{{a[0], a[1], a[2], a[3]}}, [&](const auto& of) {
    for (int r = 0; r < 2; r++)
      for (int k = 0; k < 16; k++)
        left[r][k] = number(of(lane / 4 * 4 + k % 8 / 2).word[r + k / 8 * 2], k);
    return 0;
  });
  emulator::show(B{{b0, b1}}, [&](const auto& of) {
    for (int n = 0; n < 2; n++)
      for (int k = 0; k < 16; k++)
        right[n][k] = number(of((lane % 4 * 2 + n) * 4 + k % 8 / 2).word[k / 8], k);
    return 0;
  });
  for (int e = 0; e < 4; e++) {
    double sum = is_new ? 0 : c[e];
    for (int k = 0; k < 16; k++) sum += (double)left[e / 2][k] * right[e % 2][k];
    c[e] = (float)sum;
  }
}

inline uint32_t turn(uint32_t x) {
  const int lane = threadIdx.x % 32;
  return emulator::show(x, [=](const auto& of) {
    uint32_t r = 0;
    for (int i = 0; i < 2; i++) {
      const uint32_t word = of((lane % 4 * 2 + i) * 4 + lane / 4 / 2);
      r |= (lane / 4 % 2 ? word >> 16 : word & 0xffff) << 16 * i;
    }
    return r;
  });
}

inline void add8(char* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  const uint32_t words[4] = {a, b, c, d};
  for (int i = 0; i < 8; i++) {
    uint16_t* at = (uint16_t*)to + i;
    *at = emulator::bits((_Float16)((float)emulator::half(*at) + (float)emulator::half(words[i / 2] >> i % 2 * 16)));
  }
}

inline void add4(char* to, float a, float b, float c, float d) {
  float* at = (float*)to;
  at[0] += a, at[1] += b, at[2] += c, at[3] += d;
}

inline void tell(uint32_t* count) {
  __syncwarp();
  if (threadIdx.x == 0) ++*count;
}
inline void wait_for(const uint32_t* count, uint32_t wanted) {
  if (*count < wanted) emulator::stop("a block waits for one that comes later");
  __syncwarp();
}
