// Number types, and the instructions that C++ has no words for: all of PTX is here.

using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

enum Type { BF16, F16, F32 };

__device__ inline uint32_t pack(float low, float high, Type type) {
  uint32_t r;
  if (type == BF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ inline void unpack(uint32_t word, float& low, float& high, Type type) {
  if (type == BF16) {
    low = __uint_as_float(word << 16);
    high = __uint_as_float(word & 0xffff0000u);
  } else {
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
        : "=f"(low), "=f"(high) : "r"(word));
  }
}

// The same number, which the compiler does not know: what follows from it is computed where it is used,
// and takes no registers before.
__device__ inline int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Two float16 numbers a word: a b, and a b + c.
__device__ inline uint32_t multiply2(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

__device__ inline uint32_t multiply_add2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

__device__ inline void copy16(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// Copies that were begun since the last call are a group; wait until no more than N groups are under way.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ inline void store_word(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ inline uint32_t load_word(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ inline void load_words(uint32_t from, uint32_t (&r)[4]) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

template <bool TRANSPOSED> __device__ inline void load_matrix(uint32_t from, uint32_t (&r)[4]) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}

// c = a b, or c += a b, of 16-bit numbers: 16 × 16 by 16 × 8
template <Type T>
__device__ inline void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                bool is_new = false) {
#define MULTIPLY(NAME, WITH, FROM)                                                               \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                            \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, " FROM ";"                           \
               : WITH(c[0]), WITH(c[1]), WITH(c[2]), WITH(c[3])                                  \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.f))
  if constexpr (T == BF16) {
    if (is_new) MULTIPLY("bf16", "=f", "{%10,%10,%10,%10}");
    else MULTIPLY("bf16", "+f", "{%0,%1,%2,%3}");
  } else {
    if (is_new) MULTIPLY("f16", "=f", "{%10,%10,%10,%10}");
    else MULTIPLY("f16", "+f", "{%0,%1,%2,%3}");
  }
#undef MULTIPLY
}

// Add eight float16 numbers to memory.
__device__ inline void add8(char* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.noftz.v4.f16x2 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(a),
               "r"(b), "r"(c), "r"(d) : "memory");
#else
  const uint32_t word[4] = {a, b, c, d};
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("red.relaxed.gpu.global.add.noftz.f16x2 [%0], %1;" ::"l"(to + 4 * i), "r"(word[i])
                 : "memory");
#endif
}

// Add four float32 numbers to memory.
__device__ inline void add4(char* to, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(a), "f"(b), "f"(c),
               "f"(d) : "memory");
#else
  const float x[4] = {a, b, c, d};
#pragma unroll
  for (int i = 0; i < 4; i++)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + 4 * i), "f"(x[i]) : "memory");
#endif
}

// Transpose an 8 × 8 matrix of 16-bit numbers that the warp holds.
__device__ inline uint32_t turn(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

// Between warps of a grid: one counts what it has written, another waits until enough has been.
__device__ inline void tell(uint32_t* count) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x == 0)
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(count) : "memory");
}

__device__ inline void wait_for(const uint32_t* count, uint32_t wanted) {
  uint32_t seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(count) : "memory");
  } while (seen < wanted);
  __syncwarp();
}
