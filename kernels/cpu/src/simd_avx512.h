// AVX-512 F, BW, VL and DQ: one register of sixteen lanes.
#pragma once

#include <immintrin.h>

namespace trimtab {

using Part = __m512;
constexpr size_t kPartLanes = 16;

inline Part part_of(float x) { return _mm512_set1_ps(x); }
inline Part load_part(const float* from) { return _mm512_loadu_ps(from); }
inline void store_part(float* to, Part a) { _mm512_storeu_ps(to, a); }

inline Part add(Part a, Part b) { return _mm512_add_ps(a, b); }
inline Part sub(Part a, Part b) { return _mm512_sub_ps(a, b); }
inline Part mul(Part a, Part b) { return _mm512_mul_ps(a, b); }
inline Part div(Part a, Part b) { return _mm512_div_ps(a, b); }
inline Part fma(Part a, Part b, Part c) { return _mm512_fmadd_ps(a, b, c); }
inline Part min(Part a, Part b) { return _mm512_min_ps(a, b); }
inline Part max(Part a, Part b) { return _mm512_max_ps(a, b); }
inline Part abs(Part a) { return _mm512_abs_ps(a); }
inline Part round(Part a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Part times_power_of_two(Part a, Part n) { return _mm512_scalef_ps(a, n); }
inline float sum(Part a) { return _mm512_reduce_add_ps(a); }
inline float largest(Part a) { return _mm512_reduce_max_ps(a); }

inline Part load_fp16_part(const uint16_t* from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Part load_bf16_part(const uint16_t* from) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline Part load_int8_part(const int8_t* from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void store_bf16_part(uint16_t* to, Part a) {
  __m512i bits = _mm512_castps_si512(a);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  bits = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
inline void store_int8_part(int8_t* to, Part a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
}

// One number in fp16, rounded to the nearest.
inline uint16_t to_fp16(float x) { return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float from_fp16(uint16_t x) { return _cvtsh_ss(x); }

// Pairs of bf16 as two registers: the even and the odd of each pair.
inline void load_bf16_pairs(const uint16_t* from, Part* even, Part* odd) {
  __m512i pairs = _mm512_loadu_si512(from);
  *even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  *odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
}

}  // namespace trimtab
