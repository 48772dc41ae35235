// Causal attention over the paged cache: tiles of queries against 32 keys at a time, with a running softmax.
//
// A row of a tile is one query head of one token; the query heads that share a KV head are rows of one tile. The keys of
// few queries are split, so that every thread has work, and the parts merged afterwards (Dao et al., "Flash-Decoding for
// long-context inference", 2023; the running softmax: Milakov and Gimelshein, arXiv 1805.02867).
#pragma once

#include <algorithm>
#include <vector>

#include "kv_cache.h"
#include "transpose.h"

namespace trimtab {

// One sequence's queries in the batch, its context length (the queries included) and where its block table starts.
struct Span {
  int32_t query_start, query_len, context_len, table_start;
};

// Some queries of a span, one KV head, and the keys from first_key on. Its results are rows of the partial sums.
struct AttentionTile {
  Span span;
  size_t kv_head, first_query, num_queries, first_key, end_key, first_row;
};

// Where the partial sums of one token's heads are: head h of kv head j is row
// first_row + j * kv_head_rows + split * split_rows + h.
struct TokenParts {
  size_t first_row, kv_head_rows, split_rows, num_splits;
};

// Sums of exp(score - peak) * value, and of the exponentials alone.
struct PartialSums {
  float* values;  // [rows][head_dim]
  float* peaks;   // [rows]
  float* totals;  // [rows]
};

struct AttentionPlan {
  std::vector<AttentionTile> tiles;
  std::vector<TokenParts> tokens;  // one for each token of the batch
  size_t num_rows = 0;
};

constexpr size_t kKeys = 32;
constexpr size_t kTileRows = 48;
constexpr size_t kSplitQueries = 8;  // decode and the check of drafts; longer queries are prefill, tiles enough
constexpr size_t kSplitKeys = 128;
constexpr float kMasked = -1e30f;

inline size_t queries_a_tile(size_t group) { return std::max(size_t(1), kTileRows / group); }

// `group` query heads share a KV head. How a sequence is split depends on that sequence alone, so that its results are
// the same to the bit whoever shares the batch.
inline void plan_attention(const Span* spans, size_t num_spans, size_t num_kv_heads, size_t group, AttentionPlan* plan) {
  plan->tiles.clear();
  plan->tokens.clear();
  plan->num_rows = 0;
  size_t queries = queries_a_tile(group);
  for (size_t s = 0; s < num_spans; ++s) {
    const Span& span = spans[s];
    size_t query_len = size_t(span.query_len), past = size_t(span.context_len) - query_len;
    for (size_t first = 0; first < query_len; first += queries) {
      size_t count = std::min(queries, query_len - first), end_key = past + first + count;
      size_t splits = query_len > kSplitQueries ? 1 : (end_key + kSplitKeys - 1) / kSplitKeys;
      size_t tile_rows = count * group;
      for (size_t i = 0; i < count; ++i)
        plan->tokens.push_back({plan->num_rows + i * group, splits * tile_rows, tile_rows, splits});
      for (size_t kv_head = 0; kv_head < num_kv_heads; ++kv_head)
        for (size_t split = 0; split < splits; ++split) {
          size_t from = split * kSplitKeys, to = split + 1 == splits ? end_key : from + kSplitKeys;
          plan->tiles.push_back({span, kv_head, first, count, from, to, plan->num_rows});
          plan->num_rows += tile_rows;
        }
    }
  }
}

// c[rows][width] (+)= a[rows][depth] * b[depth][width]; kRows * kCols registers hold the sums.
template <size_t kRows, size_t kCols>
inline void multiply_block(const float* a, size_t a_stride, size_t depth, const float* b, size_t b_stride, float* c,
                           size_t c_stride, bool adds) {
  Part sums[kRows][kCols];
  for (size_t i = 0; i < kRows; ++i)
    for (size_t j = 0; j < kCols; ++j)
      sums[i][j] = adds ? load_part(c + i * c_stride + j * kPartLanes) : part_of(0.0f);
  for (size_t k = 0; k < depth; ++k) {
    Part columns[kCols];
    for (size_t j = 0; j < kCols; ++j) columns[j] = load_part(b + k * b_stride + j * kPartLanes);
    for (size_t i = 0; i < kRows; ++i) {
      Part x = part_of(a[i * a_stride + k]);
      for (size_t j = 0; j < kCols; ++j) sums[i][j] = fma(x, columns[j], sums[i][j]);
    }
  }
  for (size_t i = 0; i < kRows; ++i)
    for (size_t j = 0; j < kCols; ++j) store_part(c + i * c_stride + j * kPartLanes, sums[i][j]);
}

constexpr size_t kBlockRows = 6;

template <size_t kRows = kBlockRows>
inline void multiply_rows(size_t rows, const float* a, size_t a_stride, size_t depth, const float* b, size_t b_stride,
                          size_t width, float* c, size_t c_stride, bool adds) {
  if (rows < kRows) {
    if constexpr (kRows > 1)
      multiply_rows<kRows - 1>(rows, a, a_stride, depth, b, b_stride, width, c, c_stride, adds);
    return;
  }
  size_t column = 0;
  for (; column + 2 * kPartLanes <= width; column += 2 * kPartLanes)
    multiply_block<kRows, 2>(a, a_stride, depth, b + column, b_stride, c + column, c_stride, adds);
  for (; column < width; column += kPartLanes)
    multiply_block<kRows, 1>(a, a_stride, depth, b + column, b_stride, c + column, c_stride, adds);
}

inline void multiply(size_t rows, const float* a, size_t a_stride, size_t depth, const float* b, size_t b_stride,
                     size_t width, float* c, size_t c_stride, bool adds) {
  for (size_t i = 0; i < rows; i += kBlockRows)
    multiply_rows(std::min(kBlockRows, rows - i), a + i * a_stride, a_stride, depth, b, b_stride, width,
                  c + i * c_stride, c_stride, adds);
}

// Runs tiles on one thread, in scratch memory of its own.
class Attention {
 public:
  Attention(const KVShape& shape, size_t group, float* scratch)
      : shape_(shape), group_(group), dim_(shape.head_dim), keys_(scratch) {
    turned_keys_ = keys_ + kKeys * dim_;
    values_ = turned_keys_ + kKeys * dim_;
    scores_ = values_ + kKeys * dim_;
    queries_ = scores_ + max_rows(group) * kKeys;
  }

  static size_t max_rows(size_t group) { return queries_a_tile(group) * group; }
  static size_t scratch_floats(size_t head_dim, size_t group) {
    return 3 * kKeys * head_dim + max_rows(group) * (kKeys + head_dim);
  }

  // `queries` is [tokens][query_stride], the heads of a token beside each other; `table` the batch's block tables.
  void run(const AttentionTile& tile, const float* queries, size_t query_stride, const Block* table,
           const PagedRows& keys, const PagedRows& values, const PartialSums& out) const {
    size_t rows = tile.num_queries * group_;
    float* sums = out.values + tile.first_row * dim_;
    float *peaks = out.peaks + tile.first_row, *totals = out.totals + tile.first_row;
    take_queries(tile, queries, query_stride);
    std::fill_n(sums, rows * dim_, 0.0f);
    std::fill_n(peaks, rows, kMasked);
    std::fill_n(totals, rows, 0.0f);
    size_t past = size_t(tile.span.context_len - tile.span.query_len) + tile.first_query;
    const Block* blocks = table + tile.span.table_start;
    for (size_t key = tile.first_key; key < tile.end_key; key += kKeys) {
      size_t count = std::min(kKeys, tile.end_key - key);
      read(blocks, tile.kv_head, key, count, keys, keys_);
      read(blocks, tile.kv_head, key, count, values, values_);
      for (size_t t = 0; t < kKeys; t += kTransposed)
        for (size_t i = 0; i < dim_; i += kTransposed)
          transpose_8x8(keys_ + t * dim_ + i, dim_, turned_keys_ + i * kKeys + t, kKeys);
      multiply(rows, queries_, dim_, dim_, turned_keys_, kKeys, kKeys, scores_, kKeys, false);
      for (size_t row = 0; row < rows; ++row) {
        size_t seen = past + row / group_ + 1;
        soften(scores_ + row * kKeys, seen > key ? std::min(seen - key, count) : 0, sums + row * dim_, &peaks[row],
               &totals[row]);
      }
      multiply(rows, scores_, kKeys, kKeys, values_, dim_, dim_, sums, dim_, true);
    }
  }

 private:
  void take_queries(const AttentionTile& tile, const float* queries, size_t query_stride) const {
    F32x16 scale = broadcast(1.0f / std::sqrt(float(dim_)));
    for (size_t q = 0; q < tile.num_queries; ++q) {
      size_t token = size_t(tile.span.query_start) + tile.first_query + q;
      const float* from = queries + token * query_stride + tile.kv_head * group_ * dim_;
      float* to = queries_ + q * group_ * dim_;
      for (size_t i = 0; i < group_ * dim_; i += kLanes) store(to + i, load(from + i) * scale);
    }
  }

  // Rows of the keys or values from `key` on; beyond `count` they are zero.
  void read(const Block* blocks, size_t kv_head, size_t key, size_t count, const PagedRows& rows, float* to) const {
    for (size_t t = 0; t < count; ++t) {
      Block block = blocks[(key + t) / shape_.block_size];
      size_t index = row_index(shape_, block, kv_head, (key + t) % shape_.block_size);
      read_row(rows, shape_, block, index, to + t * dim_);
    }
    std::fill(to + count * dim_, to + kKeys * dim_, 0.0f);
  }

  // Scores to exponentials against the new peak; what was summed before is brought to it.
  void soften(float* scores, size_t seen, float* sums, float* peak, float* total) const {
    for (size_t t = seen; t < kKeys; ++t) scores[t] = kMasked;
    F32x16 first = load(scores), second = load(scores + kLanes);
    float now = std::max(*peak, largest(max(first, second)));
    F32x16 correction = exp(broadcast(*peak - now));
    first = exp(first - broadcast(now));
    second = exp(second - broadcast(now));
    store(scores, first);
    store(scores + kLanes, second);
    float old[kLanes];
    store(old, correction);
    if (now != *peak)
      for (size_t i = 0; i < dim_; i += kLanes) store(sums + i, load(sums + i) * correction);
    *total = *total * old[0] + sum(first + second);
    *peak = now;
  }

  KVShape shape_;
  size_t group_, dim_;
  float *keys_, *turned_keys_, *values_, *scores_, *queries_;
};

// All heads of one token from its partial sums: [num_heads][head_dim].
inline void merge_parts(const TokenParts& parts, const PartialSums& sums, size_t num_kv_heads, size_t group,
                        size_t head_dim, float* to) {
  for (size_t head = 0; head < num_kv_heads * group; ++head) {
    size_t first = parts.first_row + head / group * parts.kv_head_rows + head % group;
    float peak = kMasked, total = 0.0f;
    for (size_t s = 0; s < parts.num_splits; ++s) peak = std::max(peak, sums.peaks[first + s * parts.split_rows]);
    float* out = to + head * head_dim;
    std::fill_n(out, head_dim, 0.0f);
    for (size_t s = 0; s < parts.num_splits; ++s) {
      size_t row = first + s * parts.split_rows;
      float weight = std::exp(sums.peaks[row] - peak);
      total += weight * sums.totals[row];
      for (size_t i = 0; i < head_dim; i += kLanes)
        store(out + i, fma(load(sums.values + row * head_dim + i), broadcast(weight), load(out + i)));
    }
    F32x16 share = broadcast(1.0f / total);
    for (size_t i = 0; i < head_dim; i += kLanes) store(out + i, load(out + i) * share);
  }
}

}  // namespace trimtab
