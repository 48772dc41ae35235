// The decoder's operations one by one, on one thread: for tests and measurements.

#include <vector>

#include "c_interface.h"
#include "decoder.h"

using namespace trimtab;

// out [rows][num_panels * 16] = x [rows][columns] * weight.
TRIMTAB_EXPORT int trimtab_linear(const Weight* weight, const float* x, int64_t rows, float* out) {
  return guarded([&] {
    size_t num_rows = size_t(rows), columns = size_t(weight->columns);
    std::vector<uint8_t> stored(rows_bytes(*weight, num_rows));
    for (size_t m = 0; m < num_rows; ++m) put_row(*weight, stored.data(), num_rows, m, x + m * columns);
    Pool pool(1);
    auto job = [&](size_t thread) {
      multiply_phase(pool, thread, *weight, 1, stored.data(), num_rows,
                     [&](size_t panel, size_t m, size_t count, const TileProducts& products) {
                       for (size_t i = 0; i < count; ++i)
                         std::copy_n(products.values[0][i], kLanes,
                                     out + ((m + i) * size_t(weight->num_panels) + panel) * kLanes);
                     });
    };
    pool.run(job);
  });
}

// to [columns] = one output row of weight.
TRIMTAB_EXPORT int trimtab_look_up(const Weight* weight, int64_t row, float* to) {
  return guarded([&] { look_up(*weight, size_t(row), to); });
}

// Stores rows [num_tokens][kv_heads][head_dim] as keys (kind 0) or values (kind 1) of the cache's first layer.
TRIMTAB_EXPORT int trimtab_write_tokens(const Cache* cache, int64_t kv_heads, int64_t head_dim, int64_t kind,
                                        const int32_t* slots, int64_t num_tokens, const float* rows) {
  return guarded([&] {
    KVShape shape = kv_shape(*cache, size_t(kv_heads), size_t(head_dim));
    PagedRows to = paged_rows(*cache, shape, 0, size_t(kind));
    for (size_t t = 0; t < size_t(num_tokens); ++t)
      for (size_t head = 0; head < shape.num_kv_heads; ++head)
        write_row(to, shape, cache->write_type, slot_index(shape, size_t(slots[t]), head),
                  rows + (t * shape.num_kv_heads + head) * shape.head_dim);
  });
}

// out and queries are [num_tokens][kv_heads * group * head_dim]; the cache's first layer is read.
TRIMTAB_EXPORT int trimtab_attention(const Cache* cache, const Batch* batch, int64_t kv_heads, int64_t group,
                                     int64_t head_dim, const float* queries, float* out) {
  return guarded([&] {
    KVShape shape = kv_shape(*cache, size_t(kv_heads), size_t(head_dim));
    size_t heads = size_t(group), width = shape.num_kv_heads * heads * shape.head_dim;
    AttentionPlan plan;
    plan_attention(batch->spans, size_t(batch->num_spans), shape.num_kv_heads, heads, &plan);
    std::vector<float> scratch(Attention::scratch_floats(shape.head_dim, heads));
    std::vector<float> sums(plan.num_rows * shape.head_dim), peaks(plan.num_rows), totals(plan.num_rows);
    PartialSums partial{sums.data(), peaks.data(), totals.data()};
    Attention attention(shape, heads, scratch.data());
    for (const AttentionTile& tile : plan.tiles)
      attention.run(tile, queries, width, batch->tables, paged_rows(*cache, shape, 0, 0),
                    paged_rows(*cache, shape, 0, 1), partial);
    for (size_t token = 0; token < plan.tokens.size(); ++token)
      merge_parts(plan.tokens[token], partial, shape.num_kv_heads, heads, shape.head_dim, out + token * width);
  });
}
