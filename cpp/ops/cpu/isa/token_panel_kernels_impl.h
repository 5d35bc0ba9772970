// SPDX-License-Identifier: Apache-2.0
//
// The kernels of token_panel_kernels.h for any instruction set V: see attention_kernels_impl.h.
#pragma once

#include "ops/cpu/isa/float_vectors.h"
#include "ops/cpu/isa/line_fetcher.h"
#include "ops/cpu/isa/panel_kernels_impl.h"
#include "ops/cpu/isa/token_panel_kernels.h"

namespace paged_kv::cpu {

template <class V>
struct TokenPanelKernelsFor {
  using Vec = typename V::Vec;
  using Floats = FloatVectors<V>;
  using Panels = PanelKernelsFor<V>;
  static constexpr int64_t kLanes = V::kLanes;
  static constexpr int kVecs = Panels::kVecs;
  static constexpr int kRowsPerPass = Panels::kRowsPerPass;
  // Elements of a turn with so many panels: a turn uses up so much memory that the lines fetched
  // meanwhile, as many, can be under way together.
  static constexpr int turn_of(int num_panels) { return 8 / num_panels; }
  static_assert(kGroupTokens % turn_of(1) == 0);

  // So much of the tokens stays in the first-level cache while all rows go over it.
  static constexpr int64_t kStepBytes = 16 * 1024;

  // Panels that go with so many rows, a power of two, as a tile has groups and a head has dims.
  static constexpr int panels_at_once(int num_rows) {
    const int fitting = V::kPanelSums / (kVecs * num_rows);
    return fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
  }

  // The groups that have one of [begin, end).
  static int64_t first_group(const TokenRows& tokens) { return tokens.begin / kGroupTokens; }
  static int64_t end_group(const TokenRows& tokens) {
    return (tokens.end + kGroupTokens - 1) / kGroupTokens;
  }
  static const char* group(const TokenRows& tokens, int64_t g) {
    return static_cast<const char*>(
        tokens.row(g * kGroupTokens < tokens.begin ? tokens.begin : g * kGroupTokens));
  }

  static int64_t num_passes(const FloatRows& rows) {
    return (rows.count + kRowsPerPass - 1) / kRowsPerPass;
  }
  // Calls pass(first row, rows), the passes as even as they can be.
  template <class F>
  [[gnu::always_inline]] static void for_each_pass(const FloatRows& rows, F pass) {
    const int64_t count = num_passes(rows);
    int64_t row = 0;
    for (int64_t i = 1; i <= count; ++i) {
      const int64_t end = rows.count * i / count;
      pass(row, FloatRows{rows.data + row * rows.stride, rows.stride, end - row});
      row = end;
    }
  }
  // Turns of all passes over so many panels, `size` elements each; or a few less.
  static int64_t num_turns(const FloatRows& rows, int64_t num_panels, int64_t size) {
    const int64_t passes = num_passes(rows);
    const int at_once = panels_at_once(static_cast<int>(rows.count / passes));
    const int64_t num_blocks = num_panels / at_once + num_panels % at_once;
    return passes * num_blocks * (size / turn_of(at_once));
  }

  // ---------------------------------------------------------------- queries by keys

  template <ElementType kType, int kRows, int kGroups>
  static void multiply_groups(const FloatRows& queries, const TokenRows& keys, int64_t first,
                              LineFetcher& fetcher, float* logits) {
    const char* groups[kGroups];
#pragma GCC unroll 8
    for (int g = 0; g < kGroups; ++g) groups[g] = group(keys, first + g);
    Panels::template multiply_block<kType, kRows, turn_of(kGroups)>(
        queries, groups, keys.size, fetcher, {logits + first * kGroupTokens, kTileKeys});
  }

  // Groups [begin, end) by queries.count in [1, kRows] queries.
  template <ElementType kType, int kRows>
  static void multiply_pass(const FloatRows& queries, const TokenRows& keys, int64_t begin,
                            int64_t end, LineFetcher& fetcher, float* logits) {
    if constexpr (kRows > 1) {
      if (queries.count < kRows) {
        return multiply_pass<kType, kRows - 1>(queries, keys, begin, end, fetcher, logits);
      }
    }
    constexpr int kGroups = panels_at_once(kRows);
    int64_t g = begin;
    for (; g + kGroups <= end; g += kGroups) {
      multiply_groups<kType, kRows, kGroups>(queries, keys, g, fetcher, logits);
    }
    if constexpr (kGroups > 1) {
      for (; g < end; ++g) multiply_groups<kType, kRows, 1>(queries, keys, g, fetcher, logits);
    }
  }

  template <ElementType kType>
  static void multiply_keys(const FloatRows& queries, const TokenRows& keys, float* logits) {
    if (queries.count == 0 || keys.begin == keys.end) return;
    const int64_t fitting = kStepBytes / (kGroupTokens * keys.size * element_size(kType));
    const int64_t step = fitting < 1 ? 1 : fitting;
    const int64_t end = end_group(keys);
    LineFetcher fetcher(keys.ahead, num_turns(queries, end - first_group(keys), keys.size));
    for (int64_t begin = first_group(keys); begin < end; begin += step) {
      const int64_t step_end = begin + step < end ? begin + step : end;
      for_each_pass(queries, [&](int64_t row, const FloatRows& rows) [[gnu::always_inline]] {
        multiply_pass<kType, kRowsPerPass>(rows, keys, begin, step_end, fetcher,
                                           logits + row * kTileKeys);
      });
    }
    fetcher.finish(keys.ahead);
  }

  // ---------------------------------------------------------------- weights by values

  // Adds the values of a group that are in [values.begin, values.end), `panels` of it.
  template <ElementType kType, int kRows, int kPanels>
  [[gnu::always_inline]] static void add_group(const float* const (&weights)[kRows],
                                               const TokenRows& values, int64_t first_token,
                                               const char* const (&panels)[kPanels],
                                               LineFetcher::Loop& meanwhile,
                                               Vec (&sums)[kRows][kPanels * kVecs]) {
    constexpr int64_t kTokenBytes = kPanelFeatures * element_size(kType);
    if (values.begin <= first_token && first_token + kGroupTokens <= values.end) {
#pragma GCC unroll 1
      for (int64_t t = 0; t < kGroupTokens; t += turn_of(kPanels)) {
        meanwhile.turn();
        Panels::template add_elements<kType, 0, turn_of(kPanels)>(weights, first_token + t, panels,
                                                                  t * kTokenBytes, sums);
      }
      return;
    }
    const int64_t from = values.begin > first_token ? values.begin - first_token : 0;
    const int64_t to =
        values.end - first_token < kGroupTokens ? values.end - first_token : kGroupTokens;
    for (int64_t t = from; t < to; ++t) {
      if (Panels::template kPairs<kType> == 1 || t % 2 == 0) {
        Panels::template add_element<kType, 0>(weights, first_token + t, panels, t * kTokenBytes,
                                               sums);
      } else {
        Panels::template add_element<kType, 1>(weights, first_token + t - 1, panels,
                                               (t - 1) * kTokenBytes, sums);
      }
    }
  }

  // All values by kPanels panels of dims for kRows outputs, which stay in registers meanwhile.
  template <ElementType kType, int kRows, int kPanels>
  static void add_block(const float* weights, const TokenRows& values, int64_t first_panel,
                        LineFetcher& fetcher, const FloatRows& outputs) {
    const float* rows[kRows];
    Vec sums[kRows][kPanels * kVecs];
    float* first_output = outputs.data + first_panel * kPanelFeatures;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      rows[r] = weights + r * kTileKeys;
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVecs; ++v) {
        sums[r][v] = Floats::load(first_output + r * outputs.stride + v * kLanes);
      }
    }
    constexpr int64_t kPanelBytes = kGroupTokens * kPanelFeatures * element_size(kType);
    LineFetcher::Loop meanwhile(fetcher);
    const int64_t end = end_group(values);
    for (int64_t g = first_group(values); g < end; ++g) {
      const char* panels[kPanels];
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) {
        panels[p] = group(values, g) + (first_panel + p) * kPanelBytes;
      }
      add_group<kType>(rows, values, g * kGroupTokens, panels, meanwhile, sums);
    }
    meanwhile.finish();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVecs; ++v) {
        Floats::store(first_output + r * outputs.stride + v * kLanes, sums[r][v]);
      }
    }
  }

  // Panels [begin, end) for outputs.count in [1, kRows] outputs.
  template <ElementType kType, int kRows>
  static void add_pass(const float* weights, const TokenRows& values, int64_t begin, int64_t end,
                       LineFetcher& fetcher, const FloatRows& outputs) {
    if constexpr (kRows > 1) {
      if (outputs.count < kRows) {
        return add_pass<kType, kRows - 1>(weights, values, begin, end, fetcher, outputs);
      }
    }
    constexpr int kPanels = panels_at_once(kRows);
    int64_t p = begin;
    for (; p + kPanels <= end; p += kPanels) {
      add_block<kType, kRows, kPanels>(weights, values, p, fetcher, outputs);
    }
    if constexpr (kPanels > 1) {
      for (; p < end; ++p) add_block<kType, kRows, 1>(weights, values, p, fetcher, outputs);
    }
  }

  template <ElementType kType>
  static void add_values(const float* weights, const TokenRows& values, const FloatRows& outputs) {
    if (outputs.count == 0 || values.begin == values.end) return;
    constexpr int64_t kStep =
        kStepBytes / (kTileKeys * kPanelFeatures * int64_t{element_size(kType)});
    const int64_t num_panels = values.size / kPanelFeatures;
    LineFetcher fetcher(values.ahead, num_turns(outputs, num_panels, values.end - values.begin));
    for (int64_t begin = 0; begin < num_panels; begin += kStep) {
      const int64_t end = begin + kStep < num_panels ? begin + kStep : num_panels;
      for_each_pass(outputs, [&](int64_t row, const FloatRows& rows) [[gnu::always_inline]] {
        add_pass<kType, kRowsPerPass>(weights + row * kTileKeys, values, begin, end, fetcher, rows);
      });
    }
    fetcher.finish(values.ahead);
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
