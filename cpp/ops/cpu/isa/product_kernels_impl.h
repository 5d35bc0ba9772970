// SPDX-License-Identifier: Apache-2.0
//
// The two products of attention_kernels.h, queries by keys and weights by values, for any
// instruction set V (attention_kernels_impl.h says what that has). Both keep a block of sums in
// registers and fetch memory meanwhile.
#pragma once

#include "ops/cpu/isa/attention_kernels.h"
#include "ops/cpu/isa/float_vectors.h"
#include "ops/cpu/isa/line_fetcher.h"

namespace paged_kv::cpu {

template <class V>
struct ProductKernelsFor {
  using Vec = typename V::Vec;
  using Floats = FloatVectors<V>;
  static constexpr int64_t kLanes = V::kLanes;
  // A multiple of it is whole blocks of keys for any number of queries: less leaves some over,
  // which take longer.
  static constexpr int64_t kWholeBlocksOfKeys = 24;

  // The products of kRows queries and kKeys keys; each load of a key serves all queries. They come
  // query by query, kTileKeys apart, but those of four queries key by key: one store a key.
  template <ElementType kType, int kRows, int kKeys>
  [[gnu::always_inline]] static void multiply_block(const float* query, int64_t query_stride,
                                                    const TokenRows& keys, int64_t first_key,
                                                    LineFetcher& fetcher, float* products) {
    const void* key_rows[kKeys];  // in registers: each turn would read `keys` again
#pragma GCC unroll 8
    for (int k = 0; k < kKeys; ++k) key_rows[k] = keys.row(first_key + k);
    Vec sums[kRows][kKeys] = {};
    LineFetcher::Loop meanwhile(fetcher);
    for (int64_t d = 0; d < keys.size; d += kLanes) {
      meanwhile.turn();
      Vec q[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) q[r] = Floats::load(query + r * query_stride + d);
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) {
        const Vec key = V::template load_as_float<kType>(element<kType>(key_rows[k], d));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) sums[r][k] = V::fma(q[r], key, sums[r][k]);
      }
    }
    meanwhile.finish();
    if constexpr (kRows == 4) {
#pragma GCC unroll 8
      for (int k = 0; k < kKeys; ++k) {
        V::sum4(sums[0][k], sums[1][k], sums[2][k], sums[3][k], products + 4 * k);
      }
    } else if constexpr (kKeys % 4 == 0) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int k = 0; k < kKeys; k += 4) {
          V::sum4(sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3],
                  products + r * kTileKeys + k);
        }
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int k = 0; k < kKeys; ++k) {
          products[r * kTileKeys + k] = Floats::sum_lanes(sums[r][k]);
        }
      }
    }
  }

  // As many keys of [begin, end) as there are in blocks of kKeys. Returns the first of the others.
  template <ElementType kType, int kRows, int kKeys>
  [[gnu::always_inline]] static int64_t multiply_some(const float* query, int64_t query_stride,
                                                      const TokenRows& keys, int64_t begin,
                                                      int64_t end, LineFetcher& fetcher,
                                                      float* products) {
    constexpr int64_t kKeyStride = kRows == 4 ? 4 : 1;
    int64_t k = begin;
    for (; k + kKeys <= end; k += kKeys) {
      multiply_block<kType, kRows, kKeys>(query, query_stride, keys, k, fetcher,
                                          products + k * kKeyStride);
    }
    return k;
  }

  // All keys of [begin, end), in blocks as large as there are.
  template <ElementType kType, int kRows>
  [[gnu::always_inline]] static void multiply_blocks(const float* query, int64_t query_stride,
                                                     const TokenRows& keys, int64_t begin,
                                                     int64_t end, LineFetcher& fetcher,
                                                     float* products) {
    constexpr int kKeys = V::template keys_per_block<kRows>();
    static_assert(kWholeBlocksOfKeys % kKeys == 0);
    int64_t k = multiply_some<kType, kRows, kKeys>(query, query_stride, keys, begin, end, fetcher,
                                                   products);
    if constexpr (kKeys > 4) {
      k = multiply_some<kType, kRows, 4>(query, query_stride, keys, k, end, fetcher, products);
    }
    if constexpr (kKeys > 2) {
      k = multiply_some<kType, kRows, 2>(query, query_stride, keys, k, end, fetcher, products);
    }
    multiply_some<kType, kRows, 1>(query, query_stride, keys, k, end, fetcher, products);
  }

  template <ElementType kType, int kRows>
  static void multiply_rows(const float* query, int64_t query_stride, const TokenRows& keys,
                            int64_t begin, int64_t end, LineFetcher& fetcher, float* logits) {
    if constexpr (kRows == 4) {
      alignas(64) float by_key[kTileKeys * 4];
      multiply_blocks<kType, 4>(query, query_stride, keys, begin, end, fetcher, by_key);
      transpose_products(by_key, begin, end, logits);
    } else {
      multiply_blocks<kType, kRows>(query, query_stride, keys, begin, end, fetcher, logits);
    }
  }

  // logits[r * kTileKeys + k] = by_key[4 * k + r] for k in [begin, end).
  [[gnu::always_inline]] static void transpose_products(const float* by_key, int64_t begin,
                                                        int64_t end, float* logits) {
    using Vec4 = float __attribute__((vector_size(16)));
    const auto load = [&](int64_t k) [[gnu::always_inline]] {
      Vec4 v;
      __builtin_memcpy(&v, by_key + 4 * k, sizeof(v));
      return v;
    };
    const auto store = [&](int64_t r, int64_t k, Vec4 v) [[gnu::always_inline]] {
      __builtin_memcpy(logits + r * kTileKeys + k, &v, sizeof(v));
    };
    int64_t k = begin;
    for (; k + 4 <= end; k += 4) {
      const Vec4 a = load(k), b = load(k + 1), c = load(k + 2), d = load(k + 3);
      const Vec4 ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Vec4 cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Vec4 ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Vec4 cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      store(0, k, __builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5));
      store(1, k, __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7));
      store(2, k, __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5));
      store(3, k, __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7));
    }
    for (; k < end; ++k) {
      for (int64_t r = 0; r < 4; ++r) logits[r * kTileKeys + k] = by_key[4 * k + r];
    }
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
        sums[r][i] = Floats::load(output + r * output_stride + d + i * kLanes);
      }
    }
    const auto weight = [&](int r, int64_t k) [[gnu::always_inline]] {
      return V::broadcast(weights[r * kTileKeys + k]);
    };
    const int64_t first_byte = values.offset_bytes + d * element_size(kType);
    const auto value = [&](int i, int64_t k) [[gnu::always_inline]] {
      const char* first = static_cast<const char*>(values.tokens[k]) + first_byte;
      return V::template load_as_float<kType>(element<kType>(first, i * kLanes));
    };
    // With the sums, only the fewer of the two fit into sixteen registers.
    const auto add_value = [&](int64_t k) [[gnu::always_inline]] {
      if constexpr (kRows < kVecs) {
        Vec all_weights[kRows];
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) all_weights[r] = weight(r, k);
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) {
          const Vec v = value(i, k);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sums[r][i] = V::fma(all_weights[r], v, sums[r][i]);
        }
      } else {
        Vec all_values[kVecs];
#pragma GCC unroll 8
        for (int i = 0; i < kVecs; ++i) all_values[i] = value(i, k);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec w = weight(r, k);
#pragma GCC unroll 8
          for (int i = 0; i < kVecs; ++i) sums[r][i] = V::fma(w, all_values[i], sums[r][i]);
        }
      }
    };
    LineFetcher::Loop meanwhile(fetcher);
    constexpr int kKeys = keys_per_turn<kRows>();
    int64_t k = values.begin;
    for (; k + kKeys <= values.end; k += kKeys) {
      meanwhile.turn();
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) add_value(k + i);
    }
    for (; k < values.end; ++k) add_value(k);
    meanwhile.finish();
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kVecs; ++i) {
        Floats::store(output + r * output_stride + d + i * kLanes, sums[r][i]);
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

  // Keys of a turn of add_block()'s loop: the sums of more rows leave no registers for two.
  template <int kRows>
  static constexpr int keys_per_turn() {
    return kRows <= 2 ? 2 : 1;
  }

  // Turns of add_block()'s loop for so many rows of outputs, or a few less.
  static int64_t num_sum_turns(int64_t num_rows, const TokenRows& values) {
    int64_t num_turns = num_rows / 4 * num_turns_of_rows<4>(values);
    if (num_rows % 4 == 1) num_turns += num_turns_of_rows<1>(values);
    if (num_rows % 4 == 2) num_turns += num_turns_of_rows<2>(values);
    if (num_rows % 4 == 3) num_turns += num_turns_of_rows<3>(values);
    return num_turns;
  }

  template <int kRows>
  [[gnu::always_inline]] static int64_t num_turns_of_rows(const TokenRows& values) {
    constexpr int64_t kVecs = vecs_per_block<kRows>();
    const int64_t num_vecs = values.size / kLanes;
    const int64_t num_blocks =
        kRows == 4 ? (num_vecs + kVecs - 1) / kVecs : num_vecs / kVecs + num_vecs % kVecs;
    return num_blocks * ((values.end - values.begin) / keys_per_turn<kRows>());
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
};

}  // namespace paged_kv::cpu
