// Any CPU: sixteen "registers" of one lane.
#pragma once

#include <cmath>

namespace trimtab {

using Part = float;
constexpr size_t kPartLanes = 1;

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline Part part_of(float x) { return x; }
inline Part load_part(const float* from) { return *from; }
inline void store_part(float* to, Part a) { *to = a; }

inline Part add(Part a, Part b) { return a + b; }
inline Part sub(Part a, Part b) { return a - b; }
inline Part mul(Part a, Part b) { return a * b; }
inline Part div(Part a, Part b) { return a / b; }
inline Part fma(Part a, Part b, Part c) { return a * b + c; }
inline Part min(Part a, Part b) { return a < b ? a : b; }
inline Part max(Part a, Part b) { return a > b ? a : b; }
inline Part abs(Part a) { return std::fabs(a); }
inline Part round(Part a) { return std::nearbyint(a); }
inline Part times_power_of_two(Part a, Part n) { return a * from_bits(uint32_t(int32_t(n) + 127) << 23); }
inline float sum(Part a) { return a; }
inline float largest(Part a) { return a; }

inline float from_fp16(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000) << 16, exponent = (x >> 10) & 31, mantissa = x & 1023;
  if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(mantissa) * 0x1p-24f;
  if (exponent == 31) return from_bits(sign | 0x7f800000 | mantissa << 13);
  return from_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}
// Rounded to the nearest, ties to even; too large becomes infinite.
inline uint16_t to_fp16(float x) {
  uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (magnitude < 0x38800000) return uint16_t(sign | uint32_t(std::nearbyint(from_bits(magnitude) * 0x1p24f)));
  return uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

inline Part load_fp16_part(const uint16_t* from) { return from_fp16(*from); }
inline Part load_bf16_part(const uint16_t* from) { return from_bits(uint32_t(*from) << 16); }
inline Part load_int8_part(const int8_t* from) { return float(*from); }
inline void store_bf16_part(uint16_t* to, Part a) {
  uint32_t bits = to_bits(a);
  *to = uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void store_int8_part(int8_t* to, Part a) { *to = int8_t(std::nearbyint(a)); }

inline void load_bf16_pairs(const uint16_t* from, Part* even, Part* odd) {
  *even = load_bf16_part(from);
  *odd = load_bf16_part(from + 1);
}

}  // namespace trimtab
