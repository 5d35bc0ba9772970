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
//   convert_chunk<T>(p, out)  16 bytes of elements
//   load8<T>(p, out)          eight elements
//   transpose_block<T>(p, dim_stride_bytes, out, out_stride)   an 8 x 8 block of transpose_rows
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/isa/gated_activation_kernels_impl.h"
#include "ops/cpu/isa/line_fetcher.h"
#include "ops/cpu/isa/rotary_kernels_impl.h"
#include "ops/cpu/isa/vector_math.h"

namespace paged_kv::cpu {

template <class V>
struct AttentionKernelsFor {
  using Vec = typename V::Vec;
  using Math = VectorMath<V>;
  static constexpr int64_t kLanes = V::kLanes;

  [[gnu::always_inline]] static Vec load(const float* p) {
    return V::template load_as_float<ElementType::kFloat>(p);
  }
  [[gnu::always_inline]] static void store(float* p, Vec v) {
    V::template store_as<ElementType::kFloat>(p, v);
  }
  [[gnu::always_inline]] static Vec broadcast(float x) { return V::broadcast(x); }

  // The sum of the lanes, as sum4() adds them.
  [[gnu::always_inline]] static float sum_lanes(Vec v) {
    float sums[4];
    V::sum4(v, v, v, v, sums);
    return sums[0];
  }

  template <ElementType kType>
  [[gnu::always_inline]] static const char* element(const void* row, int64_t i) {
    return static_cast<const char*>(row) + i * element_size(kType);
  }

  // ---------------------------------------------------------------- rows in and out

  template <ElementType kType>
  static void convert_row(const void* source, int64_t size, float* target) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      store(target + i, V::template load_as_float<kType>(element<kType>(source, i)));
    }
    if (i == size) return;
    alignas(64) char tail[kLanes * 4] = {};  // what lies behind the row may not be read
    const char* rest = element<kType>(source, i);
    const int64_t num_bytes = (size - i) * element_size(kType);
    for (int64_t b = 0; b < num_bytes; ++b) tail[b] = rest[b];
    store(target + i, V::template load_as_float<kType>(tail));
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
      V::template store_as<kType>(out + i * element_size(kType), load(source + i) * scale);
    }
    if (i == size) return;
    alignas(64) char tail[kLanes * 4];
    alignas(64) float rest[kLanes] = {};
    for (int64_t j = i; j < size; ++j) rest[j - i] = source[j];
    V::template store_as<kType>(tail, load(rest) * scale);
    const int64_t num_bytes = (size - i) * element_size(kType);
    for (int64_t b = 0; b < num_bytes; ++b) out[i * element_size(kType) + b] = tail[b];
  }

  // ---------------------------------------------------------------- the two products

  // The products of kRows queries and kKeys keys; each load of a key serves all queries.
  template <ElementType kType, int kRows, int kKeys>
  [[gnu::always_inline]] static void multiply_block(const float* query, int64_t query_stride,
                                                    const void* const* keys, int64_t size,
                                                    LineFetcher& fetcher, float* logits) {
    const void* key_rows[kKeys];  // in registers: each turn would read `keys` again
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) key_rows[k] = keys[k];
    Vec sums[kRows][kKeys] = {};
    LineFetcher::Loop meanwhile(fetcher);
    for (int64_t d = 0; d < size; d += kLanes) {
      meanwhile.turn();
      Vec q[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) q[r] = load(query + r * query_stride + d);
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) {
        const Vec key = V::template load_as_float<kType>(element<kType>(key_rows[k], d));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][k] = V::fma(q[r], key, sums[r][k]);
      }
    }
    meanwhile.finish();
    if constexpr (kKeys % 4 == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int k = 0; k < kKeys; k += 4) {
          V::sum4(sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3],
                  logits + r * kTileKeys + k);
        }
      }
    } else if constexpr (kRows == 4) {
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) {
        float of_rows[4];
        V::sum4(sums[0][k], sums[1][k], sums[2][k], sums[3][k], of_rows);
#pragma GCC unroll 8
        for (int r = 0; r < 4; ++r) logits[r * kTileKeys + k] = of_rows[r];
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int k = 0; k < kKeys; ++k) logits[r * kTileKeys + k] = sum_lanes(sums[r][k]);
      }
    }
  }

  // As many keys of [begin, end) as there are in blocks of kKeys. Returns the first of the others.
  template <ElementType kType, int kRows, int kKeys>
  [[gnu::always_inline]] static int64_t multiply_some(const float* query, int64_t query_stride,
                                                      const TokenRows& keys, int64_t begin,
                                                      int64_t end, LineFetcher& fetcher,
                                                      float* logits) {
    int64_t k = begin;
    for (; k + kKeys <= end; k += kKeys) {
      multiply_block<kType, kRows, kKeys>(query, query_stride, keys.rows + k, keys.size, fetcher,
                                          logits + k);
    }
    return k;
  }

  template <ElementType kType, int kRows>
  static void multiply_rows(const float* query, int64_t query_stride, const TokenRows& keys,
                            int64_t begin, int64_t end, LineFetcher& fetcher, float* logits) {
    constexpr int kKeys = V::template keys_per_block<kRows>();
    static_assert(kWholeBlocksOfKeys % kKeys == 0);
    int64_t k =
        multiply_some<kType, kRows, kKeys>(query, query_stride, keys, begin, end, fetcher, logits);
    if constexpr (kKeys > 4) {
      k = multiply_some<kType, kRows, 4>(query, query_stride, keys, k, end, fetcher, logits);
    }
    if constexpr (kKeys > 2) {
      k = multiply_some<kType, kRows, 2>(query, query_stride, keys, k, end, fetcher, logits);
    }
    multiply_some<kType, kRows, 1>(query, query_stride, keys, k, end, fetcher, logits);
  }

  // Queries of a pass over the keys; the last pass may have fewer.
  static constexpr int64_t kQueriesPerPass = 4;

  // Turns of multiply_block()'s loop, or a few less.
  static int64_t num_product_turns(int64_t num_queries, const TokenRows& keys) {
    const int64_t num_keys = keys.end - keys.begin;
    int64_t num_blocks = num_queries / kQueriesPerPass * num_key_blocks<kQueriesPerPass>(num_keys);
    switch (num_queries % kQueriesPerPass) {
      case 1:
        num_blocks += num_key_blocks<1>(num_keys);
        break;
      case 2:
        num_blocks += num_key_blocks<2>(num_keys);
        break;
      case 3:
        num_blocks += num_key_blocks<3>(num_keys);
        break;
      default:
        break;
    }
    return num_blocks * (keys.size / kLanes);
  }

  template <int kRows>
  [[gnu::always_inline]] static int64_t num_key_blocks(int64_t num_keys) {
    constexpr int64_t kKeys = V::template keys_per_block<kRows>();
    return (num_keys + kKeys - 1) / kKeys;
  }

  template <ElementType kType>
  static void multiply_keys(const FloatRows& queries, const TokenRows& keys, float* logits) {
    // So many keys stay in the first-level cache while all queries go over them.
    constexpr int64_t kBlockBytes = 16 * 1024, kUnit = kWholeBlocksOfKeys;
    const int64_t fitting = kBlockBytes / (keys.size * element_size(kType));
    const int64_t step = fitting < kUnit ? kUnit : fitting / kUnit * kUnit;
    LineFetcher fetcher(keys.ahead, num_product_turns(queries.count, keys));
    for (int64_t begin = keys.begin; begin < keys.end; begin += step) {
      const int64_t end = begin + step < keys.end ? begin + step : keys.end;
      for (int64_t row = 0; row < queries.count; row += kQueriesPerPass) {
        const float* query = queries.data + row * queries.stride;
        float* out = logits + row * kTileKeys;
        switch (queries.count - row) {
          case 1:
            multiply_rows<kType, 1>(query, queries.stride, keys, begin, end, fetcher, out);
            break;
          case 2:
            multiply_rows<kType, 2>(query, queries.stride, keys, begin, end, fetcher, out);
            break;
          case 3:
            multiply_rows<kType, 3>(query, queries.stride, keys, begin, end, fetcher, out);
            break;
          default:
            multiply_rows<kType, kQueriesPerPass>(query, queries.stride, keys, begin, end, fetcher,
                                                  out);
        }
      }
    }
    fetcher.finish(keys.ahead);
  }

  // Adds all values to kVecs vectors of kRows outputs, which stay in registers meanwhile.
  template <ElementType kType, int kRows, int kVecs>
  [[gnu::always_inline]] static void add_block(const float* weights, const TokenRows& values,
                                               int64_t d, float* output, int64_t output_stride,
                                               LineFetcher& fetcher) {
    Vec sums[kRows][kVecs];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        sums[r][i] = load(output + r * output_stride + d + i * kLanes);
      }
    }
    // Values first, then one weight after the other: so all fits into sixteen registers.
    const auto add_value = [&](int64_t k) [[gnu::always_inline]] {
      Vec value[kVecs];
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        value[i] = V::template load_as_float<kType>(element<kType>(values.rows[k], d + i * kLanes));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = broadcast(weights[r * kTileKeys + k]);
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) sums[r][i] = V::fma(weight, value[i], sums[r][i]);
      }
    };
    LineFetcher::Loop meanwhile(fetcher);
    for (int64_t k = values.begin; k < values.end; ++k) {
      meanwhile.turn();
      add_value(k);
    }
    meanwhile.finish();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        store(output + r * output_stride + d + i * kLanes, sums[r][i]);
      }
    }
  }

  // All columns of kRows rows.
  template <ElementType kType, int kRows>
  static void add_rows(const float* weights, const TokenRows& values, float* output,
                       int64_t output_stride, LineFetcher& fetcher) {
    constexpr int kVecs = vecs_per_block<kRows>();
    int64_t d = 0;
    for (; d + kVecs * kLanes <= values.size; d += kVecs * kLanes) {
      add_block<kType, kRows, kVecs>(weights, values, d, output, output_stride, fetcher);
    }
    for (; d < values.size; d += kLanes) {
      add_block<kType, kRows, 1>(weights, values, d, output, output_stride, fetcher);
    }
  }

  // Vectors of each row that stay in registers: fewer rows leave room for more.
  template <int kRows>
  static constexpr int vecs_per_block() {
    return kRows == 1 ? 8 : kRows == 4 ? 3 : 4;
  }

  // Turns of add_block()'s loop for so many rows of outputs, or a few less.
  static int64_t num_sum_turns(int64_t num_rows, const TokenRows& values) {
    const int64_t num_vecs = values.size / kLanes;
    int64_t num_blocks = num_rows / 4 * num_column_blocks<4>(num_vecs);
    if (num_rows % 4 == 1) num_blocks += num_column_blocks<1>(num_vecs);
    if (num_rows % 4 == 2) num_blocks += num_column_blocks<2>(num_vecs);
    if (num_rows % 4 == 3) num_blocks += num_column_blocks<3>(num_vecs);
    return num_blocks * (values.end - values.begin);
  }

  template <int kRows>
  [[gnu::always_inline]] static int64_t num_column_blocks(int64_t num_vecs) {
    constexpr int64_t kVecs = vecs_per_block<kRows>();
    if constexpr (kRows == 4) return (num_vecs + kVecs - 1) / kVecs;
    return num_vecs / kVecs + num_vecs % kVecs;
  }

  // Of the next block of four rows that have so many vectors left: three, but a last one is not
  // left alone.
  static int64_t vecs_of_block(int64_t num_left) {
    static_assert(vecs_per_block<4>() == 3);
    if (num_left == 4) return 2;
    return num_left < 3 ? num_left : 3;
  }

  template <ElementType kType>
  static void add_values(const float* weights, const TokenRows& values, const FloatRows& outputs) {
    const int64_t num_fours = outputs.count / 4 * 4;
    LineFetcher fetcher(values.ahead, num_sum_turns(outputs.count, values));
    // The columns of a block stay in the first-level cache while all rows go over them.
    int64_t num_vecs = 0;
    for (int64_t d = 0; num_fours > 0 && d < values.size; d += num_vecs * kLanes) {
      num_vecs = vecs_of_block((values.size - d) / kLanes);
      for (int64_t row = 0; row < num_fours; row += 4) {
        const float* w = weights + row * kTileKeys;
        float* output = outputs.data + row * outputs.stride;
        switch (num_vecs) {
          case 3:
            add_block<kType, 4, 3>(w, values, d, output, outputs.stride, fetcher);
            break;
          case 2:
            add_block<kType, 4, 2>(w, values, d, output, outputs.stride, fetcher);
            break;
          default:
            add_block<kType, 4, 1>(w, values, d, output, outputs.stride, fetcher);
        }
      }
    }
    const float* w = weights + num_fours * kTileKeys;
    float* output = outputs.data + num_fours * outputs.stride;
    switch (outputs.count - num_fours) {
      case 3:
        add_rows<kType, 3>(w, values, output, outputs.stride, fetcher);
        break;
      case 2:
        add_rows<kType, 2>(w, values, output, outputs.stride, fetcher);
        break;
      case 1:
        add_rows<kType, 1>(w, values, output, outputs.stride, fetcher);
        break;
      default:
        break;
    }
    fetcher.finish(values.ahead);
  }

  // ---------------------------------------------------------------- softmax

  static void transform_logits(const LogitTransform& t, float* logits) {
    alignas(64) static constexpr float kIota[16] = {0, 1, 2,  3,  4,  5,  6,  7,
                                                    8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t k = 0; k < kTileKeys; k += kLanes) {
      Vec logit = load(logits + k) * t.scale;
      if (t.softcap > 0) logit = Math::tanh(logit * (1.0f / t.softcap)) * t.softcap;
      if (t.alibi_slope != 0) {
        logit += (load(kIota) + (t.distance + static_cast<float>(k))) * t.alibi_slope;
      }
      store(logits + k, logit);
    }
    for (int64_t k = 0; k < t.begin; ++k) logits[k] = -__builtin_inff();
    for (int64_t k = t.end; k < kTileKeys; ++k) logits[k] = -__builtin_inff();
  }

  // The largest logit; -inf if there is none. max() passes over NaN, so a row of nothing but NaN
  // would look like one without keys, and its result would be a clean zero.
  static float max_or_nan(const float* logits) {
    Vec max_vec = load(logits);
    for (int64_t k = kLanes; k < kTileKeys; k += kLanes) {
      max_vec = V::max(load(logits + k), max_vec);
    }
    float result = -__builtin_inff();
    for (int64_t i = 0; i < kLanes; ++i) result = max_vec[i] > result ? max_vec[i] : result;
    if (result != -__builtin_inff()) return result;
    for (int64_t k = 0; k < kTileKeys; ++k) {
      if (logits[k] != logits[k]) return logits[k];
    }
    return result;
  }

  static bool softmax(float* logits, SoftmaxState& state, float* output, int64_t size) {
    const float tile_max = max_or_nan(logits);
    if (tile_max == -__builtin_inff()) return false;  // and -inf - -inf would be NaN
    const float old_max = state.max;
    state.max = tile_max < old_max ? old_max : tile_max;  // NaN in tile_max stays
    Vec sums{};
    for (int64_t k = 0; k < kTileKeys; k += kLanes) {
      const Vec weight = Math::exp(load(logits + k) - state.max);
      store(logits + k, weight);
      sums += weight;
    }
    if (state.max != old_max) {
      const float rescale = Math::exp(old_max - state.max);
      state.sum *= rescale;
      for (int64_t d = 0; d < size; d += kLanes) store(output + d, load(output + d) * rescale);
    }
    state.sum += sum_lanes(sums);
    return true;
  }

  static void merge(SoftmaxState& state, float* output, const SoftmaxState& other_state,
                    const float* other_output, int64_t size) {
    const float max = other_state.max < state.max ? state.max : other_state.max;
    const float weight = state.max == max ? 1.0f : Math::exp(state.max - max);
    const float other_weight = other_state.max == max ? 1.0f : Math::exp(other_state.max - max);
    for (int64_t d = 0; d < size; d += kLanes) {
      store(output + d,
            V::fma(load(other_output + d), broadcast(other_weight), load(output + d) * weight));
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
    k.gated_activations = GatedActivationKernelsFor<V>::table();
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
      k.multiply_keys[kIndex] = &multiply_keys<kType>;
      k.add_values[kIndex] = &add_values<kType>;
    }
    if constexpr (V::template kTakesAsHalf<kType>) {
      k.convert_to_half[kIndex] = &V::template convert_to_half<kType>;
    }
  }
};

}  // namespace paged_kv::cpu
