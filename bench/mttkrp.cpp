// MTTKRP of orders 3 to 5 as loop nests written by hand, with a workspace for each inner product:
// A(i, j) = B(i, k, l, ..) * C(k, j) * D(l, j) * .., B in CSF, one thread.
//
// "constant": 32 columns are known to the compiler. "variable": they are not, as in TACO's code.
// "registers": the workspaces are GCC's vector types, and the sum of a row is one too.

#include <cstdint>
#include <type_traits>

namespace {

using Index = int32_t;
constexpr int most = 32;

template <typename T>
struct Tensor {
  Index rows, columns;
  const Index *ptr[4], *idx[4];  // of the levels k, l, m, n
  const T *values, *factor[4];
  T* out;

  const T* row(int level, Index at, int64_t width) const {
    return factor[level] + idx[level][at] * width;
  }
};

template <typename T, typename Width>
void order3(const Tensor<T>& t, Width width) {
  const Index *k_ptr = t.ptr[0], *l_ptr = t.ptr[1];
  const T* __restrict b = t.values;
  T w[most];
  for (Index i = 0; i < t.rows; i++) {
    T* __restrict a = t.out + i * (int64_t)width;
    for (int j = 0; j < width; j++) a[j] = 0;
    for (Index k = k_ptr[i]; k < k_ptr[i + 1]; k++) {
      for (int j = 0; j < width; j++) w[j] = 0;
      for (Index l = l_ptr[k]; l < l_ptr[k + 1]; l++) {
        const T* __restrict d = t.row(1, l, width);
        for (int j = 0; j < width; j++) w[j] += b[l] * d[j];
      }
      const T* __restrict c = t.row(0, k, width);
      for (int j = 0; j < width; j++) a[j] += w[j] * c[j];
    }
  }
}

template <typename T, typename Width>
void order4(const Tensor<T>& t, Width width) {
  const Index *k_ptr = t.ptr[0], *l_ptr = t.ptr[1], *m_ptr = t.ptr[2];
  const T* __restrict b = t.values;
  T w[most], v[most];
  for (Index i = 0; i < t.rows; i++) {
    T* __restrict a = t.out + i * (int64_t)width;
    for (int j = 0; j < width; j++) a[j] = 0;
    for (Index k = k_ptr[i]; k < k_ptr[i + 1]; k++) {
      for (int j = 0; j < width; j++) w[j] = 0;
      for (Index l = l_ptr[k]; l < l_ptr[k + 1]; l++) {
        for (int j = 0; j < width; j++) v[j] = 0;
        for (Index m = m_ptr[l]; m < m_ptr[l + 1]; m++) {
          const T* __restrict e = t.row(2, m, width);
          for (int j = 0; j < width; j++) v[j] += b[m] * e[j];
        }
        const T* __restrict d = t.row(1, l, width);
        for (int j = 0; j < width; j++) w[j] += v[j] * d[j];
      }
      const T* __restrict c = t.row(0, k, width);
      for (int j = 0; j < width; j++) a[j] += w[j] * c[j];
    }
  }
}

template <typename T, typename Width>
void order5(const Tensor<T>& t, Width width) {
  const Index *k_ptr = t.ptr[0], *l_ptr = t.ptr[1], *m_ptr = t.ptr[2], *n_ptr = t.ptr[3];
  const T* __restrict b = t.values;
  T w[most], v[most], u[most];
  for (Index i = 0; i < t.rows; i++) {
    T* __restrict a = t.out + i * (int64_t)width;
    for (int j = 0; j < width; j++) a[j] = 0;
    for (Index k = k_ptr[i]; k < k_ptr[i + 1]; k++) {
      for (int j = 0; j < width; j++) w[j] = 0;
      for (Index l = l_ptr[k]; l < l_ptr[k + 1]; l++) {
        for (int j = 0; j < width; j++) v[j] = 0;
        for (Index m = m_ptr[l]; m < m_ptr[l + 1]; m++) {
          for (int j = 0; j < width; j++) u[j] = 0;
          for (Index n = n_ptr[m]; n < n_ptr[m + 1]; n++) {
            const T* __restrict f = t.row(3, n, width);
            for (int j = 0; j < width; j++) u[j] += b[n] * f[j];
          }
          const T* __restrict e = t.row(2, m, width);
          for (int j = 0; j < width; j++) v[j] += u[j] * e[j];
        }
        const T* __restrict d = t.row(1, l, width);
        for (int j = 0; j < width; j++) w[j] += v[j] * d[j];
      }
      const T* __restrict c = t.row(0, k, width);
      for (int j = 0; j < width; j++) a[j] += w[j] * c[j];
    }
  }
}

template <typename T>
struct Row {
  typedef T Vector __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
  static constexpr int count = most * sizeof(T) / 64;
  Vector v[count];
};

// The sum below one element of the level above.
template <typename T, int level, int order>
inline Row<T> below(const Tensor<T>& t, Index parent) {
  Row<T> sum = {};
  for (Index at = t.ptr[level][parent]; at < t.ptr[level][parent + 1]; at++) {
    const Row<T>& factor = *(const Row<T>*)t.row(level, at, most);
    if constexpr (level == order - 2) {
      for (int v = 0; v < Row<T>::count; v++) sum.v[v] += t.values[at] * factor.v[v];
    } else {
      const Row<T> inner = below<T, level + 1, order>(t, at);
      for (int v = 0; v < Row<T>::count; v++) sum.v[v] += inner.v[v] * factor.v[v];
    }
  }
  return sum;
}

template <typename T, int order>
void registers(const Tensor<T>& t) {
  for (Index i = 0; i < t.rows; i++) ((Row<T>*)t.out)[i] = below<T, 0, order>(t, i);
}

template <typename T>
int run(int how, int order, Index rows, Index columns, const void** arrays) {
  Tensor<T> t{rows, columns, {}, {}, (const T*)arrays[1], {}, (T*)arrays[0]};
  for (int n = 0; n < order - 1; n++) {
    t.factor[n] = (const T*)arrays[2 + n];
    t.ptr[n] = (const Index*)arrays[2 + order - 1 + 2 * n];
    t.idx[n] = (const Index*)arrays[2 + order - 1 + 2 * n + 1];
  }
  if (columns != most || order < 3 || order > 5) return 1;
  const std::integral_constant<int, most> constant;
  if (how == 0) order == 3 ? order3(t, constant) : order == 4 ? order4(t, constant) : order5(t, constant);
  if (how == 1) order == 3 ? order3(t, columns) : order == 4 ? order4(t, columns) : order5(t, columns);
  if (how == 2) order == 3 ? registers<T, 3>(t) : order == 4 ? registers<T, 4>(t) : registers<T, 5>(t);
  return 0;
}

}  // namespace

// how : 0 "constant", 1 "variable", 2 "registers"
// arrays : out, values, one factor for each level, then ptr and idx for each level
// Returns 1, and does nothing, for another order or number of columns.
extern "C" int mttkrp_float32(int how, int order, Index rows, Index columns, const void** arrays) {
  return run<float>(how, order, rows, columns, arrays);
}
extern "C" int mttkrp_float64(int how, int order, Index rows, Index columns, const void** arrays) {
  return run<double>(how, order, rows, columns, arrays);
}
