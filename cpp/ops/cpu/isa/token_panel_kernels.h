// SPDX-License-Identifier: Apache-2.0
//
// The two products of attention with keys and values in panels, the cache layout made for them:
// functions that each instruction set fills in (AttentionKernels::token_panels). The rules of
// attention_kernels.h hold here too.
#pragma once

#include "ops/cpu/element_type.h"
#include "ops/cpu/isa/float_rows.h"
#include "ops/cpu/isa/panel_kernels.h"
#include "ops/cpu/isa/token_rows.h"

#include <stdint.h>

namespace paged_kv::cpu {

// Tokens of a group, and dims of one of its panels of values.
inline constexpr int64_t kGroupTokens = kPanelFeatures;

// A group of tokens is `size` * kGroupTokens elements in one piece. Keys are one panel, whose
// features are the tokens and whose inputs are the dims; values are a panel for each 16 dims, whose
// features are the dims and whose inputs are the tokens (WeightPanels says how a panel lies).
//
// Tokens are given as TokenRows, of which tokens[g * kGroupTokens] is where group g lies and the
// other pointers are not used; `begin` and `end` are anywhere, `size` is a multiple of
// kPanelFeatures.
struct TokenPanelKernels {
  // logits[r * kTileKeys + k] = queries[r] . keys[k], each summed dim by dim, for all keys of the
  // groups that have one of [keys.begin, keys.end).
  using MultiplyKeys = void (*)(const FloatRows& queries, const TokenRows& keys, float* logits);
  MultiplyKeys multiply_keys[kNumElementTypes];

  // outputs[r] += sum over k of weights[r * kTileKeys + k] * values[k], key by key. Values outside
  // [values.begin, values.end) are not read.
  using AddValues = void (*)(const float* weights, const TokenRows& values,
                             const FloatRows& outputs);
  AddValues add_values[kNumElementTypes];
};

}  // namespace paged_kv::cpu
