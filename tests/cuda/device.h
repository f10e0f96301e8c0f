// What CUDA text may use, for a compiler of C++; `runtime.h` and the rest run it.
//
// Kernels are compiled with hooks at their loads and stores. Functions here that touch memory for
// them call `cuda_read` and `cuda_write` instead.
#pragma once
// C++ would add a tenth of a second of templates to each kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stddef.h>

#include "scalars.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ CUDA_INLINE
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define CUDA_QUIET __attribute__((no_sanitize("thread")))
#define CUDA_LINE int line = __builtin_LINE()

// --- vectors -----------------------------------------------------------------------------------

namespace cuda {
template <size_t Bytes>
constexpr size_t alignment = Bytes < 16 ? Bytes : 16;
}

#define CUDA_VECTOR(T, name)                                                       \
  struct name##1 { T x; };                                                         \
  struct alignas(cuda::alignment<2 * sizeof(T)>) name##2 { T x, y; };              \
  struct name##3 { T x, y, z; };                                                   \
  struct alignas(cuda::alignment<4 * sizeof(T)>) name##4 { T x, y, z, w; };        \
  CUDA_INLINE name##1 make_##name##1(T x) { return {x}; }                          \
  CUDA_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; }                  \
  CUDA_INLINE name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }          \
  CUDA_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_VECTOR(signed char, char)
CUDA_VECTOR(unsigned char, uchar)
CUDA_VECTOR(short, short)
CUDA_VECTOR(unsigned short, ushort)
CUDA_VECTOR(int, int)
CUDA_VECTOR(unsigned, uint)
CUDA_VECTOR(long, long)
CUDA_VECTOR(unsigned long, ulong)
CUDA_VECTOR(long long, longlong)
CUDA_VECTOR(unsigned long long, ulonglong)
CUDA_VECTOR(float, float)
CUDA_VECTOR(double, double)
#undef CUDA_VECTOR

#define CUDA_PAIR(T, name)                                  \
  struct alignas(4) name {                                  \
    T x, y;                                                 \
    name() = default;                                       \
    name(T a, T b) : x(a), y(b) {}                          \
  };                                                        \
  CUDA_INLINE name operator+(name a, name b) { return {a.x + b.x, a.y + b.y}; } \
  CUDA_INLINE name operator-(name a, name b) { return {a.x - b.x, a.y - b.y}; } \
  CUDA_INLINE name operator*(name a, name b) { return {a.x * b.x, a.y * b.y}; } \
  CUDA_INLINE name __hadd2(name a, name b) { return a + b; }                    \
  CUDA_INLINE name __hmul2(name a, name b) { return a * b; }                    \
  CUDA_INLINE name __hfma2(name a, name b, name c) {                            \
    return {T(fmaf(a.x, b.x, c.x)), T(fmaf(a.y, b.y, c.y))};                    \
  }                                                                             \
  CUDA_INLINE bool __hgt(T a, T b) { return a > b; }                            \
  CUDA_INLINE bool __hlt(T a, T b) { return a < b; }                            \
  CUDA_INLINE bool __hisnan(T a) { return a != a; }                             \
  CUDA_INLINE T __hfma(T a, T b, T c) { return T(fmaf(a, b, c)); }              \
  CUDA_INLINE T __habs(T a) { return T(fabsf(a)); }                             \
  CUDA_INLINE T hexp(T a) { return T(expf(a)); }                                \
  CUDA_INLINE T hexp2(T a) { return T(exp2f(a)); }                              \
  CUDA_INLINE T hlog(T a) { return T(logf(a)); }                                \
  CUDA_INLINE T hlog2(T a) { return T(log2f(a)); }                              \
  CUDA_INLINE T hsqrt(T a) { return T(sqrtf(a)); }                              \
  CUDA_INLINE T hrsqrt(T a) { return T(1 / sqrtf(a)); }                         \
  CUDA_INLINE T hsin(T a) { return T(sinf(a)); }                                \
  CUDA_INLINE T hcos(T a) { return T(cosf(a)); }                                \
  CUDA_INLINE T htanh(T a) { return T(tanhf(a)); }                              \
  CUDA_INLINE T hfloor(T a) { return T(floorf(a)); }                            \
  CUDA_INLINE T hceil(T a) { return T(ceilf(a)); }                              \
  CUDA_INLINE T htrunc(T a) { return T(truncf(a)); }                            \
  CUDA_INLINE T hrint(T a) { return T(rintf(a)); }
CUDA_PAIR(__half, __half2)
CUDA_PAIR(__nv_bfloat16, __nv_bfloat162)
#undef CUDA_PAIR
using half2 = __half2;
using nv_bfloat162 = __nv_bfloat162;

CUDA_INLINE half2 make_half2(half x, half y) { return {x, y}; }
CUDA_INLINE half2 __halves2half2(half x, half y) { return {x, y}; }
CUDA_INLINE nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
CUDA_INLINE nv_bfloat162 __halves2bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return {x, y}; }
CUDA_INLINE float __half2float(half x) { return x; }
CUDA_INLINE half __float2half(float x) { return x; }
CUDA_INLINE half __float2half_rn(float x) { return x; }
CUDA_INLINE float2 __half22float2(half2 x) { return {x.x, x.y}; }
CUDA_INLINE half2 __float22half2_rn(float2 x) { return {x.x, x.y}; }
CUDA_INLINE float __bfloat162float(nv_bfloat16 x) { return x; }
CUDA_INLINE nv_bfloat16 __float2bfloat16(float x) { return x; }
CUDA_INLINE nv_bfloat16 __float2bfloat16_rn(float x) { return x; }
CUDA_INLINE float2 __bfloat1622float2(nv_bfloat162 x) { return {x.x, x.y}; }

// --- numbers -----------------------------------------------------------------------------------

#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF double(INFINITY)
#define CUDART_NAN double(NAN)
#define CUDA_MIN_MAX(T)                                         \
  CUDA_INLINE T max(T a, T b) { return a < b ? b : a; }         \
  CUDA_INLINE T min(T a, T b) { return b < a ? b : a; }
CUDA_MIN_MAX(int)
CUDA_MIN_MAX(unsigned)
CUDA_MIN_MAX(long)
CUDA_MIN_MAX(unsigned long)
CUDA_MIN_MAX(long long)
CUDA_MIN_MAX(unsigned long long)
#undef CUDA_MIN_MAX
CUDA_INLINE float max(float a, float b) { return fmaxf(a, b); }
CUDA_INLINE float min(float a, float b) { return fminf(a, b); }
CUDA_INLINE double max(double a, double b) { return fmax(a, b); }
CUDA_INLINE double min(double a, double b) { return fmin(a, b); }
CUDA_INLINE float __expf(float x) { return expf(x); }
CUDA_INLINE float __exp10f(float x) { return powf(10, x); }
CUDA_INLINE float __logf(float x) { return logf(x); }
CUDA_INLINE float __log2f(float x) { return log2f(x); }
CUDA_INLINE float __log10f(float x) { return log10f(x); }
CUDA_INLINE float __sinf(float x) { return sinf(x); }
CUDA_INLINE float __cosf(float x) { return cosf(x); }
CUDA_INLINE float __tanf(float x) { return tanf(x); }
CUDA_INLINE float __powf(float x, float y) { return powf(x, y); }
CUDA_INLINE float __fdividef(float x, float y) { return x / y; }
CUDA_INLINE float rsqrtf(float x) { return 1 / sqrtf(x); }
CUDA_INLINE double rsqrt(double x) { return 1 / sqrt(x); }
CUDA_INLINE float __int_as_float(int x) { return cuda::from_bits(x); }
CUDA_INLINE int __float_as_int(float x) { return cuda::bits_of(x); }
CUDA_INLINE float __uint_as_float(unsigned x) { return cuda::from_bits(x); }
CUDA_INLINE unsigned __float_as_uint(float x) { return cuda::bits_of(x); }
CUDA_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
CUDA_INLINE int __ffs(int x) { return __builtin_ffs(x); }
CUDA_INLINE int __clz(int x) { return x ? __builtin_clz(x) : 32; }

// --- threads -----------------------------------------------------------------------------------

extern "C" {
// A kernel's function sees one thread and one block, so these do not change in it.
uint3 cuda_thread_index() __attribute__((const));
uint3 cuda_block_index() __attribute__((const));
uint3 cuda_block_shape() __attribute__((const));
uint3 cuda_grid_shape() __attribute__((const));
int cuda_lane() __attribute__((const));
void cuda_sync_threads(int line);
void cuda_sync_warp(unsigned mask, int line);
unsigned cuda_active_mask(int line);
unsigned cuda_ballot(unsigned mask, int predicate, int line);
void cuda_shuffle(const char* what, unsigned mask, const void* in, void* out, int size, int source,
                  int line);
const unsigned char* cuda_gather(const char* what, const void* give, int size, int line);
void* cuda_shared(unsigned number, const char* name, size_t size, unsigned element);
void* cuda_dynamic_shared() __attribute__((const));
uint32_t cuda_shared_offset(const void* pointer);
void* cuda_from_shared(uint32_t offset);
void cuda_read(const void* at, size_t size);
void cuda_write(void* at, size_t size);
void cuda_copy_async(uint32_t to, const void* from, unsigned room, unsigned size);
void cuda_commit_copies();
void cuda_wait_copies(unsigned open);
}
#define threadIdx (cuda_thread_index())
#define blockIdx (cuda_block_index())
#define blockDim (cuda_block_shape())
#define gridDim (cuda_grid_shape())
#define warpSize 32
#define __cvta_generic_to_shared(pointer) cuda_shared_offset(pointer)

CUDA_INLINE void __syncthreads(CUDA_LINE) { cuda_sync_threads(line); }
CUDA_INLINE void __syncwarp(unsigned mask = ~0u, CUDA_LINE) { cuda_sync_warp(mask, line); }
CUDA_INLINE unsigned __activemask(CUDA_LINE) { return cuda_active_mask(line); }
CUDA_INLINE void __threadfence() {}
CUDA_INLINE void __threadfence_block() {}
CUDA_INLINE unsigned __ballot_sync(unsigned mask, int predicate, CUDA_LINE) {
  return cuda_ballot(mask, predicate, line);
}
CUDA_INLINE int __any_sync(unsigned mask, int predicate, CUDA_LINE) {
  return cuda_ballot(mask, predicate, line) != 0;
}
CUDA_INLINE int __all_sync(unsigned mask, int predicate, CUDA_LINE) {
  return cuda_ballot(mask, !predicate, line) == 0;
}

// `source` of CUDA's four shuffles: a lane of the same `width` lanes, or the lane itself.
#define CUDA_SHUFFLE(name, argument, source)                                                \
  template <class T>                                                                        \
  CUDA_INLINE T name(unsigned mask, T value, argument by, int width = 32, CUDA_LINE) {      \
    int lane = cuda_lane(), first = lane / width * width, last = first + width - 1, from;   \
    (void)last;                                                                             \
    from = (source);                                                                        \
    T result;                                                                               \
    cuda_shuffle(#name, mask, &value, &result, sizeof(T), from, line);                      \
    return result;                                                                          \
  }
CUDA_SHUFFLE(__shfl_sync, int, first + (by & (width - 1)))
CUDA_SHUFFLE(__shfl_up_sync, unsigned, lane - int(by) < first ? lane : lane - int(by))
CUDA_SHUFFLE(__shfl_down_sync, unsigned, lane + int(by) > last ? lane : lane + int(by))
CUDA_SHUFFLE(__shfl_xor_sync, int, (lane ^ by) > last ? lane : lane ^ by)
#undef CUDA_SHUFFLE

template <class T>
CUDA_INLINE T __ldg(const T* at) { return *at; }

// --- atomics -----------------------------------------------------------------------------------

#define CUDA_ATOMIC_ADD(T) T cuda_atomic_add(T* at, T value);
CUDA_ATOMIC_ADD(int) CUDA_ATOMIC_ADD(unsigned) CUDA_ATOMIC_ADD(unsigned long long)
CUDA_ATOMIC_ADD(float) CUDA_ATOMIC_ADD(double) CUDA_ATOMIC_ADD(__half)
CUDA_ATOMIC_ADD(__nv_bfloat16)
#define CUDA_ATOMICS(T)                              \
  T cuda_atomic_max(T* at, T value);                 \
  T cuda_atomic_min(T* at, T value);                 \
  T cuda_atomic_exchange(T* at, T value);            \
  T cuda_atomic_swap(T* at, T expected, T value);
CUDA_ATOMICS(int) CUDA_ATOMICS(unsigned) CUDA_ATOMICS(unsigned long long) CUDA_ATOMICS(long long)
float cuda_atomic_exchange(float* at, float value);
unsigned short cuda_atomic_swap(unsigned short* at, unsigned short expected, unsigned short value);
int cuda_atomic_and(int* at, int value);
unsigned cuda_atomic_and(unsigned* at, unsigned value);
int cuda_atomic_or(int* at, int value);
unsigned cuda_atomic_or(unsigned* at, unsigned value);
int cuda_atomic_xor(int* at, int value);
unsigned cuda_atomic_xor(unsigned* at, unsigned value);
#undef CUDA_ATOMIC_ADD
#undef CUDA_ATOMICS

#define CUDA_FORWARD(name, function)                 \
  template <class T, class V>                        \
  CUDA_INLINE T name(T* at, V value) { return function(at, static_cast<T>(value)); }
CUDA_FORWARD(atomicAdd, cuda_atomic_add)
CUDA_FORWARD(atomicMax, cuda_atomic_max)
CUDA_FORWARD(atomicMin, cuda_atomic_min)
CUDA_FORWARD(atomicExch, cuda_atomic_exchange)
CUDA_FORWARD(atomicAnd, cuda_atomic_and)
CUDA_FORWARD(atomicOr, cuda_atomic_or)
CUDA_FORWARD(atomicXor, cuda_atomic_xor)
#undef CUDA_FORWARD
template <class T, class U, class V>
CUDA_INLINE T atomicCAS(T* at, U expected, V value) {
  return cuda_atomic_swap(at, static_cast<T>(expected), static_cast<T>(value));
}
#define CUDA_ATOMIC_PAIR(T)                                                 \
  CUDA_INLINE T atomicAdd(T* at, T value) {                                 \
    return {cuda_atomic_add(&at->x, value.x), cuda_atomic_add(&at->y, value.y)}; \
  }
CUDA_ATOMIC_PAIR(half2) CUDA_ATOMIC_PAIR(nv_bfloat162) CUDA_ATOMIC_PAIR(float2)
#undef CUDA_ATOMIC_PAIR
CUDA_INLINE float4 atomicAdd(float4* at, float4 value) {
  return {cuda_atomic_add(&at->x, value.x), cuda_atomic_add(&at->y, value.y),
          cuda_atomic_add(&at->z, value.z), cuda_atomic_add(&at->w, value.w)};
}
