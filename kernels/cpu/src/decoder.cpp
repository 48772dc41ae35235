// One step of a Llama-architecture decoder, from token ids to logits, on all threads of a pool.

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "c_interface.h"
#include "decoder.h"
#include "threads.h"

namespace trimtab {
namespace {

// Memory that grows and is never given back; what is new is zero.
template <class T>
class Buffer {
 public:
  T* reserve(size_t count) {
    if (count > capacity_) {
      size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      void* grown = std::aligned_alloc(64, bytes);
      if (grown == nullptr) throw std::bad_alloc();
      std::memset(grown, 0, bytes);
      data_.reset(static_cast<T*>(grown));
      capacity_ = count;
    }
    return data_.get();
  }
  T* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* data) const { std::free(data); }
  };
  std::unique_ptr<T, Free> data_;
  size_t capacity_ = 0;
};

struct Best {
  float value;
  int32_t token;
};

class Decoder {
 public:
  Decoder(const Model& model, size_t num_threads)
      : model_(model),
        layers_(model.layers, model.layers + model.num_layers),
        group_(size_t(model.num_heads / model.num_kv_heads)),
        hidden_columns_(size_t(layers_[0].qkv.columns)),
        query_columns_(size_t(layers_[0].output.columns)),
        pool_(num_threads) {}

  void step(const Cache& cache, const Batch& batch) {
    cache_ = &cache;
    shape_ = kv_shape(cache, size_t(model_.num_kv_heads), dim());
    batch_ = &batch;
    num_tokens_ = size_t(batch.num_tokens);
    num_rows_ = size_t(batch.num_logit_rows);
    plan_attention(batch.spans, size_t(batch.num_spans), size_t(model_.num_kv_heads), group_, &plan_);
    reserve();
    auto job = [this](size_t thread) { run(thread); };
    pool_.run(job);
    choose();
  }

 private:
  size_t dim() const { return size_t(model_.head_dim); }

  void reserve() {
    hidden_.reserve(num_tokens_ * hidden_columns_);
    queries_.reserve(num_tokens_ * query_columns_);
    angles_.reserve(num_tokens_ * dim());
    size_t hidden = rows_bytes(model_.head, num_rows_), query = 0, mid = 0;
    for (const Layer& layer : layers_) {
      hidden = std::max({hidden, rows_bytes(layer.qkv, num_tokens_), rows_bytes(layer.gate_up, num_tokens_)});
      query = std::max(query, rows_bytes(layer.output, num_tokens_));
      mid = std::max(mid, rows_bytes(layer.down, num_tokens_));
    }
    normed_.reserve(hidden);
    attended_.reserve(query);
    mid_.reserve(mid);
    partial_ = {partial_values_.reserve(plan_.num_rows * dim()), partial_peaks_.reserve(plan_.num_rows),
                partial_totals_.reserve(plan_.num_rows)};
    scratch_floats_ = (Attention::scratch_floats(dim(), group_) + 15) / 16 * 16;
    scratch_.reserve(pool_.num_threads() * scratch_floats_);
    best_.reserve(pool_.num_threads() * num_rows_);
  }

  void run(size_t thread) {
    pool_.phase(thread, num_tokens_, [this](size_t token) { embed(token); });
    for (size_t i = 0; i < layers_.size(); ++i) run_layer(thread, i);
    pool_.phase(thread, num_rows_, [this](size_t row) {
      norm(model_.head, size_t(batch_->logit_rows[row]), model_.final_norm, row, num_rows_);
    });
    Best* best = best_.data() + thread * num_rows_;
    std::fill_n(best, num_rows_, Best{-INFINITY, 0});
    multiply_phase(pool_, thread, model_.head, 1, normed_.data(), num_rows_,
                   [&](size_t panel, size_t m, size_t count, const TileProducts& products) {
                     for (size_t i = 0; i < count; ++i) take_logits(panel, m + i, products.values[0][i], &best[m + i]);
                   });
  }

  void run_layer(size_t thread, size_t index) {
    const Layer& layer = layers_[index];
    PagedRows keys = paged_rows(*cache_, shape_, index, 0), values = paged_rows(*cache_, shape_, index, 1);
    Attention attention(shape_, group_, scratch_.data() + thread * scratch_floats_);
    pool_.phase(thread, num_tokens_,
                [&](size_t token) { norm(layer.qkv, token, layer.attention_norm, token, num_tokens_); });
    project_heads(thread, layer, keys, values);
    pool_.phase(thread, plan_.tiles.size(), [&](size_t tile) {
      attention.run(plan_.tiles[tile], queries_.data(), query_columns_, batch_->tables, keys, values, partial_);
    });
    pool_.phase(thread, num_tokens_, [&](size_t token) {
      float* mixed = queries_.data() + token * query_columns_;
      merge_parts(plan_.tokens[token], partial_, size_t(model_.num_kv_heads), group_, dim(), mixed);
      put_row(layer.output, attended_.data(), num_tokens_, token, mixed);
    });
    add_products(thread, layer.output, attended_);
    pool_.phase(thread, num_tokens_,
                [&](size_t token) { norm(layer.gate_up, token, layer.mlp_norm, token, num_tokens_); });
    gate(thread, layer);
    add_products(thread, layer.down, mid_);
  }

  void embed(size_t token) {
    look_up(model_.embedding, size_t(batch_->token_ids[token]), hidden_.data() + token * hidden_columns_);
    float position = float(batch_->positions[token]);
    float *cosines = angles_.data() + token * dim(), *sines = cosines + dim() / 2;
    for (size_t i = 0; i < dim() / 2; ++i) {
      float angle = position * model_.inverse_frequencies[i];
      cosines[i] = std::cos(angle);
      sines[i] = std::sin(angle);
    }
  }

  // Root-mean-square norm of one token's hidden state, into row `row` of what `weight` is multiplied with.
  void norm(const Weight& weight, size_t token, const float* scale, size_t row, size_t num_rows) const {
    const float* from = hidden_.data() + token * hidden_columns_;
    F32x16 squares = broadcast(0.0f);
    for (size_t i = 0; i < hidden_columns_; i += kLanes) squares = fma(load(from + i), load(from + i), squares);
    F32x16 inverse = broadcast(1.0f / std::sqrt(sum(squares) / float(model_.hidden_size) + model_.rms_norm_eps));
    with_format(weight.format, [&](auto format) {
      typename decltype(format)::Rows rows{normed_.data(), num_rows, hidden_columns_};
      for (size_t i = 0; i < hidden_columns_; i += kGroup)
        rows.put_group(row, i / kGroup, load(from + i) * inverse * load(scale + i),
                       load(from + i + kLanes) * inverse * load(scale + i + kLanes));
    });
  }

  // Queries, keys and values, a head at a time: turned by their positions, keys and values into the cache.
  void project_heads(size_t thread, const Layer& layer, const PagedRows& keys, const PagedRows& values) {
    multiply_phase(pool_, thread, layer.qkv, dim() / kLanes, normed_.data(), num_tokens_,
                   [&](size_t head, size_t m, size_t count, const TileProducts& products) {
                     for (size_t i = 0; i < count; ++i) {
                       float row[kMaxPanels * kLanes];
                       for (size_t j = 0; j < dim() / kLanes; ++j)
                         store(row + j * kLanes, load(products.values[j][i]));
                       take_head(head, m + i, row, keys, values);
                     }
                   });
  }

  void take_head(size_t head, size_t token, float* row, const PagedRows& keys, const PagedRows& values) {
    size_t num_heads = size_t(model_.num_heads), num_kv_heads = size_t(model_.num_kv_heads);
    if (head < num_heads + num_kv_heads) turn(token, row);
    if (head < num_heads) {
      std::copy_n(row, dim(), queries_.data() + token * query_columns_ + head * dim());
      return;
    }
    bool is_key = head < num_heads + num_kv_heads;
    size_t index = slot_index(shape_, size_t(batch_->slots[token]), (head - num_heads) % num_kv_heads);
    write_row(is_key ? keys : values, shape_, cache_->write_type, index, row);
  }

  // Rotary embedding on pairs (i, i + head_dim / 2).
  void turn(size_t token, float* row) const {
    size_t half = dim() / 2;
    const float *cosines = angles_.data() + token * dim(), *sines = cosines + half;
    for (size_t i = 0; i < half; ++i) {
      float first = row[i], second = row[i + half];
      row[i] = first * cosines[i] - second * sines[i];
      row[i + half] = second * cosines[i] + first * sines[i];
    }
  }

  // hidden += in * weight.
  void add_products(size_t thread, const Weight& weight, const Buffer<uint8_t>& in) {
    multiply_phase(pool_, thread, weight, 1, in.data(), num_tokens_,
                   [&](size_t panel, size_t m, size_t count, const TileProducts& products) {
                     for (size_t i = 0; i < count; ++i) {
                       float* to = hidden_.data() + (m + i) * hidden_columns_ + panel * kLanes;
                       store(to, load(to) + load(products.values[0][i]));
                     }
                   });
  }

  // mid = silu(gate) * up, 32 columns at a time: one group of what the next product takes.
  void gate(size_t thread, const Layer& layer) {
    auto silu = [](F32x16 x) { return x / (broadcast(1.0f) + exp(broadcast(0.0f) - x)); };
    multiply_phase(pool_, thread, layer.gate_up, 4, normed_.data(), num_tokens_,
                   [&](size_t group, size_t m, size_t count, const TileProducts& products) {
                     for (size_t i = 0; i < count; ++i) {
                       F32x16 half[2];
                       for (size_t j = 0; j < 2; ++j)
                         half[j] = silu(load(products.values[j][i])) * load(products.values[2 + j][i]);
                       with_format(layer.down.format, [&](auto format) {
                         typename decltype(format)::Rows rows{mid_.data(), num_tokens_, size_t(layer.down.columns)};
                         rows.put_group(m + i, group, half[0], half[1]);
                       });
                     }
                   });
  }

  // Keeps the best token of a row, the first of equals, and the logits where they are wanted.
  void take_logits(size_t panel, size_t row, const float* products, Best* best) const {
    size_t first = panel * kLanes, count = std::min(kLanes, size_t(model_.vocab_size) - first);
    if (batch_->logits != nullptr)
      std::copy_n(products, kLanes, batch_->logits + (row * size_t(model_.head.num_panels) + panel) * kLanes);
    if (count == kLanes && largest(load(products)) < best->value) return;
    for (size_t i = 0; i < count; ++i) {
      int32_t token = int32_t(first + i);
      if (products[i] > best->value || (products[i] == best->value && token < best->token)) *best = {products[i], token};
    }
  }

  void choose() const {
    for (size_t row = 0; row < num_rows_; ++row) {
      Best best = best_.data()[row];
      for (size_t thread = 1; thread < pool_.num_threads(); ++thread) {
        Best other = best_.data()[thread * num_rows_ + row];
        if (other.value > best.value || (other.value == best.value && other.token < best.token)) best = other;
      }
      batch_->best[row] = best.token;
    }
  }

  Model model_;
  std::vector<Layer> layers_;
  size_t group_, hidden_columns_, query_columns_;
  Pool pool_;
  const Cache* cache_ = nullptr;
  KVShape shape_{};
  const Batch* batch_ = nullptr;
  size_t num_tokens_ = 0, num_rows_ = 0, scratch_floats_ = 0;
  AttentionPlan plan_;
  PartialSums partial_{};
  Buffer<float> hidden_, queries_, angles_, partial_values_, partial_peaks_, partial_totals_, scratch_;
  Buffer<uint8_t> normed_, attended_, mid_;
  Buffer<Best> best_;
};

}  // namespace
}  // namespace trimtab

using trimtab::Decoder;
using trimtab::guarded;

TRIMTAB_EXPORT int trimtab_decoder_create(const trimtab::Model* model, int64_t num_threads, void** created) {
  return guarded([&] { *created = new Decoder(*model, size_t(num_threads)); });
}

TRIMTAB_EXPORT void trimtab_decoder_destroy(void* decoder) { delete static_cast<Decoder*>(decoder); }

TRIMTAB_EXPORT int trimtab_decoder_step(void* decoder, const trimtab::Cache* cache, const trimtab::Batch* batch) {
  return guarded([&] { static_cast<Decoder*>(decoder)->step(*cache, *batch); });
}
