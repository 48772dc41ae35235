// Sums of products of bytes: what differs between instruction sets in the int4 and int8 products.
//
// A group is 16 output rows by 32 columns. Four columns of a row lie beside each other, and the 16 rows of the same
// four columns make a step of 64 bytes; a group has eight steps. A part is as many rows as a register has lanes.
#pragma once

#include "activations.h"

namespace trimtab {

constexpr size_t kSteps = 8;
constexpr size_t kStepBytes = 64;

inline int32_t four_bytes(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof four);
  return four;
}

#if defined(__AVX512VNNI__)

struct PartSteps {
  __m512i step[kSteps];
};

// The low nibbles of 256 bytes are the even steps, the high ones the odd steps.
inline PartSteps load_int4_steps(const uint8_t* nibbles, size_t) {
  PartSteps steps;
  __m512i low = _mm512_set1_epi8(15);
  for (size_t i = 0; i < kSteps / 2; ++i) {
    __m512i both = _mm512_loadu_si512(nibbles + kStepBytes * i);
    steps.step[2 * i] = _mm512_and_si512(both, low);
    steps.step[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
  }
  return steps;
}

// Signed weights become unsigned by adding 128, which scaled_dot_int8 takes away again.
inline PartSteps load_int8_steps(const uint8_t* values, size_t) {
  PartSteps steps;
  for (size_t i = 0; i < kSteps; ++i)
    steps.step[i] = _mm512_xor_si512(_mm512_loadu_si512(values + kStepBytes * i), _mm512_set1_epi8(-128));
  return steps;
}

inline Part dot_int4(const PartSteps& steps, const uint8_t* activations) {
  __m512i sums = _mm512_setzero_si512();
  for (size_t i = 0; i < kSteps; ++i)
    sums = _mm512_dpbusd_epi32(sums, steps.step[i], _mm512_set1_epi32(four_bytes(activations + 4 * i)));
  return _mm512_cvtepi32_ps(sums);
}
inline Part scaled_dot_int8(const PartSteps& steps, const uint8_t* activations, GroupScale own) {
  return fma(dot_int4(steps, activations), part_of(own.scale), part_of(-128.0f * own.sum));
}

#elif defined(__AVX2__)

struct PartSteps {
  __m256i step[kSteps];
};

inline PartSteps load_int4_steps(const uint8_t* nibbles, size_t part) {
  PartSteps steps;
  __m256i low = _mm256_set1_epi8(15);
  for (size_t i = 0; i < kSteps / 2; ++i) {
    __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(nibbles + kStepBytes * i + 32 * part));
    steps.step[2 * i] = _mm256_and_si256(both, low);
    steps.step[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
  }
  return steps;
}

inline PartSteps load_int8_steps(const uint8_t* values, size_t part) {
  PartSteps steps;
  for (size_t i = 0; i < kSteps; ++i)
    steps.step[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + kStepBytes * i + 32 * part));
  return steps;
}

// Sums of pairs stay in 16 bits over a whole group: 16 products of at most 15 * 127 are 30,480.
inline Part dot_int4(const PartSteps& steps, const uint8_t* activations) {
  __m256i sums = _mm256_setzero_si256();
  for (size_t i = 0; i < kSteps; ++i) {
    __m256i four = _mm256_set1_epi32(four_bytes(activations + 4 * i));
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(steps.step[i], four));
  }
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
}

// Magnitudes of the weights times activations that took over their signs: a pair is at most 2 * 127 * 127 = 32,258.
inline Part scaled_dot_int8(const PartSteps& steps, const uint8_t* activations, GroupScale own) {
  __m256i sums = _mm256_setzero_si256(), ones = _mm256_set1_epi16(1);
  for (size_t i = 0; i < kSteps; ++i) {
    __m256i four = _mm256_set1_epi32(four_bytes(activations + 4 * i));
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(steps.step[i]), _mm256_sign_epi8(four, steps.step[i]));
    sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
  }
  return mul(_mm256_cvtepi32_ps(sums), part_of(own.scale));
}

#else

struct PartSteps {
  int8_t step[kSteps][4];
};

inline PartSteps load_int4_steps(const uint8_t* nibbles, size_t part) {
  PartSteps steps;
  for (size_t i = 0; i < kSteps; ++i)
    for (size_t k = 0; k < 4; ++k)
      steps.step[i][k] = int8_t(nibbles[kStepBytes * (i / 2) + 4 * part + k] >> (4 * (i % 2)) & 15);
  return steps;
}

inline PartSteps load_int8_steps(const uint8_t* values, size_t part) {
  PartSteps steps;
  for (size_t i = 0; i < kSteps; ++i) std::memcpy(steps.step[i], values + kStepBytes * i + 4 * part, 4);
  return steps;
}

inline Part dot_int4(const PartSteps& steps, const uint8_t* activations) {
  int32_t sum = 0;
  for (size_t i = 0; i < kSteps; ++i)
    for (size_t k = 0; k < 4; ++k) sum += steps.step[i][k] * int8_t(activations[4 * i + k]);
  return float(sum);
}
inline Part scaled_dot_int8(const PartSteps& steps, const uint8_t* activations, GroupScale own) {
  return dot_int4(steps, activations) * own.scale;
}

#endif

}  // namespace trimtab
