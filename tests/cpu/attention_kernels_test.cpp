// SPDX-License-Identifier: Apache-2.0
//
// The inner loops of each instruction set that this machine can run, one by one.
#include "ops/cpu/isa/attention_kernels.h"

#include "element_values.h"
#include "ops/cpu/isa/select.h"
#include "sixteen_lanes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::element_value;
using testing::kElementTypes;
using testing::pack;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
[[nodiscard]] int index(ElementType type) { return static_cast<int>(type); }

void expect_same(float actual, float expected, const std::string& what) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(actual)) << what;
  } else {
    EXPECT_EQ(actual, expected) << what;
  }
}

class Kernels : public ::testing::TestWithParam<const AttentionKernels*> {
 protected:
  [[nodiscard]] float value_of(ElementType type, std::uint32_t bits) const {
    return element_value(type, bits) / kernels_.unit[index(type)];
  }

  const AttentionKernels& kernels_ = *GetParam();
};

INSTANTIATE_TEST_SUITE_P(InstructionSets, Kernels,
                         ::testing::ValuesIn(testing::attention_kernels_to_test()),
                         [](const auto& test) { return std::string(test.param->name); });

// Every bit pattern of the 8-bit and 16-bit types.
TEST_P(Kernels, ConvertEachElementToItsValue) {
  for (const ElementType type : kElementTypes) {
    const std::uint32_t num_patterns = element_size(type) == 1 ? 256 : 65536;
    std::vector<std::uint32_t> bits(num_patterns);
    std::iota(bits.begin(), bits.end(), type == ElementType::kFloat ? 0x3f800000U : 0U);
    const auto packed = pack(type, bits);
    std::vector<float> converted(num_patterns);
    kernels_.convert_row[index(type)](packed.data(), num_patterns, converted.data());
    for (std::size_t i = 0; i < num_patterns; ++i) {
      expect_same(converted[i], value_of(type, bits[i]), std::to_string(bits[i]));
    }
  }
}

// Every element, in rows with and without a last half of a vector; nothing behind them is touched.
TEST_P(Kernels, ConvertedHalvesHaveTheValues) {
  for (const ElementType type : kElementTypes) {
    if (kernels_.convert_to_half[index(type)] == nullptr) continue;
    for (std::int64_t size = kernels_.lanes; size <= 256; size += kernels_.lanes) {
      const std::int64_t num_rows = 256 / size + 1;
      std::vector<std::uint32_t> bits(static_cast<std::size_t>(num_rows * size));
      for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint32_t>(i % 256);
      const auto packed = pack(type, bits);  // a read past its end is an error under ASan
      std::vector<const void*> rows;
      for (std::int64_t k = 0; k < num_rows; ++k) rows.push_back(packed.data() + k * size);
      std::vector<std::uint16_t> halves(bits.size(), 7);
      kernels_.convert_to_half[index(type)]({rows.data(), 1, num_rows, size}, halves.data());
      for (std::size_t i = 0; i < bits.size(); ++i) {
        const float expected = value_of(type, bits[i]);
        const bool is_before = std::cmp_less(i, size);
        expect_same(to_float(Half{halves[i]}), is_before ? to_float(Half{7}) : expected,
                    std::to_string(bits[i]));
      }
    }
  }
}

TEST_P(Kernels, ConvertedRowsEndWithZeros) {
  for (const ElementType type : kElementTypes) {
    for (std::int64_t size = 1; size <= 40; ++size) {
      std::vector<std::uint32_t> bits(static_cast<std::size_t>(size), 0x31U);
      const auto packed = pack(type, bits);  // a read past its end is an error under ASan
      std::vector<float> row(64, 7.0f);
      kernels_.convert_row[index(type)](packed.data(), size, row.data());
      const std::int64_t padded = (size + kernels_.lanes - 1) / kernels_.lanes * kernels_.lanes;
      for (std::int64_t i = 0; i < 64; ++i) {
        const float expected = i < size ? value_of(type, 0x31U) : i < padded ? 0.0f : 7.0f;
        EXPECT_EQ(row[static_cast<std::size_t>(i)], expected) << size << ' ' << i;
      }
    }
  }
}

TEST_P(Kernels, ConvertChunkedRows) {
  for (const ElementType type : kElementTypes) {
    const std::int64_t chunk = 16 / element_size(type);
    const std::int64_t size = 3 * chunk;
    constexpr std::int64_t kStrideChunks = 4;
    std::vector<std::uint32_t> bits(static_cast<std::size_t>(size * kStrideChunks));
    std::iota(bits.begin(), bits.end(), 1U);
    const auto packed = pack(type, bits);
    std::vector<float> row(64, 7.0f);
    kernels_.convert_chunked_row[index(type)](packed.data(), 16 * kStrideChunks, size, row.data());
    for (std::int64_t d = 0; d < size; ++d) {
      const std::int64_t source = d / chunk * chunk * kStrideChunks + d % chunk;
      EXPECT_EQ(row[static_cast<std::size_t>(d)],
                value_of(type, bits[static_cast<std::size_t>(source)]));
    }
    for (std::int64_t d = size; d % kernels_.lanes != 0; ++d) {
      EXPECT_EQ(row[static_cast<std::size_t>(d)], 0.0f);
    }
  }
}

TEST_P(Kernels, TransposeRows) {
  for (const ElementType type : kElementTypes) {
    constexpr std::int64_t kSize = 19, kTokens = 8, kDimStride = 24, kTargetStride = 32;
    std::vector<std::uint32_t> bits(kSize * kDimStride);
    for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint32_t>(i % 120);
    const auto packed = pack(type, bits);
    std::vector<float> rows(kTokens * kTargetStride, 7.0f);
    kernels_.transpose_rows[index(type)](packed.data(), kDimStride * element_size(type), kSize,
                                         rows.data(), kTargetStride);
    const std::int64_t padded = (kSize + kernels_.lanes - 1) / kernels_.lanes * kernels_.lanes;
    for (std::int64_t t = 0; t < kTokens; ++t) {
      for (std::int64_t d = 0; d < padded; ++d) {
        const auto source = static_cast<std::size_t>(d * kDimStride + t);
        const float expected = d < kSize ? value_of(type, bits[source]) : 0.0f;
        EXPECT_EQ(rows[static_cast<std::size_t>(t * kTargetStride + d)], expected);
      }
    }
  }
}

TEST_P(Kernels, StoredRowsAreRoundedToNearestEven) {
  std::mt19937 random(5);
  std::vector<float> source(4099);
  for (float& x : source) x = std::bit_cast<float>(static_cast<std::uint32_t>(random()));
  source[0] = NAN;
  source[1] = kInfinity;
  source[2] = 1.0f + 0x1p-8f;   // a tie between two bfloat16
  source[3] = 1.0f + 0x1p-11f;  // and between two binary16
  const auto size = std::ssize(source);
  std::vector<float> floats(source.size());
  std::vector<Half> halves(source.size());
  std::vector<BFloat16> bfloats(source.size());
  kernels_.store_row[0](source.data(), 2.0f, size, floats.data());
  kernels_.store_row[1](source.data(), 2.0f, size, halves.data());
  kernels_.store_row[2](source.data(), 2.0f, size, bfloats.data());
  for (std::size_t i = 0; i < source.size(); ++i) {
    const float scaled = source[i] * 2.0f;
    expect_same(floats[i], scaled, "float");
    expect_same(to_float(halves[i]), to_float(to<Half>(scaled)), "half");
    expect_same(to_float(bfloats[i]), to_float(to<BFloat16>(scaled)), "bfloat16");
  }
}

// So many calls fetch all groups of lines, about as many each, and no run that is not there is
// looked up: the array ends with the last, which ASan watches. What is fetched meanwhile changes no
// bit.
TEST_P(Kernels, CallsTakeOutTheLinesThatTheyFetch) {
  constexpr std::int64_t kSize = 64, kKeys = 16;
  const std::vector<float> keys(kKeys * kSize, 0.5f), queries(5 * kSize, 0.25f);
  std::array<const void*, kTileKeys> key_rows{};
  for (std::int64_t k = 0; k < kKeys; ++k) {
    key_rows[static_cast<std::size_t>(k)] = keys.data() + k * kSize;
  }
  const char* memory = reinterpret_cast<const char*>(keys.data());
  for (const std::int64_t num_queries : {1, 2, 3, 4, 5}) {
    for (const auto& [num_runs, num_bytes, num_calls] :
         {std::tuple{1, 64, 1}, {1, 300, 3}, {16, 2048, 8}, {3, 3000, 2}, {24, 1, 4}}) {
      const std::vector<MemoryRun> runs(static_cast<std::size_t>(num_runs),
                                        {memory, memory + num_bytes});
      for (const bool multiplies : {true, false}) {
        LinesAhead ahead = LinesAhead::of(runs.data(), num_runs, num_calls);
        const TokenRows tokens{key_rows.data(), 0, kKeys, kSize, 0, &ahead};
        const TokenRows without{key_rows.data(), 0, kKeys, kSize};
        std::vector<float> products(5 * kTileKeys, 0.5f), sums(5 * kSize, 0.5f);
        auto expected_products = products, expected_sums = sums;
        const auto call = [&](const TokenRows& t, std::vector<float>& p, std::vector<float>& s) {
          if (multiplies) {
            kernels_.multiply_keys[0]({const_cast<float*>(queries.data()), kSize, num_queries}, t,
                                      p.data());
          } else {
            kernels_.add_values[0](p.data(), t, {s.data(), kSize, num_queries});
          }
        };
        const std::int64_t num_groups = ahead.num_groups();
        std::int64_t num_left = num_groups;
        for (int i = 0; i < num_calls + 1 && ahead.num_runs > 0; ++i) {
          call(tokens, products, sums);
          call(without, expected_products, expected_sums);
          EXPECT_LT(ahead.num_groups(), num_left);
          num_left = ahead.num_groups();
          EXPECT_GE(num_left, num_groups - (i + 1) * 2 * ahead.groups_per_call);
        }
        EXPECT_EQ(ahead.num_runs, 0);
        EXPECT_EQ(products, expected_products);
        EXPECT_EQ(sums, expected_sums);
      }
    }
  }
}

// Rows and columns at all edges of the register blocks, against the definition in double; how many
// rows a call has changes no bit.
TEST_P(Kernels, BothProductsMatchTheDefinition) {
  constexpr std::int64_t kRows = 9, kSize = 48;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> queries(kRows * kSize);
  for (float& x : queries) x = normal(random);
  for (const ElementType type : kElementTypes) {
    if (kernels_.multiply_keys[index(type)] == nullptr) continue;
    std::vector<std::uint32_t> bits(kTileKeys * kSize);
    for (auto& b : bits) {
      b = type == ElementType::kFloat ? std::bit_cast<std::uint32_t>(normal(random))
                                      : static_cast<std::uint32_t>(random() % 48);
    }
    // Another row in front, which the pointers are to and the offset leads over.
    const std::int64_t row_bytes = kSize * element_size(type);
    auto packed = pack(type, bits);
    packed.insert(packed.begin(), static_cast<std::size_t>(row_bytes), std::byte{0x7f});
    std::array<const void*, kTileKeys> rows{};
    for (std::int64_t k = 0; k < kTileKeys; ++k) {
      rows[static_cast<std::size_t>(k)] = packed.data() + k * row_bytes;
    }
    for (const auto& [begin, end] : {std::pair{0, 64}, {0, 1}, {3, 22}, {17, 17}, {5, 64}}) {
      const TokenRows tokens{rows.data(), begin, end, kSize, row_bytes};
      std::vector<float> logits(kRows * kTileKeys, NAN), output(kRows * kSize, 0.5f);
      kernels_.multiply_keys[index(type)]({queries.data(), kSize, kRows}, tokens, logits.data());
      kernels_.add_values[index(type)](logits.data(), tokens, {output.data(), kSize, kRows});
      for (std::int64_t r = 0; r < kRows; ++r) {
        std::vector<double> sum(kSize, 0.5), magnitude(kSize, 1.0);
        for (std::int64_t k = begin; k < end; ++k) {
          double logit = 0, logit_magnitude = 1e-30;
          for (std::int64_t d = 0; d < kSize; ++d) {
            const double product =
                double{queries[static_cast<std::size_t>(r * kSize + d)]} *
                double{value_of(type, bits[static_cast<std::size_t>(k * kSize + d)])};
            logit += product;
            logit_magnitude += std::abs(product);
          }
          const float actual = logits[static_cast<std::size_t>(r * kTileKeys + k)];
          ASSERT_NEAR(actual, logit, logit_magnitude * 1e-6);
          for (std::int64_t d = 0; d < kSize; ++d) {
            const double product =
                double{actual} *
                double{value_of(type, bits[static_cast<std::size_t>(k * kSize + d)])};
            sum[static_cast<std::size_t>(d)] += product;
            magnitude[static_cast<std::size_t>(d)] += std::abs(product);
          }
        }
        for (std::int64_t d = 0; d < kSize; ++d) {
          const auto i = static_cast<std::size_t>(d);
          ASSERT_NEAR(output[static_cast<std::size_t>(r * kSize + d)], sum[i], magnitude[i] * 1e-5);
        }
        // Alone, the row has the same bits.
        std::vector<float> alone(kTileKeys, NAN), alone_output(kSize, 0.5f);
        kernels_.multiply_keys[index(type)]({queries.data() + r * kSize, kSize, 1}, tokens,
                                            alone.data());
        kernels_.add_values[index(type)](alone.data(), tokens, {alone_output.data(), kSize, 1});
        const auto num_keys = static_cast<std::size_t>(end - begin);
        ASSERT_EQ(std::memcmp(alone.data() + begin, logits.data() + r * kTileKeys + begin,
                              num_keys * sizeof(float)),
                  0);
        ASSERT_EQ(
            std::memcmp(alone_output.data(), output.data() + r * kSize, sizeof(float) * kSize), 0);
      }
    }
  }
}

// The largest logit of products that are the logits.
float max_of(const AttentionKernels& kernels, std::array<float, kTileKeys>& logits) {
  return kernels.transform_logits({}, logits.data());
}

// Of one row.
SoftmaxState softmax_of(const AttentionKernels& kernels, std::array<float, kTileKeys>& logits) {
  SoftmaxState state{-kInfinity, 0.0f};
  std::vector<float> output(16, 0.0f);
  kernels.softmax(logits.data(), max_of(kernels, logits), state, output.data(), 16);
  return state;
}

TEST_P(Kernels, WeightsAreAccurateExponentials) {
  for (float x = 0.0f; x < 86.9f; x += 0.0137f) {
    std::array<float, kTileKeys> logits;
    logits.fill(-kInfinity);
    logits[7] = 3.0f;
    logits[40] = 3.0f - x;
    const SoftmaxState state = softmax_of(kernels_, logits);
    const double expected = std::exp(double{3.0f - x} - 3.0);
    ASSERT_NEAR(logits[40], expected, expected * 2.5e-7) << x;
    ASSERT_EQ(logits[7], 1.0f);
    ASSERT_EQ(logits[8], 0.0f);
    ASSERT_EQ(state.max, 3.0f);
    ASSERT_NEAR(state.sum, 1.0 + expected, 1e-6);
  }
}

TEST_P(Kernels, SoftmaxHandlesTheEnds) {
  std::array<float, kTileKeys> logits;
  logits.fill(-kInfinity);
  SoftmaxState state{-5.0f, 2.0f};
  std::vector<float> output(16, 1.0f);
  EXPECT_FALSE(kernels_.softmax(logits.data(), max_of(kernels_, logits), state, output.data(), 16));
  EXPECT_EQ(state.sum, 2.0f);

  logits[3] = -5.0f + 10.0f;  // the maximum rises: what was gathered shrinks
  EXPECT_TRUE(kernels_.softmax(logits.data(), max_of(kernels_, logits), state, output.data(), 16));
  EXPECT_NEAR(state.sum, 1.0 + 2.0 * std::exp(-10.0), 1e-6);
  EXPECT_NEAR(output[15], std::exp(-10.0), 1e-10);

  logits.fill(-1000.0f);
  logits[0] = 0.0f;
  EXPECT_EQ(softmax_of(kernels_, logits).sum, 1.0f);

  logits.fill(NAN);  // not a row without keys
  EXPECT_TRUE(std::isnan(softmax_of(kernels_, logits).sum));
  logits.fill(0.0f);
  logits[63] = NAN;
  EXPECT_TRUE(std::isnan(softmax_of(kernels_, logits).sum));
}

TEST_P(Kernels, SoftcapIsAnAccurateTanh) {
  for (float x = -12.0f; x < 12.0f; x += 0.0031f) {
    std::array<float, kTileKeys> logits;
    logits.fill(x);
    const LogitTransform transform{.scale = 2.0f, .softcap = 2.0f};
    ASSERT_EQ(kernels_.transform_logits(transform, logits.data()), logits[5]);
    const double expected = 2.0 * std::tanh(double{x});
    ASSERT_NEAR(logits[5], expected, std::abs(expected) * 5e-7 + 1e-12) << x;
  }
}

TEST_P(Kernels, AlibiAndMaskGoByColumn) {
  std::array<float, kTileKeys> logits;
  logits.fill(1.0f);
  const LogitTransform transform{
      .scale = 3.0f, .alibi_slope = 0.5f, .distance = -100.0f, .begin = 2, .end = 61};
  EXPECT_EQ(kernels_.transform_logits(transform, logits.data()), 3.0f + 0.5f * (60.0f - 100.0f));
  for (int k = 0; k < kTileKeys; ++k) {
    const bool visible = k >= 2 && k < 61;
    EXPECT_EQ(logits[static_cast<std::size_t>(k)],
              visible ? 3.0f + 0.5f * (static_cast<float>(k) - 100.0f) : -kInfinity);
  }
}

TEST_P(Kernels, HiddenColumnsAreMaskedWhateverTheScale) {
  for (const float scale : {-2.0f, 0.0f, 2.0f}) {
    std::array<float, kTileKeys> logits;
    logits.fill(1.0f);
    const LogitTransform transform{.scale = scale, .begin = 1, .end = 63};
    EXPECT_EQ(kernels_.transform_logits(transform, logits.data()), scale);
    EXPECT_EQ(logits[0], -kInfinity);
    EXPECT_EQ(logits[1], scale);
    EXPECT_EQ(logits[62], scale);
    EXPECT_EQ(logits[63], -kInfinity);
  }
}

TEST_P(Kernels, MergeJoinsTwoRanges) {
  SoftmaxState state{2.0f, 3.0f};
  std::vector<float> output(16, 1.0f);
  const std::vector<float> other(16, 10.0f);
  kernels_.merge(state, output.data(), {5.0f, 1.0f}, other.data(), 16);
  EXPECT_EQ(state.max, 5.0f);
  EXPECT_NEAR(state.sum, 1.0 + 3.0 * std::exp(-3.0), 1e-6);
  EXPECT_NEAR(output[0], 10.0 + std::exp(-3.0), 1e-5);
  EXPECT_EQ(output[15], output[0]);
}

TEST(SelectKernels, ByNameOrTheFastestTested) {
  EXPECT_STREQ(select_instruction_set("scalar").attention->name, "scalar");
  EXPECT_STRNE(select_instruction_set("").attention->name, "avx512");
  EXPECT_THROW((void)select_instruction_set("sse9"), std::invalid_argument);
  for (const InstructionSet& set : available_instruction_sets()) {
    EXPECT_EQ(select_instruction_set(set.attention->name).attention, set.attention);
  }
}

}  // namespace
}  // namespace paged_kv::cpu
