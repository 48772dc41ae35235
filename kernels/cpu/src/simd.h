// Sixteen lanes of float, whatever the CPU has: kParts registers (`Part`) of kPartLanes lanes.
//
// A header for each instruction set defines `Part` and its operations; the kernels are written once over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

namespace trimtab {
constexpr size_t kLanes = 16;
}

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

namespace trimtab {

constexpr size_t kParts = kLanes / kPartLanes;

struct F32x16 {
  Part part[kParts];
};

template <class Function>
inline F32x16 each_part(Function function) {
  F32x16 out;
  for (size_t p = 0; p < kParts; ++p) out.part[p] = function(p);
  return out;
}

inline F32x16 broadcast(float x) {
  return each_part([&](size_t) { return part_of(x); });
}
inline F32x16 load(const float* from) {
  return each_part([&](size_t p) { return load_part(from + p * kPartLanes); });
}
inline F32x16 load_fp16(const uint16_t* from) {
  return each_part([&](size_t p) { return load_fp16_part(from + p * kPartLanes); });
}
inline F32x16 load_bf16(const uint16_t* from) {
  return each_part([&](size_t p) { return load_bf16_part(from + p * kPartLanes); });
}
inline F32x16 load_int8(const int8_t* from) {
  return each_part([&](size_t p) { return load_int8_part(from + p * kPartLanes); });
}
inline void store(float* to, F32x16 a) {
  for (size_t p = 0; p < kParts; ++p) store_part(to + p * kPartLanes, a.part[p]);
}
// Rounds to the nearest; ties go to even.
inline void store_bf16(uint16_t* to, F32x16 a) {
  for (size_t p = 0; p < kParts; ++p) store_bf16_part(to + p * kPartLanes, a.part[p]);
}
// Rounds to the nearest; the values lie within [-127, 127].
inline void store_int8(int8_t* to, F32x16 a) {
  for (size_t p = 0; p < kParts; ++p) store_int8_part(to + p * kPartLanes, a.part[p]);
}

inline F32x16 operator+(F32x16 a, F32x16 b) {
  return each_part([&](size_t p) { return add(a.part[p], b.part[p]); });
}
inline F32x16 operator-(F32x16 a, F32x16 b) {
  return each_part([&](size_t p) { return sub(a.part[p], b.part[p]); });
}
inline F32x16 operator*(F32x16 a, F32x16 b) {
  return each_part([&](size_t p) { return mul(a.part[p], b.part[p]); });
}
inline F32x16 operator/(F32x16 a, F32x16 b) {
  return each_part([&](size_t p) { return div(a.part[p], b.part[p]); });
}
inline F32x16 fma(F32x16 a, F32x16 b, F32x16 c) {
  return each_part([&](size_t p) { return fma(a.part[p], b.part[p], c.part[p]); });
}
inline F32x16 min(F32x16 a, F32x16 b) {
  return each_part([&](size_t p) { return min(a.part[p], b.part[p]); });
}
inline F32x16 max(F32x16 a, F32x16 b) {
  return each_part([&](size_t p) { return max(a.part[p], b.part[p]); });
}
inline F32x16 abs(F32x16 a) {
  return each_part([&](size_t p) { return abs(a.part[p]); });
}
inline F32x16 round(F32x16 a) {
  return each_part([&](size_t p) { return round(a.part[p]); });
}

inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

inline float sum(F32x16 a) {
  Part all = a.part[0];
  for (size_t p = 1; p < kParts; ++p) all = add(all, a.part[p]);
  return sum(all);
}
inline float largest(F32x16 a) {
  Part all = a.part[0];
  for (size_t p = 1; p < kParts; ++p) all = max(all, a.part[p]);
  return largest(all);
}

// e to the x, within 2 ulp; x is clamped to [-87, 88]. Cody and Waite's reduction by ln 2 in two parts, then Taylor's
// polynomial of degree 6 over [-ln 2 / 2, ln 2 / 2].
inline F32x16 exp(F32x16 x) {
  x = min(max(x, broadcast(-87.0f)), broadcast(88.0f));
  F32x16 n = round(x * broadcast(1.44269504088896341f));
  F32x16 r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  F32x16 p = broadcast(1.0f / 720);
  for (float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = fma(p, r, broadcast(coefficient));
  return each_part([&](size_t i) { return times_power_of_two(p.part[i], n.part[i]); });
}

}  // namespace trimtab
