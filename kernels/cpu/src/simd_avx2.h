// AVX2 with FMA and F16C: two registers of eight lanes.
#pragma once

#include <immintrin.h>

namespace trimtab {

using Part = __m256;
constexpr size_t kPartLanes = 8;

inline Part part_of(float x) { return _mm256_set1_ps(x); }
inline Part load_part(const float* from) { return _mm256_loadu_ps(from); }
inline void store_part(float* to, Part a) { _mm256_storeu_ps(to, a); }

inline Part add(Part a, Part b) { return _mm256_add_ps(a, b); }
inline Part sub(Part a, Part b) { return _mm256_sub_ps(a, b); }
inline Part mul(Part a, Part b) { return _mm256_mul_ps(a, b); }
inline Part div(Part a, Part b) { return _mm256_div_ps(a, b); }
inline Part fma(Part a, Part b, Part c) { return _mm256_fmadd_ps(a, b, c); }
inline Part min(Part a, Part b) { return _mm256_min_ps(a, b); }
inline Part max(Part a, Part b) { return _mm256_max_ps(a, b); }
inline Part abs(Part a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline Part round(Part a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Part times_power_of_two(Part a, Part n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline float sum(Part a) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
inline float largest(Part a) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

inline Part load_fp16_part(const uint16_t* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Part load_bf16_part(const uint16_t* from) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline Part load_int8_part(const int8_t* from) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline void store_bf16_part(uint16_t* to, Part a) {
  __m256i bits = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  bits = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
inline void store_int8_part(int8_t* to, Part a) {
  __m256i wide = _mm256_cvtps_epi32(a);
  __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(words, words));
}

// One number in fp16, rounded to the nearest.
inline uint16_t to_fp16(float x) { return uint16_t(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
inline float from_fp16(uint16_t x) { return _cvtsh_ss(x); }

// Pairs of bf16 as two registers: the even and the odd of each pair.
inline void load_bf16_pairs(const uint16_t* from, Part* even, Part* odd) {
  __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  *even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  *odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000u))));
}

}  // namespace trimtab
