// Tensor cores and PTX: `cuda_text.py` writes a statement of PTX as a call of `ptx_<its name>`.
//
// Included where a text uses them. Each lane gives its part of the operands to the whole warp, and
// computes its part of the result in float32 (int32 for int8).
#pragma once
#include <type_traits>

#include "device.h"

namespace cuda {

constexpr int MOST_GIVEN = 128;  // as in runtime.h

template <class T>
CUDA_QUIET T given(const unsigned char* all, int lane, int at) {
  T value;
  memcpy(&value, all + lane * MOST_GIVEN + at * sizeof(T), sizeof value);
  return value;
}

// mma.sync.m16n8k(16 or 32), as the PTX manual lays out its fragments: lane l has rows l / 4 and
// l / 4 + 8 of A, column l / 4 of B, and of its row or column K / 8 places beside each other at
// l % 4 and half of K further on.
template <int K, class T, class Sum>
CUDA_QUIET void mma_16_8(Sum* d, const unsigned* a, const unsigned* b, const Sum* c, int line) {
  unsigned in[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  const unsigned char* all = cuda_gather("mma.sync", in, sizeof in, line);
  constexpr int PER = K / 8, HALF = K / 2;  // elements in a register; K of two registers
  static_assert(PER * sizeof(T) == 4);
  int lane = cuda_lane();
  Sum out[4];
  for (int e = 0; e < 4; ++e) {
    int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    Sum sum = 0;
    for (int k = 0; k < K; ++k) {
      int third = k % HALF / PER, place = k % PER;
      T x = given<T>(all, row % 8 * 4 + third, (row / 8 + k / HALF * 2) * PER + place);
      T y = given<T>(all, column * 4 + third, (4 + k / HALF) * PER + place);
      sum += static_cast<Sum>(x) * static_cast<Sum>(y);
    }
    out[e] = c[e] + sum;
  }
  memcpy(d, out, sizeof out);
}

// ldmatrix: lane 8 i + r names row r of matrix i; each lane gets two neighbours of a row, or of a
// column if transposed, of each matrix.
CUDA_QUIET inline void load_matrices(unsigned** to, int count, bool transposed, uint32_t address,
                                     int line) {
  if (cuda_lane() < 8 * count) cuda_read(cuda_from_shared(address), 16);
  const unsigned char* all = cuda_gather("ldmatrix", &address, sizeof address, line);
  int lane = cuda_lane();
  for (int m = 0; m < count; ++m) {
    unsigned pair = 0;
    for (int e = 0; e < 2; ++e) {
      int row = lane / 4, column = lane % 4 * 2 + e;
      int named = m * 8 + (transposed ? column : row);
      auto* from = static_cast<const char*>(cuda_from_shared(given<uint32_t>(all, named, 0)));
      uint16_t bits;
      memcpy(&bits, from + 2 * (transposed ? row : column), sizeof bits);
      pair |= unsigned(bits) << 16 * e;
    }
    *to[m] = pair;
  }
}

}  // namespace cuda

#define CUDA_MMA(name, K, T, Sum)                                                             \
  CUDA_QUIET inline void name(Sum& d0, Sum& d1, Sum& d2, Sum& d3, unsigned a0, unsigned a1,   \
                              unsigned a2, unsigned a3, unsigned b0, unsigned b1, Sum c0,     \
                              Sum c1, Sum c2, Sum c3, CUDA_LINE) {                            \
    unsigned a[] = {a0, a1, a2, a3}, b[] = {b0, b1};                                          \
    Sum c[] = {c0, c1, c2, c3}, d[4];                                                         \
    cuda::mma_16_8<K, T>(d, a, b, c, line);                                                   \
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];                                               \
  }
CUDA_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32, 16, half, float)
CUDA_MMA(ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32, 16, nv_bfloat16, float)
CUDA_MMA(ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32, 32, signed char, int)
#undef CUDA_MMA
// The same where registers are taken for numbers without a sign.
CUDA_QUIET inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(
    unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3, unsigned a0, unsigned a1, unsigned a2,
    unsigned a3, unsigned b0, unsigned b1, unsigned c0, unsigned c1, unsigned c2, unsigned c3,
    CUDA_LINE) {
  unsigned a[] = {a0, a1, a2, a3}, b[] = {b0, b1};
  int c[] = {int(c0), int(c1), int(c2), int(c3)}, d[4];
  cuda::mma_16_8<32, signed char>(d, a, b, c, line);
  d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}

#define CUDA_LDMATRIX(suffix, transposed)                                                     \
  CUDA_QUIET inline void ptx_ldmatrix_sync_aligned_m8n8_x1##suffix(unsigned& a, uint32_t from, \
                                                                   CUDA_LINE) {               \
    unsigned* to[] = {&a};                                                                    \
    cuda::load_matrices(to, 1, transposed, from, line);                                       \
  }                                                                                           \
  CUDA_QUIET inline void ptx_ldmatrix_sync_aligned_m8n8_x2##suffix(                           \
      unsigned& a, unsigned& b, uint32_t from, CUDA_LINE) {                                   \
    unsigned* to[] = {&a, &b};                                                                \
    cuda::load_matrices(to, 2, transposed, from, line);                                       \
  }                                                                                           \
  CUDA_QUIET inline void ptx_ldmatrix_sync_aligned_m8n8_x4##suffix(                           \
      unsigned& a, unsigned& b, unsigned& c, unsigned& d, uint32_t from, CUDA_LINE) {         \
    unsigned* to[] = {&a, &b, &c, &d};                                                        \
    cuda::load_matrices(to, 4, transposed, from, line);                                       \
  }
CUDA_LDMATRIX(_shared_b16, false)
CUDA_LDMATRIX(_trans_shared_b16, true)
#undef CUDA_LDMATRIX

// Two numbers rounded to 16 bits, the second in the lower half.
#define CUDA_PACK(name, T)                                                            \
  CUDA_QUIET inline void name(unsigned& to, float high, float low) {                  \
    T both[] = {T(low), T(high)};                                                     \
    memcpy(&to, both, sizeof to);                                                     \
  }
CUDA_PACK(ptx_cvt_rn_f16x2_f32, half)
CUDA_PACK(ptx_cvt_rn_bf16x2_f32, nv_bfloat16)
#undef CUDA_PACK

#define CUDA_COPY(name)                                                                     \
  CUDA_INLINE void name(uint32_t to, const void* from, unsigned size) {                     \
    cuda_copy_async(to, from, size, size);                                                  \
  }                                                                                         \
  CUDA_INLINE void name(uint32_t to, const void* from, unsigned room, unsigned size) {      \
    cuda_copy_async(to, from, room, size);                                                  \
  }                                                                                         \
  template <int Room>                                                                       \
  CUDA_INLINE void name(uint32_t to, const void* from) {                                    \
    cuda_copy_async(to, from, Room, Room);                                                  \
  }                                                                                         \
  template <int Room>                                                                       \
  CUDA_INLINE void name(uint32_t to, const void* from, unsigned size) {                     \
    cuda_copy_async(to, from, Room, size);                                                  \
  }
CUDA_COPY(ptx_cp_async_ca_shared_global)
CUDA_COPY(ptx_cp_async_cg_shared_global)
#undef CUDA_COPY
CUDA_INLINE void ptx_cp_async_commit_group() { cuda_commit_copies(); }
template <int Open>
CUDA_INLINE void ptx_cp_async_wait_group() { cuda_wait_copies(Open); }
CUDA_INLINE void ptx_cp_async_wait_all() {
  cuda_commit_copies();
  cuda_wait_copies(0);
}

// --- wmma: lane l holds an equal share of a matrix, row by row ---------------------------------

namespace nvcuda::wmma {

struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int M, int N, int K, class T, class Layout = void>
struct fragment {
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int columns = std::is_same_v<Use, matrix_a> ? K : N;
  static constexpr int num_elements = rows * columns / 32;
  T x[num_elements];
};

template <class Fragment, class T>
CUDA_QUIET void fill_fragment(Fragment& f, T value) {
  for (auto& x : f.x) x = value;
}

// Each element's address; all lanes are there.
template <class Use, int M, int N, int K, class T, class L, class P, class Do>
CUDA_QUIET void each(const char* what, fragment<Use, M, N, K, T, L>& f, P* at, unsigned ld,
                     bool by_columns, int line, Do act) {
  using F = fragment<Use, M, N, K, T, L>;
  cuda_gather(what, &ld, sizeof ld, line);
  for (int e = 0; e < F::num_elements; ++e) {
    int place = cuda_lane() * F::num_elements + e, r = place / F::columns, c = place % F::columns;
    act(f.x[e], at + (by_columns ? size_t(c) * ld + r : size_t(r) * ld + c));
  }
}

template <class T>
CUDA_QUIET void load(T& x, const T* at) {
  cuda_read(at, sizeof(T));
  x = *at;
}

template <class Use, int M, int N, int K, class T, class L>
CUDA_QUIET void load_matrix_sync(fragment<Use, M, N, K, T, L>& f, const T* at, unsigned ld,
                                 CUDA_LINE) {
  each("wmma::load_matrix_sync", f, at, ld, std::is_same_v<L, col_major>, line,
       [](T& x, const T* p) CUDA_QUIET { load(x, p); });
}

template <int M, int N, int K, class T>
CUDA_QUIET void load_matrix_sync(fragment<accumulator, M, N, K, T>& f, const T* at, unsigned ld,
                                 layout_t layout, CUDA_LINE) {
  each("wmma::load_matrix_sync", f, at, ld, layout == mem_col_major, line,
       [](T& x, const T* p) CUDA_QUIET { load(x, p); });
}

template <int M, int N, int K, class T>
CUDA_QUIET void store_matrix_sync(T* at, fragment<accumulator, M, N, K, T>& f, unsigned ld,
                                  layout_t layout, CUDA_LINE) {
  each("wmma::store_matrix_sync", f, at, ld, layout == mem_col_major, line,
       [](T& x, T* p) CUDA_QUIET {
         cuda_write(p, sizeof(T));
         *p = x;
       });
}

template <int M, int N, int K, class T, class LA, class LB, class TC>
CUDA_QUIET void mma_sync(fragment<accumulator, M, N, K, TC>& d,
                         const fragment<matrix_a, M, N, K, T, LA>& a,
                         const fragment<matrix_b, M, N, K, T, LB>& b,
                         const fragment<accumulator, M, N, K, TC>& c, CUDA_LINE) {
  using Sum = std::conditional_t<std::is_integral_v<TC>, TC, float>;
  constexpr int IN_A = M * K / 32, IN_B = K * N / 32, IN_D = M * N / 32;
  T in[IN_A + IN_B];
  static_assert(sizeof in <= cuda::MOST_GIVEN);
  memcpy(in, a.x, sizeof a.x);
  memcpy(in + IN_A, b.x, sizeof b.x);
  const unsigned char* all = cuda_gather("wmma::mma_sync", in, sizeof in, line);
  for (int e = 0; e < IN_D; ++e) {
    int place = cuda_lane() * IN_D + e, row = place / N, column = place % N;
    Sum sum = 0;
    for (int k = 0; k < K; ++k) {
      int p = row * K + k, q = k * N + column;
      sum += static_cast<Sum>(cuda::given<T>(all, p / IN_A, p % IN_A)) *
             static_cast<Sum>(cuda::given<T>(all, q / IN_B, IN_A + q % IN_B));
    }
    d.x[e] = static_cast<TC>(static_cast<Sum>(c.x[e]) + sum);
  }
}

}  // namespace nvcuda::wmma
