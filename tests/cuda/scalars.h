// float16 and bfloat16 as CUDA has them: arithmetic in float32, rounded to nearest even.
//
// A sum, product or quotient of float32 rounded again to 11 or 8 bits is the one rounded once.
#pragma once
#include <stdint.h>
#include <string.h>

namespace cuda {

#define CUDA_INLINE inline __attribute__((always_inline))

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

struct Half {  // 5 bits of exponent, 10 of fraction
  static uint16_t narrow(float value) {
    uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return 0x7fff;                  // NaN, as CUDA gives it
    if (rest >= 0x477ff000) return sign | 0x7c00;          // rounds to infinity
    if (rest < 0x38800000)                                 // less than the least normal number:
      return sign | (bits_of(from_bits(rest) + 0.5f) - bits_of(0.5f));  // the sum rounds
    return sign | ((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
  }
  static float widen(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    if (rest < 0x400) {
      float value = rest * 0x1p-24f;
      return sign ? -value : value;
    }
    return from_bits(sign | ((rest << 13) + 0x38000000));
  }
};

struct Brain {  // the upper half of a float32
  static uint16_t narrow(float value) {
    uint32_t bits = bits_of(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  static float widen(uint16_t half) { return from_bits(uint32_t(half) << 16); }
};

template <class Format>
struct Small {
  uint16_t bits;
  Small() = default;
  Small(float value) : bits(Format::narrow(value)) {}
  Small(double value) : bits(Format::narrow(static_cast<float>(value))) {}
  Small(int value) : Small(static_cast<float>(value)) {}
  Small(unsigned value) : Small(static_cast<float>(value)) {}
  Small(long value) : Small(static_cast<float>(value)) {}
  Small(unsigned long value) : Small(static_cast<float>(value)) {}
  Small(long long value) : Small(static_cast<float>(value)) {}
  Small(unsigned long long value) : Small(static_cast<float>(value)) {}
  Small(short value) : Small(static_cast<float>(value)) {}
  Small(unsigned short value) : Small(static_cast<float>(value)) {}
  operator float() const { return Format::widen(bits); }
#define CUDA_SMALL(op)                                                                   \
  friend Small operator op(Small a, Small b) { return Small(float(a) op float(b)); }     \
  Small& operator op##=(Small other) { return *this = *this op other; }
  CUDA_SMALL(+) CUDA_SMALL(-) CUDA_SMALL(*) CUDA_SMALL(/)
#undef CUDA_SMALL
#define CUDA_SMALL(op) \
  friend bool operator op(Small a, Small b) { return float(a) op float(b); }
  CUDA_SMALL(==) CUDA_SMALL(!=) CUDA_SMALL(<) CUDA_SMALL(<=) CUDA_SMALL(>) CUDA_SMALL(>=)
#undef CUDA_SMALL
  friend Small operator-(Small a) {
    a.bits ^= 0x8000;
    return a;
  }
};

}  // namespace cuda

using __half = cuda::Small<cuda::Half>;
using half = __half;
using __nv_bfloat16 = cuda::Small<cuda::Brain>;
using nv_bfloat16 = __nv_bfloat16;
