// SPDX-License-Identifier: Apache-2.0
//
// The kernels of attention_kernels.h for any instruction set V, a class in an anonymous namespace
// of the source that is compiled for it (so that no symbol here is shared between sources):
//
//   kLanes, Vec, IntVec       GCC vectors of so many floats and int32s
//   broadcast(x)              x in all lanes
//   fma(a, b, c), max(a, b)   a * b + c; max() is b where the comparison fails (NaN)
//   load_as_float<T>(p)       kLanes elements of type T, in units of unit<T>()
//   store_as<T>(p, v)         kLanes elements, T one of the three float types
//   sum4(a, b, c, d, out)     out[0..3] = sums of the lanes, as a tree
//   kTakesInProducts<T>       whether products take rows of type T
//   kTakesAsHalf<T>           whether there is convert_to_half<T>(tokens, target)
//   keys_per_block<kRows>()   so many keys times kRows are enough sums to fill the FMA units, and
//                             few enough for the registers
//   kPanelSums                vectors of sums in products with panels: enough to fill the FMA
//                             units, and few enough for the registers
//   kPanelTurn                elements of a turn of their loops, a power of two from 2 on: more are
//                             longer code
//   convert_chunk<T>(p, out)  16 bytes of elements
//   load8<T>(p, out)          eight elements
//   transpose_block<T>(p, dim_stride_bytes, out, out_stride)   an 8 x 8 block of transpose_rows
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/isa/float_vectors.h"
#include "ops/cpu/isa/gated_activation_kernels_impl.h"
#include "ops/cpu/isa/panel_kernels_impl.h"
#include "ops/cpu/isa/product_kernels_impl.h"
#include "ops/cpu/isa/rotary_kernels_impl.h"
#include "ops/cpu/isa/token_panel_kernels_impl.h"
#include "ops/cpu/isa/vector_math.h"

namespace paged_kv::cpu {

template <class V>
struct AttentionKernelsFor {
  using Vec = typename V::Vec;
  using Floats = FloatVectors<V>;
  using Math = VectorMath<V>;
  using Products = ProductKernelsFor<V>;
  static constexpr int64_t kLanes = V::kLanes;

  // ---------------------------------------------------------------- rows in and out

  template <ElementType kType>
  static void convert_row(const void* source, int64_t size, float* target) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      Floats::store(target + i, V::template load_as_float<kType>(element<kType>(source, i)));
    }
    if (i == size) return;
    alignas(64) char tail[kLanes * 4] = {};  // what lies behind the row may not be read
    const char* rest = element<kType>(source, i);
    const int64_t num_bytes = (size - i) * element_size(kType);
    for (int64_t b = 0; b < num_bytes; ++b) tail[b] = rest[b];
    Floats::store(target + i, V::template load_as_float<kType>(tail));
  }

  template <ElementType kType>
  static void convert_chunked_row(const void* source, int64_t chunk_stride_bytes, int64_t size,
                                  float* target) {
    constexpr int64_t kChunk = 16 / element_size(kType);
    const char* chunk = static_cast<const char*>(source);
    for (int64_t d = 0; d < size; d += kChunk, chunk += chunk_stride_bytes) {
      V::template convert_chunk<kType>(chunk, target + d);
    }
    for (int64_t d = size; d % kLanes != 0; ++d) target[d] = 0.0f;
  }

  template <ElementType kType>
  static void transpose_rows(const void* source, int64_t dim_stride_bytes, int64_t size,
                             float* target, int64_t target_stride) {
    const char* row = static_cast<const char*>(source);
    int64_t d = 0;
    for (; d + 8 <= size; d += 8, row += 8 * dim_stride_bytes) {
      V::template transpose_block<kType>(row, dim_stride_bytes, target + d, target_stride);
    }
    for (; d < size; ++d, row += dim_stride_bytes) {
      float column[8];
      V::template load8<kType>(row, column);
      for (int64_t t = 0; t < 8; ++t) target[t * target_stride + d] = column[t];
    }
    for (; d % kLanes != 0; ++d) {
      for (int64_t t = 0; t < 8; ++t) target[t * target_stride + d] = 0.0f;
    }
  }

  template <ElementType kType>
  static void store_row(const float* source, float scale, int64_t size, void* target) {
    char* out = static_cast<char*>(target);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      V::template store_as<kType>(out + i * element_size(kType), Floats::load(source + i) * scale);
    }
    if (i == size) return;
    alignas(64) char tail[kLanes * 4];
    alignas(64) float rest[kLanes] = {};
    for (int64_t j = i; j < size; ++j) rest[j - i] = source[j];
    V::template store_as<kType>(tail, Floats::load(rest) * scale);
    const int64_t num_bytes = (size - i) * element_size(kType);
    for (int64_t b = 0; b < num_bytes; ++b) out[i * element_size(kType) + b] = tail[b];
  }

  // ---------------------------------------------------------------- softmax

  static float transform_logits(const LogitTransform& t, float* logits) {
    const bool hides_none = t.begin == 0 && t.end == kTileKeys;
    if (t.softcap == 0 && t.alibi_slope == 0 && hides_none) return scale_to_max(t.scale, logits);
    scale_bend_and_slope(t, logits);
    for (int64_t k = 0; k < t.begin; ++k) logits[k] = -__builtin_inff();
    for (int64_t k = t.end; k < kTileKeys; ++k) logits[k] = -__builtin_inff();
    return scale_to_max(1.0f, logits);
  }

  static void scale_bend_and_slope(const LogitTransform& t, float* logits) {
    alignas(64) static constexpr float kIota[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t k = 0; k < kTileKeys; k += kLanes) {
      Vec logit = Floats::load(logits + k) * t.scale;
      if (t.softcap > 0) logit = Math::tanh(logit * (1.0f / t.softcap)) * t.softcap;
      if (t.alibi_slope != 0) {
        logit += (Floats::load(kIota) + (t.distance + static_cast<float>(k))) * t.alibi_slope;
      }
      Floats::store(logits + k, logit);
    }
  }

  // Multiplies the logits by `scale`. Returns the largest one then; -inf if there is none. max()
  // passes over NaN, so a row of nothing but NaN would look like one without keys, and its result
  // would be a clean zero.
  static float scale_to_max(float scale, float* logits) {
    Vec max_vec = V::broadcast(-__builtin_inff());
    for (int64_t k = 0; k < kTileKeys; k += kLanes) {
      const Vec logit = Floats::load(logits + k) * scale;
      Floats::store(logits + k, logit);
      max_vec = V::max(logit, max_vec);
    }
    float result = -__builtin_inff();
    for (int64_t i = 0; i < kLanes; ++i) result = max_vec[i] > result ? max_vec[i] : result;
    if (result != -__builtin_inff()) return result;
    for (int64_t k = 0; k < kTileKeys; ++k) {
      if (logits[k] != logits[k]) return logits[k];
    }
    return result;
  }

  static bool softmax(float* logits, float tile_max, SoftmaxState& state, float* output,
                      int64_t size) {
    if (tile_max == -__builtin_inff()) return false;  // and -inf - -inf would be NaN
    const float old_max = state.max;
    state.max = tile_max < old_max ? old_max : tile_max;  // NaN in tile_max stays
    Vec sums{};
    for (int64_t k = 0; k < kTileKeys; k += kLanes) {
      const Vec weight = Math::exp(Floats::load(logits + k) - state.max);
      Floats::store(logits + k, weight);
      sums += weight;
    }
    if (state.max != old_max) {
      const float rescale = Math::exp(old_max - state.max);
      state.sum *= rescale;
      for (int64_t d = 0; d < size; d += kLanes) {
        Floats::store(output + d, Floats::load(output + d) * rescale);
      }
    }
    state.sum += Floats::sum_lanes(sums);
    return true;
  }

  static void merge(SoftmaxState& state, float* output, const SoftmaxState& other_state,
                    const float* other_output, int64_t size) {
    const float max = other_state.max < state.max ? state.max : other_state.max;
    const float weight = state.max == max ? 1.0f : Math::exp(state.max - max);
    const float other_weight = other_state.max == max ? 1.0f : Math::exp(other_state.max - max);
    for (int64_t d = 0; d < size; d += kLanes) {
      Floats::store(output + d, V::fma(Floats::load(other_output + d), V::broadcast(other_weight),
                                       Floats::load(output + d) * weight));
    }
    state = {max, state.sum * weight + other_state.sum * other_weight};
  }

  // ---------------------------------------------------------------- the table

  static constexpr AttentionKernels table(const char* name) {
    AttentionKernels k{};
    k.name = name;
    k.lanes = kLanes;
    fill<ElementType::kFloat>(k);
    fill<ElementType::kHalf>(k);
    fill<ElementType::kBFloat16>(k);
    fill<ElementType::kFloat8E4M3>(k);
    fill<ElementType::kFloat8E5M2>(k);
    fill<ElementType::kInt8>(k);
    k.transform_logits = &transform_logits;
    k.softmax = &softmax;
    k.merge = &merge;
    k.token_panels = TokenPanelKernelsFor<V>::table();
    k.gated_activations = GatedActivationKernelsFor<V>::table();
    k.panels = PanelKernelsFor<V>::table();
    return k;
  }

  template <ElementType kType>
  static constexpr void fill(AttentionKernels& k) {
    constexpr int kIndex = static_cast<int>(kType);
    k.convert_row[kIndex] = &convert_row<kType>;
    k.convert_chunked_row[kIndex] = &convert_chunked_row<kType>;
    k.transpose_rows[kIndex] = &transpose_rows<kType>;
    k.unit[kIndex] = V::template unit<kType>();
    if constexpr (kIndex < kNumFloatTypes) {
      k.store_row[kIndex] = &store_row<kType>;
      k.rotate_head[kIndex] = &RotaryKernelsFor<V>::template rotate_head<kType>;
    }
    if constexpr (V::template kTakesInProducts<kType>) {
      k.multiply_keys[kIndex] = &Products::template multiply_keys<kType>;
      k.add_values[kIndex] = &Products::template add_values<kType>;
    }
    if constexpr (V::template kTakesAsHalf<kType>) {
      k.convert_to_half[kIndex] = &V::template convert_to_half<kType>;
    }
  }
};

}  // namespace paged_kv::cpu
