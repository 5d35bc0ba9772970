// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of CPU attention and of a decoder's other ops, as a table of functions that each
// instruction set fills in.
//
// Rules of this folder: its sources include nothing but each other, <stdint.h> and compiler
// intrinsics. An inline function of std or torch that were compiled here could be the copy that the
// linker keeps for the whole library, and crash where the instruction set is missing.
//
// Numerics: all arithmetic is float32. Element d of a product is summed in lane d % lanes, the
// lanes as a tree, but one with a panel element by element; weighted values are summed key by key.
// How many rows a call handles changes no bit of any row. Instruction sets differ in the number of
// lanes and in fused multiply-adds, thus in bits.
#pragma once

#include "ops/cpu/element_type.h"
#include "ops/cpu/isa/float_rows.h"
#include "ops/cpu/isa/gated_activation_kernels.h"
#include "ops/cpu/isa/lines_ahead.h"
#include "ops/cpu/isa/panel_kernels.h"
#include "ops/cpu/isa/rotary_kernels.h"
#include "ops/cpu/isa/token_panel_kernels.h"
#include "ops/cpu/isa/token_rows.h"

#include <stdint.h>

namespace paged_kv::cpu {

// What turns a product of query and key into a logit.
struct LogitTransform {
  float scale = 1.0f;
  float softcap = 0.0f;      // 0 = none: else tanh(logit / softcap) * softcap
  float alibi_slope = 0.0f;  // the logit of key k gets (k + distance) * alibi_slope
  float distance = 0.0f;     // position of the tile's first key less that of the query
  int64_t begin = 0;         // keys outside [begin, end) are masked: -inf
  int64_t end = kTileKeys;
};

// One row's running softmax: the weights of keys seen so far are exp(logit - max).
struct SoftmaxState {
  float max;
  float sum;
};

struct AttentionKernels {
  const char* name;  // as in PAGED_KV_ISA
  int64_t lanes;

  // Elements are loaded as multiples of this power of two: what reads them must multiply by it. It
  // is 1 but for types whose conversion is cheaper without a last step.
  float unit[kNumElementTypes];

  // target[i] = source[i] for i in [0, size), then zeros up to a multiple of `lanes`.
  using ConvertRow = void (*)(const void* source, int64_t size, float* target);
  ConvertRow convert_row[kNumElementTypes];

  // As convert_row, of a row that lies in chunks of 16 bytes, `chunk_stride_bytes` apart. The size
  // is a multiple of a chunk's elements.
  using ConvertChunkedRow = void (*)(const void* source, int64_t chunk_stride_bytes, int64_t size,
                                     float* target);
  ConvertChunkedRow convert_chunked_row[kNumElementTypes];

  // Eight rows from a matrix that lies the other way round: target[t * target_stride + d] =
  // source[d * dim_stride_bytes / sizeof(element) + t], for t in [0, 8).
  using TransposeRows = void (*)(const void* source, int64_t dim_stride_bytes, int64_t size,
                                 float* target, int64_t target_stride);
  TransposeRows transpose_rows[kNumElementTypes];

  // target[i] = scale * source[i] for i in [0, size), rounded to nearest even; for the first three
  // element types only.
  using StoreRow = void (*)(const float* source, float scale, int64_t size, void* target);
  StoreRow store_row[kNumFloatTypes];

  // target[k * size + i] = element i of row k, as binary16, for k in [begin, end): for types whose
  // elements all are such numbers, and that products read faster in this form. Null for others.
  using ConvertToHalf = void (*)(const TokenRows& tokens, uint16_t* target);
  ConvertToHalf convert_to_half[kNumElementTypes];

  // The two products are null for types that must be converted first.

  // logits[r * kTileKeys + k] = queries[r] . keys[k].
  using MultiplyKeys = void (*)(const FloatRows& queries, const TokenRows& keys, float* logits);
  MultiplyKeys multiply_keys[kNumElementTypes];

  // outputs[r] += sum over k of weights[r * kTileKeys + k] * values[k].
  using AddValues = void (*)(const float* weights, const TokenRows& values,
                             const FloatRows& outputs);
  AddValues add_values[kNumElementTypes];

  // The same of tokens in panels.
  TokenPanelKernels token_panels;

  // Products -> logits, kTileKeys of them. Returns the largest one that is a number; if there are
  // none but -inf and NaN, NaN if there is one.
  float (*transform_logits)(const LogitTransform& transform, float* logits);

  // Logits, of which `tile_max` is the largest, -> weights, kTileKeys of them; rescales the state
  // and `output` if the maximum rose. Returns false, and changes nothing, if tile_max is -inf.
  bool (*softmax)(float* logits, float tile_max, SoftmaxState& state, float* output, int64_t size);

  // Joins the outputs of two ranges of keys: output and state become those of both.
  void (*merge)(SoftmaxState& state, float* output, const SoftmaxState& other_state,
                const float* other_output, int64_t size);

  // What else a decoder computes in each layer.
  GatedActivationKernels gated_activations;
  PanelKernels panels;
  RotateHead rotate_head[kNumFloatTypes];
};

}  // namespace paged_kv::cpu
