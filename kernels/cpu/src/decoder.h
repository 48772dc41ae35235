// What Python hands over: a model, and one step's batch. The layouts are mirrored by kernels/cpu/library.py.
#pragma once

#include "attention.h"
#include "products.h"

namespace trimtab {

struct Layer {
  const float* attention_norm;
  const float* mlp_norm;
  Weight qkv, output, gate_up, down;  // gate_up: two panels of the gate, two of up, and so on
};

struct Model {
  int64_t hidden_size, num_layers, num_heads, num_kv_heads, head_dim, vocab_size;
  float rms_norm_eps;
  const float* inverse_frequencies;  // [head_dim / 2]
  const float* final_norm;
  const Layer* layers;
  Weight embedding, head;
};

// The paged cache: all layers of it, [num_layers][2][num_blocks] blocks of each type.
struct Cache {
  uint16_t* full;
  int8_t* int8;
  uint16_t* int8_scales;
  uint8_t* int4;
  uint16_t* int4_scales;
  int64_t num_blocks[3];
  int64_t block_size;
  KVType write_type;
};

inline KVShape kv_shape(const Cache& cache, size_t num_kv_heads, size_t head_dim) {
  return {num_kv_heads, size_t(cache.block_size), head_dim};
}

// One layer's keys (kind 0) or values (kind 1).
inline PagedRows paged_rows(const Cache& cache, const KVShape& shape, size_t layer, size_t kind) {
  auto first_row = [&](KVType type) {
    size_t num_blocks = size_t(cache.num_blocks[size_t(type)]);
    return (2 * layer + kind) * num_blocks * shape.num_kv_heads * shape.block_size;
  };
  size_t full = first_row(KVType::kFull), int8 = first_row(KVType::kInt8), int4 = first_row(KVType::kInt4);
  return {cache.full + full * shape.head_dim, cache.int8 + int8 * shape.head_dim, cache.int8_scales + int8,
          cache.int4 + int4 * shape.head_dim / 2, cache.int4_scales + 2 * int4};
}

struct Batch {
  int32_t num_tokens, num_spans, num_logit_rows;
  const int32_t* token_ids;   // [num_tokens]
  const int32_t* positions;   // [num_tokens]
  const int32_t* slots;       // [num_tokens]: block * block_size + offset
  const Span* spans;          // [num_spans]
  const Block* tables;        // every span's blocks
  const int32_t* logit_rows;  // [num_logit_rows]: tokens whose logits are wanted
  float* logits;              // [num_logit_rows][num_panels * 16] of the head, or null
  int32_t* best;              // [num_logit_rows]: the most likely token of each row
};

}  // namespace trimtab
