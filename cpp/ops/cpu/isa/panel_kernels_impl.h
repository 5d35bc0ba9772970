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

  static constexpr int smaller(int a, int b) { return a < b ? a : b; }

  // Most elements of the input in a turn of the loop.
  static constexpr int kMaxTurn = V::kPanelTurn;
  static_assert(kPanelInputsUnit % kMaxTurn == 0);
  // Those with so many rows and panels. Of two panels, which are keys or values, a turn uses up so
  // much memory that as many lines, fetched meanwhile, can be under way together. Few sums are what
  // is left at an end; their loops are kept short.
  static constexpr int turn_of(int num_rows, int num_panels) {
    if (num_panels == 1 && num_rows < 4) return 2;
    return smaller(num_panels == 2 ? 4 : 8, kMaxTurn);
  }

  static constexpr int kMaxRows = 6;
  static constexpr int kMaxPanels = 3;

  // Rows of a pass over a panel: as many as there are registers for their sums.
  static constexpr int kRowsPerPass = smaller(V::kPanelSums / kVecs, kMaxRows);
  // Panels that go with so many rows: fewer rows leave registers for more.
  static constexpr int panels_at_once(int num_rows) {
    return smaller(V::kPanelSums / (kVecs * num_rows), kMaxPanels);
  }
  // Panels of keys or values: two divide a tile's groups and most heads' dims, and keep what is
  // read at once in few places.
  static constexpr int token_panels_at_once(int num_rows) {
    return smaller(V::kPanelSums / (kVecs * num_rows), 2);
  }
  // Either as a table, [num_rows]: no division at run time.
  struct PanelsAtOnce {
    int of[kRowsPerPass + 1];
  };
  static constexpr PanelsAtOnce table_of(int (*panels)(int num_rows)) {
    PanelsAtOnce table{};
    for (int rows = 1; rows <= kRowsPerPass; ++rows) table.of[rows] = panels(rows);
    return table;
  }
  static constexpr PanelsAtOnce kPanelsAtOnce = table_of(&panels_at_once);
  static constexpr PanelsAtOnce kTokenPanelsAtOnce = table_of(&token_panels_at_once);

  template <ElementType kType>
  static constexpr int64_t kPairs = kType == ElementType::kBFloat16 ? 2 : 1;
  template <ElementType kType>
  static constexpr int64_t kVecBytes = kLanes * element_size(kType) * kPairs<kType>;

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

  // Panels whose elements lie in pieces: piece i of panel p, which begins at
  //   bases[i + p * base_step] + p * panel_bytes,
  // has elements [first + i * size, first + (i + 1) * size). Only [begin, end) of them is read.
  struct Panels {
    const char* const* bases;
    int64_t base_step;
    int64_t panel_bytes;
    int64_t num_pieces;
    int64_t size;  // a multiple of kMaxTurn
    int64_t first;
    int64_t begin;
    int64_t end;

    [[gnu::always_inline]] const char* piece(int64_t i, int64_t p) const {
      return bases[i + p * base_step] + p * panel_bytes;
    }
  };
  // Panels [begin, end) of those.
  struct PanelRange {
    int64_t begin;
    int64_t end;
  };

  // sums[r] becomes, or (`adds`) grows by, row r of x by panels [range.begin, range.end), a
  // multiple of kPanels of them, for kRows rows. The sums of a row are side by side, those of panel
  // 0 first. A function of its own, since all products with panels share its code.
  template <ElementType kType, int kRows, int kPanels>
  [[gnu::noinline]] static void multiply_range(const FloatRows& x, const Panels& panels,
                                               PanelRange range, bool adds, LineFetcher& fetcher,
                                               const PanelSums& sums) {
    LineFetcher::Loop meanwhile(fetcher);
    for (int64_t p = range.begin; p < range.end; p += kPanels) {
      float* first_sums = sums.data + p * kPanelFeatures;
      Vec block[kRows][kPanels * kVecs] = {};
      if (adds) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
          for (int v = 0; v < kPanels * kVecs; ++v) {
            block[r][v] = Floats::load(first_sums + r * sums.stride + v * kLanes);
          }
        }
      }
      add_pieces<kType>(x, panels, p, meanwhile, block);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int v = 0; v < kPanels * kVecs; ++v) {
          Floats::store(first_sums + r * sums.stride + v * kLanes, block[r][v]);
        }
      }
    }
    meanwhile.finish();
  }

  // All pieces of kPanels panels from `first_panel` on. Pointers move, for rows and panels alike:
  // the loop needs one register for each, and nothing has to be set up for a piece.
  template <ElementType kType, int kRows, int kVectors>
  [[gnu::always_inline]] static void add_pieces(const FloatRows& x, const Panels& panels,
                                                int64_t first_panel, LineFetcher::Loop& meanwhile,
                                                Vec (&block)[kRows][kVectors]) {
    constexpr int kPanels = kVectors / kVecs;
    constexpr int kTurn = turn_of(kRows, kPanels);
    constexpr int64_t kElementBytes = kPanelFeatures * element_size(kType);  // of a panel
    const float* rows[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) rows[r] = x.data + r * x.stride + panels.first;
    int64_t first = panels.first;
    for (int64_t piece = 0; piece < panels.num_pieces; ++piece, first += panels.size) {
      const char* data[kPanels];
#pragma GCC unroll 8
      for (int p = 0; p < kPanels; ++p) data[p] = panels.piece(piece, first_panel + p);
      if (panels.begin <= first && first + panels.size <= panels.end) [[likely]] {
        const char* const end = data[0] + panels.size * kElementBytes;
        while (data[0] < end) {
          meanwhile.turn();
          add_elements<kType, 0, kTurn>(rows, 0, data, 0, block);
#pragma GCC unroll 8
          for (int p = 0; p < kPanels; ++p) data[p] += kTurn * kElementBytes;
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) rows[r] += kTurn;
        }
        continue;
      }
      const int64_t from = panels.begin > first ? panels.begin - first : 0;
      const int64_t to = panels.end - first < panels.size ? panels.end - first : panels.size;
      for (int64_t i = from; i < to; ++i) {
        if (kPairs<kType> == 1 || i % 2 == 0) {
          add_element<kType, 0>(rows, i, data, i * kElementBytes, block);
        } else {
          add_element<kType, 1>(rows, i - 1, data, (i - 1) * kElementBytes, block);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) rows[r] += panels.size;
    }
  }

  // multiply_range() by rows and panels at once, each less one, where there is one: so many rows by
  // one panel, by as many as go with them, and by so many keys or values.
  using MultiplyRange = void (*)(const FloatRows& x, const Panels& panels, PanelRange range,
                                 bool adds, LineFetcher& fetcher, const PanelSums& sums);
  struct Blocks {
    MultiplyRange of[kRowsPerPass][kMaxPanels];
  };
  template <ElementType kType>
  static constexpr Blocks blocks() {
    Blocks result{};
    fill<kType, kRowsPerPass>(result);
    return result;
  }
  template <ElementType kType, int kRows>
  static constexpr void fill(Blocks& blocks) {
    constexpr int kPanels = panels_at_once(kRows), kTokens = token_panels_at_once(kRows);
    blocks.of[kRows - 1][0] = &multiply_range<kType, kRows, 1>;
    blocks.of[kRows - 1][kPanels - 1] = &multiply_range<kType, kRows, kPanels>;
    blocks.of[kRows - 1][kTokens - 1] = &multiply_range<kType, kRows, kTokens>;
    if constexpr (kRows > 1) fill<kType, kRows - 1>(blocks);
  }
  template <ElementType kType>
  static constexpr Blocks kBlocks = blocks<kType>();

  // Passes over so many rows, as even as they can be.
  static int64_t num_passes(int64_t num_rows) {
    return (num_rows + kRowsPerPass - 1) / kRowsPerPass;
  }
  // The first row of a pass.
  static int64_t pass_begin(int64_t pass, int64_t num_rows) {
    return num_rows * pass / num_passes(num_rows);
  }

  // A range of panels by x.count <= kRowsPerPass rows, `at_once` panels at once, the rest alone.
  static void multiply_pass(const Blocks& blocks, int64_t at_once, const FloatRows& x,
                            const Panels& panels, PanelRange range, bool adds, LineFetcher& fetcher,
                            const PanelSums& sums) {
    const auto& with_rows = blocks.of[x.count - 1];
    const int64_t middle = range.end - remainder(range.end - range.begin, at_once);
    with_rows[at_once - 1](x, panels, {range.begin, middle}, adds, fetcher, sums);
    if (middle == range.end) return;
    with_rows[0](x, panels, {middle, range.end}, adds, fetcher, sums);
  }

  // All rows of x by a range of panels, in passes.
  static void multiply_passes(const Blocks& blocks, const PanelsAtOnce& at_once, const FloatRows& x,
                              const Panels& panels, PanelRange range, bool adds,
                              LineFetcher& fetcher, const PanelSums& sums) {
    if (x.count <= kRowsPerPass) {
      return multiply_pass(blocks, at_once.of[x.count], x, panels, range, adds, fetcher, sums);
    }
    const int64_t passes = num_passes(x.count);
    for (int64_t pass = 0; pass < passes; ++pass) {
      const int64_t row = pass_begin(pass, x.count);
      const int64_t rows = pass_begin(pass + 1, x.count) - row;
      multiply_pass(blocks, at_once.of[rows], {x.data + row * x.stride, x.stride, rows}, panels,
                    range, adds, fetcher, {sums.data + row * sums.stride, sums.stride});
    }
  }

  // Turns of all passes over so many panels, `size` elements each; or a few less.
  static int64_t num_turns(const PanelsAtOnce& at_once, int64_t num_rows, int64_t num_panels,
                           int64_t size) {
    const int64_t passes = num_passes(num_rows);
    const int rows_of_pass = static_cast<int>(passes == 1 ? num_rows : quotient(num_rows, passes));
    const int panels = at_once.of[rows_of_pass];
    const int64_t num_blocks = quotient(num_panels, panels) + remainder(num_panels, panels);
    return passes * num_blocks * quotient(size, turn_of(rows_of_pass, panels));
  }

  // Of numbers below 2^32, none negative: division of 64 bits takes several times as long, and
  // calls are short.
  static int64_t quotient(int64_t a, int64_t b) {
    return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  }
  static int64_t remainder(int64_t a, int64_t b) {
    return static_cast<uint32_t>(a) % static_cast<uint32_t>(b);
  }

  [[gnu::noinline]] static void multiply(const Blocks& blocks, int64_t panel_bytes,
                                         const FloatRows& x, const WeightPanels& weight,
                                         const PanelSums& sums) {
    if (x.count == 0) return;
    const char* base = static_cast<const char*>(weight.data);
    const int64_t size = weight.in_features;
    LineFetcher fetcher(weight.ahead, num_turns(kPanelsAtOnce, x.count, weight.count, size));
    multiply_passes(blocks, kPanelsAtOnce, x, {&base, 0, panel_bytes, 1, size, 0, 0, size},
                    {0, weight.count}, false, fetcher, sums);
    fetcher.finish(weight.ahead);
  }

  template <ElementType kType>
  static void multiply(const FloatRows& x, const WeightPanels& weight, const PanelSums& sums) {
    const int64_t panel_bytes = weight.in_features * kPanelFeatures * element_size(kType);
    multiply(kBlocks<kType>, panel_bytes, x, weight, sums);
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
