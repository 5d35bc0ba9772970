// SPDX-License-Identifier: Apache-2.0
//
// Products with weights in panels, as functions that each instruction set fills in
// (AttentionKernels::panels). The rules of attention_kernels.h hold here too.
#pragma once

#include "ops/cpu/element_type.h"
#include "ops/cpu/isa/float_rows.h"
#include "ops/cpu/isa/lines_ahead.h"

#include <stdint.h>

namespace paged_kv::cpu {

// Rows of a weight (features of the output) in a panel.
inline constexpr int64_t kPanelFeatures = 16;
// The length of a weight's rows is a multiple of it: the lanes of the widest instruction set, as
// rows of 16-bit inputs are widened by whole vectors.
inline constexpr int64_t kPanelInputsUnit = 16;

// Panels of a weight, one after the other. Element i of feature f is element (i, f) of a panel of
// float or half, [in_features, kPanelFeatures], and (i / 2, f, i % 2) of one of bfloat16,
// [in_features / 2, kPanelFeatures, 2]: a word of 32 bits has two, of which a shift gives one and a
// mask the other.
struct WeightPanels {
  const void* data;
  int64_t count;
  int64_t in_features;
  LinesAhead* ahead = nullptr;  // null: nothing to fetch
};

// Where sums go: those of a row are panels.count * kPanelFeatures floats, `stride` from row to row.
struct PanelSums {
  float* data;
  int64_t stride;
};

struct PanelKernels {
  // sums[r][f] = x[r] . feature f, each summed element by element in order: how many rows or panels
  // a call has changes no bit of any sum.
  using Multiply = void (*)(const FloatRows& x, const WeightPanels& panels, const PanelSums& sums);
  Multiply multiply[kNumFloatTypes];
};

}  // namespace paged_kv::cpu
