// Blocks of floats, rows to columns.
#pragma once

#include "simd.h"

namespace trimtab {

constexpr size_t kTransposed = 8;

// to[column][row] = from[row][column] for eight rows and columns; strides are in floats.
inline void transpose_8x8(const float* from, size_t from_stride, float* to, size_t to_stride) {
#if defined(__AVX2__)
  __m256 rows[8], pairs[8], fours[8];
  for (size_t i = 0; i < 8; ++i) rows[i] = _mm256_loadu_ps(from + i * from_stride);
  for (size_t i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
  }
  for (size_t i = 0; i < 8; i += 4)
    for (size_t j = 0; j < 2; ++j) {
      fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
      fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
    }
  for (size_t i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * to_stride, _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31));
  }
#else
  for (size_t i = 0; i < 8; ++i)
    for (size_t j = 0; j < 8; ++j) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

}  // namespace trimtab
