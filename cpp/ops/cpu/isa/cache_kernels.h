// SPDX-License-Identifier: Apache-2.0
//
// Conversions of rows to and from the 8-bit elements of quantised caches, as a table of functions
// that each instruction set fills in. The rules of attention_kernels.h hold here too. All sets give
// the same bits, but for which NaN.
#pragma once

#include "ops/cpu/element_type.h"

#include <stdint.h>

namespace paged_kv::cpu {

// The element types after the first three.
inline constexpr int kNumQuantisedTypes = kNumElementTypes - kNumFloatTypes;

struct CacheKernels {
  // Rows of `size` elements, dense, at any address; they do not overlap.
  using ConvertRow = void (*)(const void* source, float scale, int64_t size, void* target);

  // [float type][type - kNumFloatTypes]: target[i] = source[i] / scale, divided in float32, then
  // rounded once, to nearest even, and saturated. NaN stays NaN, and is 0 in int8.
  ConvertRow quantize_row[kNumFloatTypes][kNumQuantisedTypes];

  // [type - kNumFloatTypes][float type]: target[i] = source[i] * scale, multiplied in float32, then
  // rounded to nearest even.
  ConvertRow dequantize_row[kNumQuantisedTypes][kNumFloatTypes];
};

// Fills a table from `Rows`, which has convert<kFrom, kTo>, a ConvertRow.
template <class Rows>
constexpr CacheKernels cache_kernels_of() {
  constexpr auto kFloat = ElementType::kFloat;
  constexpr auto kHalf = ElementType::kHalf;
  constexpr auto kBFloat16 = ElementType::kBFloat16;
  constexpr auto kE4M3 = ElementType::kFloat8E4M3;
  constexpr auto kE5M2 = ElementType::kFloat8E5M2;
  constexpr auto kInt8 = ElementType::kInt8;
  return {
      {{&Rows::template convert<kFloat, kE4M3>, &Rows::template convert<kFloat, kE5M2>,
        &Rows::template convert<kFloat, kInt8>},
       {&Rows::template convert<kHalf, kE4M3>, &Rows::template convert<kHalf, kE5M2>,
        &Rows::template convert<kHalf, kInt8>},
       {&Rows::template convert<kBFloat16, kE4M3>, &Rows::template convert<kBFloat16, kE5M2>,
        &Rows::template convert<kBFloat16, kInt8>}},
      {{&Rows::template convert<kE4M3, kFloat>, &Rows::template convert<kE4M3, kHalf>,
        &Rows::template convert<kE4M3, kBFloat16>},
       {&Rows::template convert<kE5M2, kFloat>, &Rows::template convert<kE5M2, kHalf>,
        &Rows::template convert<kE5M2, kBFloat16>},
       {&Rows::template convert<kInt8, kFloat>, &Rows::template convert<kInt8, kHalf>,
        &Rows::template convert<kInt8, kBFloat16>}},
  };
}

}  // namespace paged_kv::cpu
