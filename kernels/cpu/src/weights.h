// Weights as panels: 16 output rows over all columns, contiguous. A format is a type with
//
//   Rows                                        the activations that it is multiplied with
//   panel_bytes(columns)                        columns are a multiple of 64
//   multiply<kRows>(panel, tile, columns, out)  one tile of kRows rows times one panel: [kRows][16] floats
//   look_up(panel, lane, columns, to)           one output row as floats: an embedding
#pragma once

#include "dot.h"

namespace trimtab {

inline const uint16_t* halves(const uint8_t* bytes) { return reinterpret_cast<const uint16_t*>(bytes); }

// A few rows wait for memory: one pass, in the order of the panel. Many rows wait for registers: one pass for each part.
// The order in which a row's products are added is the same either way.
constexpr size_t kOnePassRows = 2;

// Sums over the groups of a tile. `load_group(g, p)` gives what part p of group g adds to a row's sum.
template <size_t kRows, class Load>
inline void multiply_groups(size_t columns, const uint8_t* tile, float* out, Load load_group) {
  constexpr size_t kPasses = kRows <= kOnePassRows ? 1 : kParts, kTogether = kParts / kPasses;
  for (size_t pass = 0; pass < kPasses; ++pass) {
    Part sums[kTogether][kRows];
    for (auto& part : sums)
      for (Part& sum : part) sum = part_of(0.0f);
    const uint8_t* rows = tile;
    for (size_t g = 0; g < columns / kGroup; ++g, rows += kRows * Int8Rows::kRowBytes) {
      const GroupScale* own = reinterpret_cast<const GroupScale*>(rows + kRows * kGroup);
      for (size_t p = 0; p < kTogether; ++p) {
        auto add_group = load_group(g, pass * kTogether + p);
        for (size_t i = 0; i < kRows; ++i) sums[p][i] = add_group(rows + kGroup * i, own[i], sums[p][i]);
      }
    }
    for (size_t p = 0; p < kTogether; ++p)
      for (size_t i = 0; i < kRows; ++i)
        store_part(out + kLanes * i + kPartLanes * (pass * kTogether + p), sums[p][i]);
  }
}

// weight = nibble * scale + minimum: 256 bytes of nibbles, 16 scales and 16 minima in fp16 for a group.
struct Int4 {
  using Rows = Int8Rows;
  static constexpr size_t kGroupBytes = 320;

  static size_t panel_bytes(size_t columns) { return columns / kGroup * kGroupBytes; }

  template <size_t kRows>
  static void multiply(const uint8_t* panel, const uint8_t* tile, size_t columns, float* out) {
    multiply_groups<kRows>(columns, tile, out, [panel](size_t g, size_t p) {
      const uint8_t* group = panel + g * kGroupBytes;
      PartSteps steps = load_int4_steps(group, p);
      Part scales = load_fp16_part(halves(group + 256) + kPartLanes * p);
      Part minima = load_fp16_part(halves(group + 288) + kPartLanes * p);
      return [=](const uint8_t* activations, GroupScale own, Part sum) {
        Part products = mul(dot_int4(steps, activations), part_of(own.scale));
        return fma(products, scales, fma(minima, part_of(own.sum), sum));
      };
    });
  }

  static void look_up(const uint8_t* panel, size_t lane, size_t columns, float* to) {
    for (size_t k = 0; k < columns; ++k) {
      const uint8_t* group = panel + k / kGroup * kGroupBytes;
      size_t step = k % kGroup / 4;
      uint8_t both = group[kStepBytes * (step / 2) + 4 * lane + k % 4];
      float scale = from_fp16(halves(group + 256)[lane]), minimum = from_fp16(halves(group + 288)[lane]);
      to[k] = float(both >> (4 * (step % 2)) & 15) * scale + minimum;
    }
  }
};

// weight = value * scale: two groups of 512 bytes, then their 32 scales in fp16 (so that values keep to cache lines).
struct Int8 {
  using Rows = Int8Rows;
  static constexpr size_t kPairBytes = 1088;

  static size_t panel_bytes(size_t columns) { return columns / (2 * kGroup) * kPairBytes; }
  static const uint8_t* values(const uint8_t* panel, size_t group) {
    return panel + group / 2 * kPairBytes + 512 * (group % 2);
  }
  static const uint16_t* scales(const uint8_t* panel, size_t group) {
    return halves(panel + group / 2 * kPairBytes + 1024) + kLanes * (group % 2);
  }

  template <size_t kRows>
  static void multiply(const uint8_t* panel, const uint8_t* tile, size_t columns, float* out) {
    multiply_groups<kRows>(columns, tile, out, [panel](size_t g, size_t p) {
      PartSteps steps = load_int8_steps(values(panel, g), p);
      Part weight_scales = load_fp16_part(scales(panel, g) + kPartLanes * p);
      return [=](const uint8_t* activations, GroupScale own, Part sum) {
        return fma(scaled_dot_int8(steps, activations, own), weight_scales, sum);
      };
    });
  }

  static void look_up(const uint8_t* panel, size_t lane, size_t columns, float* to) {
    for (size_t k = 0; k < columns; ++k) {
      int8_t value = int8_t(values(panel, k / kGroup)[kStepBytes * (k % kGroup / 4) + 4 * lane + k % 4]);
      to[k] = float(value) * from_fp16(scales(panel, k / kGroup)[lane]);
    }
  }
};

// bf16 in pairs of columns: 16 rows of two columns are 64 bytes.
struct Bf16 {
  using Rows = FloatRows;

  static size_t panel_bytes(size_t columns) { return columns * kLanes * 2; }

  template <size_t kRows>
  static void multiply(const uint8_t* panel, const uint8_t* tile, size_t columns, float* out) {
    const float* rows = reinterpret_cast<const float*>(tile);
    constexpr size_t kPasses = kRows <= kOnePassRows ? 1 : kParts, kTogether = kParts / kPasses;
    for (size_t pass = 0; pass < kPasses; ++pass) {
      Part evens[kTogether][kRows], odds[kTogether][kRows];
      for (size_t p = 0; p < kTogether; ++p)
        for (size_t i = 0; i < kRows; ++i) evens[p][i] = odds[p][i] = part_of(0.0f);
      for (size_t k = 0; k < columns; k += 2)
        for (size_t p = 0; p < kTogether; ++p) {
          Part even, odd;
          load_bf16_pairs(halves(panel) + kLanes * k + 2 * kPartLanes * (pass * kTogether + p), &even, &odd);
          for (size_t i = 0; i < kRows; ++i) {
            const float* x = rows + i * columns + k;
            evens[p][i] = fma(even, part_of(x[0]), evens[p][i]);
            odds[p][i] = fma(odd, part_of(x[1]), odds[p][i]);
          }
        }
      for (size_t p = 0; p < kTogether; ++p)
        for (size_t i = 0; i < kRows; ++i)
          store_part(out + kLanes * i + kPartLanes * (pass * kTogether + p), add(evens[p][i], odds[p][i]));
    }
  }

  static void look_up(const uint8_t* panel, size_t lane, size_t columns, float* to) {
    for (size_t k = 0; k < columns; ++k)
      to[k] = from_bf16(halves(panel)[kLanes * (k - k % 2) + 2 * lane + k % 2]);
  }
};

}  // namespace trimtab
