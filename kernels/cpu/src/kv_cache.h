// One layer's keys or values in the paged cache: blocks of [kv_heads][block_size][head_dim], in one of three types.
#pragma once

#include <cmath>

#include "simd.h"

namespace trimtab {

// Where a block lies: its place among the blocks of its type. The numbers are those of kernels.kv_cache.KVType.
enum class KVType : int32_t { kFull = 0, kInt8 = 1, kInt4 = 2 };

struct Block {
  KVType type;
  int32_t number;
};

struct KVShape {
  size_t num_kv_heads, block_size, head_dim;
};

// One layer's keys (or values), seen as each type: bf16, int8 with an fp16 scale a head and token, or two nibbles a byte
// with an fp16 scale and minimum a head and token. Null where the pool has no such blocks.
struct PagedRows {
  uint16_t* full;
  int8_t* int8;
  uint16_t* int8_scales;
  uint8_t* int4;
  uint16_t* int4_scales;
};

inline size_t row_index(const KVShape& shape, Block block, size_t head, size_t offset) {
  return (size_t(block.number) * shape.num_kv_heads + head) * shape.block_size + offset;
}

// A slot is a block's number times block_size plus the token's place in it.
inline size_t slot_index(const KVShape& shape, size_t slot, size_t head) {
  Block block{KVType::kFull, int32_t(slot / shape.block_size)};
  return row_index(shape, block, head, slot % shape.block_size);
}

// One head's row of one token as floats. head_dim is a multiple of 16.
inline void read_row(const PagedRows& rows, const KVShape& shape, Block block, size_t index, float* to) {
  size_t dim = shape.head_dim;
  switch (block.type) {
    case KVType::kFull:
      for (size_t i = 0; i < dim; i += kLanes) store(to + i, load_bf16(rows.full + index * dim + i));
      return;
    case KVType::kInt8: {
      F32x16 scale = broadcast(from_fp16(rows.int8_scales[index]));
      for (size_t i = 0; i < dim; i += kLanes) store(to + i, load_int8(rows.int8 + index * dim + i) * scale);
      return;
    }
    case KVType::kInt4: {
      const uint8_t* from = rows.int4 + index * (dim / 2);
      float scale = from_fp16(rows.int4_scales[2 * index]), minimum = from_fp16(rows.int4_scales[2 * index + 1]);
      for (size_t i = 0; i < dim / 2; ++i) {
        to[2 * i] = float(from[i] & 15) * scale + minimum;
        to[2 * i + 1] = float(from[i] >> 4) * scale + minimum;
      }
      return;
    }
  }
}

inline float clamp(float x, float low, float high) { return x < low ? low : x > high ? high : x; }

// Stores one head's row of one token. Scales are rounded first, and values against the scales as stored.
inline void write_row(const PagedRows& rows, const KVShape& shape, KVType type, size_t index, const float* from) {
  size_t dim = shape.head_dim;
  switch (type) {
    case KVType::kFull:
      for (size_t i = 0; i < dim; i += kLanes) store_bf16(rows.full + index * dim + i, load(from + i));
      return;
    case KVType::kInt8: {
      F32x16 peak = broadcast(0.0f);
      for (size_t i = 0; i < dim; i += kLanes) peak = max(peak, abs(load(from + i)));
      uint16_t stored = to_fp16(std::fmax(largest(peak) / 127.0f, 1e-7f));
      rows.int8_scales[index] = stored;
      F32x16 scale = broadcast(from_fp16(stored)), bound = broadcast(127.0f);
      for (size_t i = 0; i < dim; i += kLanes) {
        F32x16 quants = round(load(from + i) / scale);
        store_int8(rows.int8 + index * dim + i, min(max(quants, broadcast(-127.0f)), bound));
      }
      return;
    }
    case KVType::kInt4: {
      float low = from[0], high = from[0];
      for (size_t i = 1; i < dim; ++i) {
        low = from[i] < low ? from[i] : low;
        high = from[i] > high ? from[i] : high;
      }
      float range = high - low < 1e-6f ? 1e-6f : high - low;
      uint16_t* stored = rows.int4_scales + 2 * index;
      stored[0] = to_fp16(range / 15.0f);
      stored[1] = to_fp16(low);
      float scale = from_fp16(stored[0]), minimum = from_fp16(stored[1]);
      uint8_t* to = rows.int4 + index * (dim / 2);
      for (size_t i = 0; i < dim / 2; ++i) {
        uint8_t first = uint8_t(clamp(std::nearbyint((from[2 * i] - minimum) / scale), 0.0f, 15.0f));
        uint8_t second = uint8_t(clamp(std::nearbyint((from[2 * i + 1] - minimum) / scale), 0.0f, 15.0f));
        to[i] = uint8_t(first | second << 4);
      }
      return;
    }
  }
}

}  // namespace trimtab
