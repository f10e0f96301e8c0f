// Plain kernels, written by hand, whose counts stand beside those of generated ones in `gpu_counts`.
#include <cuda_fp16.h>
#define IN(T) const T* __restrict__
#define KERNEL(name) extern "C" __global__ void name

template <int V> struct Vector { float each[V]; };
template <> struct __align__(16) Vector<4> { float each[4]; };

// SpMM: a warp a row, a lane V of 32 V features.
template <int V>
__device__ void rows(IN(int) indptr, IN(int) indices, IN(float) a, IN(float) b, float* __restrict__ c, int m) {
  int row = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;
  if (row >= m) return;
  Vector<V> sum = {};
  for (int p = indptr[row], end = indptr[row + 1]; p < end; ++p) {
    Vector<V> y = ((const Vector<V>*)b)[(long long)indices[p] * 32 + lane];
    for (int v = 0; v < V; ++v) sum.each[v] += a[p] * y.each[v];
  }
  ((Vector<V>*)c)[(long long)row * 32 + lane] = sum;
}
KERNEL(spmm_32)(IN(int) p, IN(int) i, IN(float) a, IN(float) b, float* __restrict__ c, int m) { rows<1>(p, i, a, b, c, m); }
KERNEL(spmm_128)(IN(int) p, IN(int) i, IN(float) a, IN(float) b, float* __restrict__ c, int m) { rows<4>(p, i, a, b, c, m); }

// SpMV: 8 lanes a row.
KERNEL(spmv)(IN(int) indptr, IN(int) indices, IN(float) a, IN(float) x, float* __restrict__ y, int m) {
  int row = (blockIdx.x * blockDim.x + threadIdx.x) / 8, lane = threadIdx.x % 8;
  float sum = 0;
  if (row < m)
    for (int p = indptr[row] + lane, end = indptr[row + 1]; p < end; p += 8) sum += a[p] * x[indices[p]];
  for (int d = 4; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (row < m && lane == 0) y[row] = sum;
}

// SDDMM: 8 lanes an element, by the rows of COO.
template <int F>
__device__ void elements(IN(int) row, IN(int) col, IN(float) x, IN(float) y, float* __restrict__ out, int nnz) {
  int e = (blockIdx.x * blockDim.x + threadIdx.x) / 8, lane = threadIdx.x % 8;
  IN(Vector<4>) u = (const Vector<4>*)x + (e < nnz ? row[e] : 0) * (long long)(F / 4) + lane;
  IN(Vector<4>) v = (const Vector<4>*)y + (e < nnz ? col[e] : 0) * (long long)(F / 4) + lane;
  float s = 0;
  for (int f = 0; f < F / 4; f += 8) {
    Vector<4> one = u[f], other = v[f];
    for (int n = 0; n < 4; ++n) s += one.each[n] * other.each[n];
  }
  for (int d = 4; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
  if (e < nnz && lane == 0) out[e] = s;
}
KERNEL(sddmm_32)(IN(int) r, IN(int) c, IN(float) x, IN(float) y, float* __restrict__ o, int n) { elements<32>(r, c, x, y, o, n); }
KERNEL(sddmm_128)(IN(int) r, IN(int) c, IN(float) x, IN(float) y, float* __restrict__ o, int n) { elements<128>(r, c, x, y, o, n); }

// RGMS: F threads sum a row of a relation, multiply it by the relation's matrix, and add to the result.
template <class T, int F>
__device__ void relations(IN(int) relation, IN(int) row, IN(int) indptr, IN(int) indices, IN(T) a, IN(T) x, IN(T) w, float* out) {
  __shared__ float sums[F];
  int t = threadIdx.x;
  float sum = 0, result = 0;
  for (int p = indptr[blockIdx.x], end = indptr[blockIdx.x + 1]; p < end; ++p)
    sum += (float)a[p] * (float)x[(long long)indices[p] * F + t];
  sums[t] = sum;
  __syncthreads();
  for (int k = 0; k < F; ++k) result += sums[k] * (float)w[((long long)relation[blockIdx.x] * F + k) * F + t];
  atomicAdd(out + (long long)row[blockIdx.x] * F + t, result);
}
#define RGMS(name, T, F) \
  KERNEL(name)(IN(int) r, IN(int) i, IN(int) p, IN(int) j, IN(T) a, IN(T) x, IN(T) w, float* o) { relations<T, F>(r, i, p, j, a, x, w, o); }
RGMS(rgms_32_float32, float, 32)
RGMS(rgms_128_float32, float, 128)
RGMS(rgms_32_float16, __half, 32)
RGMS(rgms_128_float16, __half, 128)

#define LOAD(name, how) \
  __device__ void name(unsigned* to, const __half* from) { \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" how ".shared.b16 {%0,%1,%2,%3}, [%4];" \
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"((unsigned)__cvta_generic_to_shared(from))); }
LOAD(load, "")
LOAD(load_transposed, ".trans")
__device__ void multiply(float* d, const unsigned* a, const unsigned* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// R rows of C halves to shared memory, by 128 threads.
template <int R, int C> __device__ void stage(__half (*to)[C + 8], const __half* from) {
  for (int u = 0; u < R * C / 1024; ++u) {
    int n = u * 128 + threadIdx.x;
    *(uint4*)&to[n / (C / 8)][n % (C / 8) * 8] = *(const uint4*)(from + n * 8);
  }
}

// BSR of 32 x 32 blocks by 128 features: 4 warps a row of blocks, each 32 features; one stage.
KERNEL(bsr)(IN(int) indptr, IN(int) indices, IN(__half) a, IN(__half) b, __half* __restrict__ c) {
  __shared__ __align__(16) __half sa[32][40], sb[32][136];
  int lane = threadIdx.x % 32, w = threadIdx.x / 32;
  float acc[2][4][4] = {};
  for (int p = indptr[blockIdx.x], end = indptr[blockIdx.x + 1]; p < end; ++p) {
    __syncthreads();
    stage<32, 32>(sa, a + (long long)p * 1024);
    stage<32, 128>(sb, b + (long long)indices[p] * 4096);
    __syncthreads();
    for (int k = 0; k < 32; k += 16) {
      unsigned fa[2][4], fb[2][4];
      for (int i = 0; i < 2; ++i) {
        load(fa[i], &sa[i * 16 + lane % 16][k + lane / 16 * 8]);
        load_transposed(fb[i], &sb[k + lane % 16][w * 32 + i * 16 + lane / 16 * 8]);
      }
      for (int i = 0; i < 2; ++i)
        for (int n = 0; n < 4; ++n) multiply(acc[i][n], fa[i], fb[n / 2] + n % 2 * 2);
    }
  }
  for (int i = 0; i < 16; ++i) {  // tile i / 8 of rows, half i / 4 % 2 of it, tile i % 4 of columns
    const float* d = acc[i / 8][i % 4] + i / 4 % 2 * 2;
    *(__half2*)(c + (long long)(blockIdx.x * 32 + i / 4 * 8 + lane / 4) * 128 + w * 32 + i % 4 * 8 + lane % 4 * 2) = __floats2half2_rn(d[0], d[1]);
  }
}

// Attention over whole blocks of 64 x 64: 4 warps a block of queries, each 16 of them; one stage.
template <int F>
__device__ void attend(IN(int) indptr, IN(int) indices, IN(__half) q, IN(__half) k, IN(__half) v, float scale, float* __restrict__ lse, __half* __restrict__ out) {
  __shared__ __align__(16) __half sk[64][F + 8], sv[64][F + 8];
  int lane = threadIdx.x % 32, first = blockIdx.x * 64 + threadIdx.x / 32 * 16 + lane / 4;
  unsigned fq[F / 16][4], f[4];
  float total[F / 8][4] = {}, top[2] = {-1e30f, -1e30f}, sum[2] = {}, log2e = 1.4426950f;
  for (int n = 0; n < F / 4; ++n)
    fq[n / 4][n % 4] = *(const unsigned*)(q + (long long)(first + n % 2 * 8) * F + n / 2 * 8 + lane % 4 * 2);
  for (int p = indptr[blockIdx.x], end = indptr[blockIdx.x + 1]; p < end; ++p) {
    float s[8][4] = {};
    __syncthreads();
    stage<64, F>(sk, k + (long long)indices[p] * 64 * F);
    stage<64, F>(sv, v + (long long)indices[p] * 64 * F);
    __syncthreads();
    for (int d = 0; d < F / 16; ++d)
      for (int n = 0; n < 8; ++n) {
        if (n % 2 == 0) load(f, &sk[n * 8 + lane / 16 * 8 + lane % 8][d * 16 + lane / 8 % 2 * 8]);
        multiply(s[n], fq[d], f + n % 2 * 2);
      }
    for (int h = 0; h < 2; ++h) {
      float next = top[h];
      for (int n = 0; n < 16; ++n) next = fmaxf(next, s[n / 2][2 * h + n % 2] * (scale * log2e));
      for (int d = 1; d < 4; d *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, d));
      float fade = exp2f(top[h] - next);
      top[h] = next, sum[h] *= fade;
      for (int n = 0; n < 16; ++n) sum[h] += s[n / 2][2 * h + n % 2] = exp2f(fmaf(s[n / 2][2 * h + n % 2], scale * log2e, -next));
      for (int n = 0; n < F / 4; ++n) total[n / 2][2 * h + n % 2] *= fade;
    }
    for (int d = 0; d < 4; ++d) {
      __half2 a[4];
      for (int n = 0; n < 4; ++n) a[n] = __floats2half2_rn(s[2 * d + n / 2][n % 2 * 2], s[2 * d + n / 2][n % 2 * 2 + 1]);
      for (int n = 0; n < F / 8; ++n) {
        if (n % 2 == 0) load_transposed(f, &sv[d * 16 + lane % 16][n * 8 + lane / 16 * 8]);
        multiply(total[n], (unsigned*)a, f + n % 2 * 2);
      }
    }
  }
  for (int h = 0; h < 2; ++h) {
    for (int d = 1; d < 4; d *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], d);
    if (lane % 4 == 0) lse[first + h * 8] = (top[h] + log2f(sum[h])) / log2e;
    for (int n = 0; n < F / 8; ++n)
      *(__half2*)(out + (long long)(first + h * 8) * F + n * 8 + lane % 4 * 2) = __floats2half2_rn(total[n][2 * h] / sum[h], total[n][2 * h + 1] / sum[h]);
  }
}
KERNEL(attention_64)(IN(int) p, IN(int) i, IN(__half) q, IN(__half) k, IN(__half) v, float s, float* __restrict__ l, __half* __restrict__ o) { attend<64>(p, i, q, k, v, s, l, o); }
KERNEL(attention_128)(IN(int) p, IN(int) i, IN(__half) q, IN(__half) k, IN(__half) v, float s, float* __restrict__ l, __half* __restrict__ o) { attend<128>(p, i, q, k, v, s, l, o); }
