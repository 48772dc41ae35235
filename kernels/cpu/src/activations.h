// Rows of activations as the products read them: int8 in groups of 32, or plain floats.
#pragma once

#include "simd.h"

namespace trimtab {

// How many rows share what was unpacked of a panel of weights: as many as there are registers for.
#if defined(__AVX512F__)
constexpr size_t kRowTile = 12;
#else
constexpr size_t kRowTile = 8;
#endif

constexpr size_t kGroup = 32;  // columns that share a scale, of weights and of activations alike

// One group's scale, and the scaled sum of its rounded values (what a minimum or an offset of the weights is due).
struct GroupScale {
  float scale;
  float sum;
};

// Tiles of kRowTile rows (the last may have fewer), so that a product walks through one stream of memory: for each
// group the rows' 32 values each, then their scales. Columns are a multiple of 64.
struct Int8Rows {
  uint8_t* bytes;
  size_t rows;
  size_t columns;

  static constexpr size_t kRowBytes = kGroup + sizeof(GroupScale);  // of one group

  static size_t num_bytes(size_t rows, size_t columns) { return rows * (columns / kGroup) * kRowBytes; }
  const uint8_t* tile(size_t m) const { return bytes + num_bytes(m, columns); }

  // Rounds symmetrically, against the group's largest magnitude.
  void put_group(size_t m, size_t group, F32x16 first, F32x16 second) const {
    size_t start = m / kRowTile * kRowTile, row = m - start;
    size_t tile_rows = rows - start < kRowTile ? rows - start : kRowTile;
    uint8_t* to = bytes + num_bytes(start, columns) + group * tile_rows * kRowBytes;
    float peak = largest(max(abs(first), abs(second)));
    F32x16 inverse = broadcast(peak > 0.0f ? 127.0f / peak : 0.0f);
    first = round(first * inverse);
    second = round(second * inverse);
    int8_t* values = reinterpret_cast<int8_t*>(to + row * kGroup);
    store_int8(values, first);
    store_int8(values + kLanes, second);
    float scale = peak / 127.0f;
    GroupScale own = {scale, scale * sum(first + second)};
    std::memcpy(to + tile_rows * kGroup + row * sizeof own, &own, sizeof own);
  }
};

// Rows one after the other.
struct FloatRows {
  uint8_t* bytes;
  size_t rows;
  size_t columns;

  static size_t num_bytes(size_t rows, size_t columns) { return rows * columns * sizeof(float); }
  const uint8_t* tile(size_t m) const { return bytes + num_bytes(m, columns); }

  void put_group(size_t m, size_t group, F32x16 first, F32x16 second) const {
    float* to = reinterpret_cast<float*>(bytes + num_bytes(m, columns)) + kGroup * group;
    store(to, first);
    store(to + kLanes, second);
  }
};

}  // namespace trimtab
