// SPDX-License-Identifier: Apache-2.0
//
// The kernels of token_panel_kernels.h for any instruction set V: see attention_kernels_impl.h.
// Which blocks of rows and panels there are, and their loop, are those of products with weights.
#pragma once

#include "ops/cpu/isa/line_fetcher.h"
#include "ops/cpu/isa/panel_kernels_impl.h"
#include "ops/cpu/isa/token_panel_kernels.h"

namespace paged_kv::cpu {

template <class V>
struct TokenPanelKernelsFor {
  using Panels = PanelKernelsFor<V>;
  using Blocks = typename Panels::Blocks;
  static constexpr int64_t kTileGroups = kTileKeys / kGroupTokens;

  // So much of the tokens stays in the first-level cache while all rows go over it.
  static constexpr int64_t kStepBytes = 16 * 1024;

  // The groups that have one of [begin, end).
  static int64_t first_group(const TokenRows& tokens) { return tokens.begin / kGroupTokens; }
  static int64_t end_group(const TokenRows& tokens) {
    return (tokens.end + kGroupTokens - 1) / kGroupTokens;
  }
  static const char* group(const TokenRows& tokens, int64_t g) {
    return static_cast<const char*>(tokens.row(g * kGroupTokens));
  }

  static int64_t num_turns(int64_t num_rows, int64_t num_panels, int64_t size) {
    return Panels::num_turns(Panels::kTokenPanelsAtOnce, num_rows, num_panels, size);
  }

  // All rows by all panels, in steps of panels that stay in the cache, in each pass after pass.
  static void multiply(const Blocks& blocks, const FloatRows& x,
                       const typename Panels::Panels& panels, typename Panels::PanelRange range,
                       int64_t panel_bytes, bool adds, LineFetcher& fetcher,
                       const PanelSums& sums) {
    int64_t step = range.end - range.begin;
    if (x.count > Panels::kRowsPerPass) {
      const int64_t fitting = Panels::quotient(kStepBytes, panel_bytes);
      step = fitting < 1 ? 1 : fitting;
    }
    for (int64_t p = range.begin; p < range.end; p += step) {
      const int64_t end = p + step < range.end ? p + step : range.end;
      Panels::multiply_passes(blocks, Panels::kTokenPanelsAtOnce, x, panels, {p, end}, adds,
                              fetcher, sums);
    }
  }

  // ---------------------------------------------------------------- queries by keys

  // A group is a panel in one piece.
  [[gnu::noinline]] static void multiply_keys(const Blocks& blocks, int64_t element_bytes,
                                              const FloatRows& queries, const TokenRows& keys,
                                              float* logits) {
    if (queries.count == 0 || keys.begin == keys.end) return;
    const int64_t begin = first_group(keys), end = end_group(keys);
    const char* groups[kTileGroups];
    for (int64_t g = begin; g < end; ++g) groups[g] = group(keys, g);
    LineFetcher fetcher(keys.ahead, num_turns(queries.count, end - begin, keys.size));
    multiply(blocks, queries, {groups, 1, 0, 1, keys.size, 0, 0, keys.size}, {begin, end},
             kGroupTokens * keys.size * element_bytes, false, fetcher, {logits, kTileKeys});
    fetcher.finish(keys.ahead);
  }

  template <ElementType kType>
  static void multiply_keys(const FloatRows& queries, const TokenRows& keys, float* logits) {
    multiply_keys(Panels::template kBlocks<kType>, element_size(kType), queries, keys, logits);
  }

  // ---------------------------------------------------------------- weights by values

  // A panel of dims has a piece in each group.
  [[gnu::noinline]] static void add_values(const Blocks& blocks, int64_t element_bytes,
                                           const float* weights, const TokenRows& values,
                                           const FloatRows& outputs) {
    if (outputs.count == 0 || values.begin == values.end) return;
    const int64_t first = first_group(values), num_groups = end_group(values) - first;
    const char* groups[kTileGroups];
    for (int64_t g = 0; g < num_groups; ++g) groups[g] = group(values, first + g);
    const int64_t panel_bytes = kGroupTokens * kPanelFeatures * element_bytes;
    const int64_t num_panels = values.size / kPanelFeatures;
    LineFetcher fetcher(values.ahead,
                        num_turns(outputs.count, num_panels, values.end - values.begin));
    multiply(blocks, {const_cast<float*>(weights), kTileKeys, outputs.count},
             {groups, 0, panel_bytes, num_groups, kGroupTokens, first * kGroupTokens, values.begin,
              values.end},
             {0, num_panels}, kTileGroups * panel_bytes, true, fetcher,
             {outputs.data, outputs.stride});
    fetcher.finish(values.ahead);
  }

  template <ElementType kType>
  static void add_values(const float* weights, const TokenRows& values, const FloatRows& outputs) {
    add_values(Panels::template kBlocks<kType>, element_size(kType), weights, values, outputs);
  }

  // ---------------------------------------------------------------- the table

  static constexpr TokenPanelKernels table() {
    TokenPanelKernels k{};
    fill<ElementType::kFloat>(k);
    fill<ElementType::kHalf>(k);
    fill<ElementType::kBFloat16>(k);
    fill<ElementType::kFloat8E4M3>(k);
    fill<ElementType::kFloat8E5M2>(k);
    fill<ElementType::kInt8>(k);
    return k;
  }

  template <ElementType kType>
  static constexpr void fill(TokenPanelKernels& k) {
    if constexpr (!V::template kTakesAsHalf<kType>) {
      k.multiply_keys[static_cast<int>(kType)] = &multiply_keys<kType>;
      k.add_values[static_cast<int>(kType)] = &add_values<kType>;
    }
  }
};

}  // namespace paged_kv::cpu
