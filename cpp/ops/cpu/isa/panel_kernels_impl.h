// SPDX-License-Identifier: Apache-2.0
//
// The kernels of panel_kernels.h for any instruction set V: see attention_kernels_impl.h.
#pragma once

#include "ops/cpu/isa/float_vectors.h"
#include "ops/cpu/isa/line_fetcher.h"
#include "ops/cpu/isa/panel_kernels.h"

namespace paged_kv::cpu {

template <class V>
struct PanelKernelsFor {
  using Vec = typename V::Vec;
  using IntVec = typename V::IntVec;
  using Floats = FloatVectors<V>;
  static constexpr int64_t kLanes = V::kLanes;
  static constexpr int kVecs = kPanelFeatures / kLanes;  // of a row of a panel

  // Elements of the input in a turn of the loop.
  static constexpr int kTurn = 8;
  static_assert(kPanelInputsUnit % kTurn == 0);

  // Enough for any number of registers: these are 18 vectors of sums with one a panel.
  static constexpr int kMaxRows = 6;
  static constexpr int kMaxPanels = 3;

  static constexpr int smaller(int a, int b) { return a < b ? a : b; }
  // Rows of a pass over a panel: as many as there are registers for their sums.
  static constexpr int kRowsPerPass = smaller(V::kPanelSums / kVecs, kMaxRows);
  // Panels that go with so many rows: fewer rows leave registers for more.
  static constexpr int panels_at_once(int num_rows) {
    return smaller(V::kPanelSums / (kVecs * num_rows), kMaxPanels);
  }

  template <ElementType kType>
  static constexpr int64_t kPairs = kType == ElementType::kBFloat16 ? 2 : 1;
  template <ElementType kType>
  static constexpr int64_t kVecBytes = kLanes * element_size(kType) * kPairs<kType>;
  static int64_t panel_bytes(const WeightPanels& panels, ElementType type) {
    return panels.in_features * kPanelFeatures * element_size(type);
  }

  // Vector v of what element kOffset of the input is multiplied with. `rows`: of element 0.
  template <ElementType kType, int kOffset>
  [[gnu::always_inline]] static Vec load_weight(const char* rows, int v) {
    const char* p = rows + (kOffset / kPairs<kType> * kVecs + v) * kVecBytes<kType>;
    if constexpr (kType != ElementType::kBFloat16) {
      return V::template load_as_float<kType>(p);
    } else {
      IntVec words;
      __builtin_memcpy(&words, p, sizeof(words));
      words = kOffset % 2 == 0 ? words << 16 : words & static_cast<int32_t>(0xffff0000);
      return reinterpret_cast<Vec>(words);
    }
  }

  // Adds element i + kOffset of the input by kPanels panels, for kRows rows. `panels`: where
  // element i lies in each, less offset_bytes.
  template <ElementType kType, int kOffset, int kRows, int kPanels>
  [[gnu::always_inline]] static void add_element(const float* const (&x)[kRows], int64_t i,
                                                 const char* const (&panels)[kPanels],
                                                 int64_t offset_bytes,
                                                 Vec (&sums)[kRows][kPanels * kVecs]) {
    const auto weight = [&](int v) [[gnu::always_inline]] {
      return load_weight<kType, kOffset>(panels[v / kVecs] + offset_bytes, v % kVecs);
    };
    // With the sums, only the fewer of the two fit into sixteen registers.
    if constexpr (kRows < kPanels * kVecs) {
      Vec elements[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) elements[r] = V::broadcast(x[r][i + kOffset]);
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVecs; ++v) {
        const Vec w = weight(v);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][v] = V::fma(elements[r], w, sums[r][v]);
      }
    } else {
      Vec weights[kPanels * kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVecs; ++v) weights[v] = weight(v);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec element = V::broadcast(x[r][i + kOffset]);
#pragma GCC unroll 8
        for (int v = 0; v < kPanels * kVecs; ++v) {
          sums[r][v] = V::fma(element, weights[v], sums[r][v]);
        }
      }
    }
  }

  // Adds elements [i + kOffset, i + kEnd). By recursion, since kOffset decides how weights are
  // loaded.
  template <ElementType kType, int kOffset, int kEnd, int kRows, int kPanels>
  [[gnu::always_inline]] static void add_elements(const float* const (&x)[kRows], int64_t i,
                                                  const char* const (&panels)[kPanels],
                                                  int64_t offset_bytes,
                                                  Vec (&sums)[kRows][kPanels * kVecs]) {
    add_element<kType, kOffset>(x, i, panels, offset_bytes, sums);
    if constexpr (kOffset + 1 < kEnd) {
      add_elements<kType, kOffset + 1, kEnd>(x, i, panels, offset_bytes, sums);
    }
  }

  // kRows rows by kPanels panels, each `in_features` long, a multiple of kTurn. Those of a row go
  // to `sums`, `stride` from row to row.
  template <ElementType kType, int kRows, int kTurn, int kPanels>
  [[gnu::always_inline]] static void multiply_block(const FloatRows& x,
                                                    const char* const (&panels)[kPanels],
                                                    int64_t in_features, LineFetcher& fetcher,
                                                    const PanelSums& sums) {
    const float* rows[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) rows[r] = x.data + r * x.stride;
    constexpr int64_t kTurnBytes = kTurn * kPanelFeatures * element_size(kType);
    Vec block[kRows][kPanels * kVecs] = {};
    LineFetcher::Loop meanwhile(fetcher);
    for (int64_t i = 0, offset = 0; i < in_features; i += kTurn, offset += kTurnBytes) {
      meanwhile.turn();
      add_elements<kType, 0, kTurn>(rows, i, panels, offset, block);
    }
    meanwhile.finish();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kPanels * kVecs; ++v) {
        Floats::store(sums.data + r * sums.stride + v * kLanes, block[r][v]);
      }
    }
  }

  // kRows rows by kPanels panels from `first` on.
  template <ElementType kType, int kRows, int kPanels>
  static void multiply_panels(const FloatRows& x, const WeightPanels& weight, int64_t first,
                              LineFetcher& fetcher, const PanelSums& sums) {
    const char* panels[kPanels];
#pragma GCC unroll 8
    for (int p = 0; p < kPanels; ++p) {
      panels[p] = static_cast<const char*>(weight.data) + (first + p) * panel_bytes(weight, kType);
    }
    multiply_block<kType, kRows, kTurn>(x, panels, weight.in_features, fetcher,
                                        {sums.data + first * kPanelFeatures, sums.stride});
  }

  // One pass over all panels; x.count in [1, kRows].
  template <ElementType kType, int kRows>
  static void multiply_pass(const FloatRows& x, const WeightPanels& weight, LineFetcher& fetcher,
                            const PanelSums& sums) {
    if constexpr (kRows > 1) {
      if (x.count < kRows) return multiply_pass<kType, kRows - 1>(x, weight, fetcher, sums);
    }
    constexpr int kPanels = panels_at_once(kRows);
    int64_t p = 0;
    for (; p + kPanels <= weight.count; p += kPanels) {
      multiply_panels<kType, kRows, kPanels>(x, weight, p, fetcher, sums);
    }
    if constexpr (kPanels > 1) {
      for (; p < weight.count; ++p) multiply_panels<kType, kRows, 1>(x, weight, p, fetcher, sums);
    }
  }

  // Turns of a pass of so many rows.
  static int64_t num_turns(int64_t num_rows, const WeightPanels& weight) {
    const int64_t at_once = panels_at_once(static_cast<int>(num_rows));
    const int64_t num_blocks = weight.count / at_once + weight.count % at_once;
    return num_blocks * (weight.in_features / kTurn);
  }

  template <ElementType kType>
  static void multiply(const FloatRows& x, const WeightPanels& weight, const PanelSums& sums) {
    if (x.count == 0) return;
    const int64_t num_passes = (x.count + kRowsPerPass - 1) / kRowsPerPass;
    LineFetcher fetcher(weight.ahead, num_passes * num_turns(x.count / num_passes, weight));
    int64_t row = 0;
    for (int64_t pass = 1; pass <= num_passes; ++pass) {
      const int64_t end = x.count * pass / num_passes;  // passes are as even as they can be
      multiply_pass<kType, kRowsPerPass>({x.data + row * x.stride, x.stride, end - row}, weight,
                                         fetcher, {sums.data + row * sums.stride, sums.stride});
      row = end;
    }
    fetcher.finish(weight.ahead);
  }

  static constexpr PanelKernels table() {
    PanelKernels k{};
    k.multiply[static_cast<int>(ElementType::kFloat)] = &multiply<ElementType::kFloat>;
    k.multiply[static_cast<int>(ElementType::kHalf)] = &multiply<ElementType::kHalf>;
    k.multiply[static_cast<int>(ElementType::kBFloat16)] = &multiply<ElementType::kBFloat16>;
    return k;
  }
};

}  // namespace paged_kv::cpu
