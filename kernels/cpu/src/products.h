// Rows of activations times weights, as units of work for a pool.
#pragma once

#include <algorithm>

#include "threads.h"
#include "weights.h"

namespace trimtab {

enum class Format : int32_t { kInt4 = 0, kInt8 = 1, kBf16 = 2 };

struct Weight {
  const uint8_t* panels;
  int64_t columns;  // padded to a multiple of 64
  int64_t num_panels;
  Format format;
};

template <class Function>
inline auto with_format(Format format, Function function) {
  switch (format) {
    case Format::kInt4: return function(Int4{});
    case Format::kInt8: return function(Int8{});
    default: return function(Bf16{});
  }
}

inline size_t rows_bytes(const Weight& weight, size_t rows) {
  return with_format(weight.format, [&](auto format) {
    return decltype(format)::Rows::num_bytes(rows, size_t(weight.columns));
  });
}

// Stores `from` [columns] as row m of `rows` rows that `weight` is multiplied with.
inline void put_row(const Weight& weight, uint8_t* bytes, size_t rows, size_t m, const float* from) {
  with_format(weight.format, [&](auto format) {
    typename decltype(format)::Rows to{bytes, rows, size_t(weight.columns)};
    for (size_t g = 0; g < to.columns / kGroup; ++g)
      to.put_group(m, g, load(from + kGroup * g), load(from + kGroup * g + kLanes));
  });
}

// to [columns] = one output row of `weight`: an embedding.
inline void look_up(const Weight& weight, size_t row, float* to) {
  with_format(weight.format, [&](auto format) {
    using W = decltype(format);
    size_t columns = size_t(weight.columns);
    W::look_up(weight.panels + row / kLanes * W::panel_bytes(columns), row % kLanes, columns, to);
  });
}

constexpr size_t kMaxPanels = 16;  // that are multiplied together

// What a tile of rows and some panels beside each other give.
struct TileProducts {
  alignas(64) float values[kMaxPanels][kRowTile][kLanes];
};

constexpr size_t kChunkRows = 8 * kRowTile;  // rows of one unit of work

template <class W, size_t kRows = kRowTile>
inline void multiply_tile(const uint8_t* panel, const typename W::Rows& in, size_t m, size_t rows, float* out) {
  if (rows == kRows)
    W::template multiply<kRows>(panel, in.tile(m), in.columns, out);
  else if constexpr (kRows > 1)
    multiply_tile<W, kRows - 1>(panel, in, m, rows, out);
}

// Multiplies `rows` rows with `weight`, `panels` panels at a time, and hands every tile to
// consume(first panel / panels, first row, number of rows, products).
template <class Function>
inline void multiply_phase(Pool& pool, size_t thread, const Weight& weight, size_t panels, uint8_t* in_bytes,
                           size_t rows, Function consume) {
  size_t num_pieces = size_t(weight.num_panels) / panels, num_chunks = (rows + kChunkRows - 1) / kChunkRows;
  with_format(weight.format, [&](auto format) {
    using W = decltype(format);
    typename W::Rows in{in_bytes, rows, size_t(weight.columns)};
    size_t panel_bytes = W::panel_bytes(in.columns);
    pool.phase(thread, num_pieces * num_chunks, [&](size_t unit) {
      size_t piece = unit % num_pieces, first = unit / num_pieces * kChunkRows;
      size_t end = std::min(rows, first + kChunkRows);
      TileProducts products;
      for (size_t m = first; m < end; m += kRowTile) {
        size_t count = std::min(kRowTile, end - m);
        for (size_t j = 0; j < panels; ++j)
          multiply_tile<W>(weight.panels + (piece * panels + j) * panel_bytes, in, m, count,
                           &products.values[j][0][0]);
        consume(piece, m, count, products);
      }
    });
  });
}

}  // namespace trimtab
