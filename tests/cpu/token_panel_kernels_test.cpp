// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/isa/token_panel_kernels.h"

#include "element_values.h"
#include "random_cache.h"
#include "sixteen_lanes.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::index;
using testing::Random;

constexpr std::int64_t kGroups = kTileKeys / kGroupTokens;

class TokenPanels : public ::testing::TestWithParam<const AttentionKernels*> {
 protected:
  const AttentionKernels& kernels_ = *GetParam();
};

INSTANTIATE_TEST_SUITE_P(InstructionSets, TokenPanels,
                         ::testing::ValuesIn(testing::attention_kernels_to_test()),
                         [](const auto& test) { return std::string(test.param->name); });

// A tile of keys or values whose groups lie anywhere, each with another one in front of it, which
// the pointers are to and the offset leads over.
class Tile {
 public:
  Tile(ElementType type, bool is_key, std::int64_t size, Random& random)
      : type_(type), is_key_(is_key), size_(size) {
    group_bytes_ = kGroupTokens * size * element_size(type);
    memory_.assign(index(kGroups * 2 * group_bytes_), std::byte{0x7f});
    for (std::int64_t k = 0; k < kTileKeys; ++k) {
      pointers_[index(k)] = memory_.data() + (kGroups - 1 - k / kGroupTokens) * 2 * group_bytes_;
      for (std::int64_t d = 0; d < size; ++d) set(k, d, testing::random_bits(type, random));
    }
  }

  void set(std::int64_t k, std::int64_t d, std::uint32_t bits) {
    std::memcpy(element(k, d), &bits, index(element_size(type_)));
  }
  void poison_token(std::int64_t k) {
    for (std::int64_t d = 0; d < size_; ++d) set(k, d, testing::poison_bits(type_));
  }
  double value(std::int64_t k, std::int64_t d) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, element(k, d), index(element_size(type_)));
    return double{testing::element_value(type_, bits)};
  }

  // Other pointers than those of its groups may not be read.
  TokenRows rows(std::int64_t begin, std::int64_t end) {
    visible_.fill(nullptr);
    for (std::int64_t k = begin / kGroupTokens * kGroupTokens; k < end; k += kGroupTokens) {
      visible_[index(k)] = pointers_[index(k)];
    }
    return {visible_.data(), begin, end, size_, group_bytes_};
  }

 private:
  std::byte* element(std::int64_t k, std::int64_t d) {
    auto* group = const_cast<std::byte*>(static_cast<const std::byte*>(pointers_[index(k)]));
    return group + group_bytes_ +
           testing::index_in_group(type_, is_key_, k % kGroupTokens, d) * element_size(type_);
  }

  ElementType type_;
  bool is_key_;
  std::int64_t size_;
  std::int64_t group_bytes_ = 0;
  std::vector<std::byte> memory_;
  std::array<const void*, kTileKeys> pointers_{};
  std::array<const void*, kTileKeys> visible_{};
};

constexpr std::array<std::pair<std::int64_t, std::int64_t>, 7> kRanges{
    {{0, 64}, {0, 1}, {3, 22}, {16, 48}, {17, 17}, {5, 64}, {31, 34}}};
constexpr std::array<std::int64_t, 3> kSizes = {16, 80, 256};
constexpr std::int64_t kMaxRows = 13;

std::vector<float> random_floats(std::int64_t size, Random& random) {
  std::vector<float> result(index(size));
  for (float& x : result) x = random.normal();
  return result;
}

bool same_bits(const float* a, const float* b, std::int64_t size) {
  return std::memcmp(a, b, index(size) * sizeof(float)) == 0;
}

// Any number of queries, groups and dims; how many queries a call has changes no bit, and logits of
// other groups stay.
TEST_P(TokenPanels, QueriesByKeysMatchTheDefinition) {
  Random random(1);
  for (const ElementType type : testing::kElementTypes) {
    const auto multiply = kernels_.token_panels.multiply_keys[static_cast<int>(type)];
    if (multiply == nullptr) continue;
    for (const std::int64_t size : kSizes) {
      Tile keys(type, true, size, random);
      auto queries = random_floats(kMaxRows * size, random);
      for (const auto& [begin, end] : kRanges) {
        const TokenRows rows = keys.rows(begin, end);
        for (std::int64_t num_rows = 1; num_rows <= kMaxRows; ++num_rows) {
          std::vector<float> logits(kMaxRows * kTileKeys, 0.25f);
          multiply({queries.data(), size, num_rows}, rows, logits.data());
          for (std::int64_t r = 0; r < num_rows; ++r) {
            std::vector<float> alone(kTileKeys, 0.25f);
            multiply({queries.data() + r * size, size, 1}, rows, alone.data());
            ASSERT_TRUE(same_bits(alone.data(), logits.data() + r * kTileKeys, kTileKeys));
          }
          if (num_rows != kMaxRows) continue;
          for (std::int64_t r = 0; r < num_rows; ++r) {
            for (std::int64_t k = begin; k < end; ++k) {
              double expected = 0, magnitude = 1e-30;
              for (std::int64_t d = 0; d < size; ++d) {
                const double product = double{queries[index(r * size + d)]} * keys.value(k, d);
                expected += product;
                magnitude += std::abs(product);
              }
              ASSERT_NEAR(logits[index(r * kTileKeys + k)], expected, magnitude * 2e-6);
            }
            const std::int64_t first = begin / kGroupTokens * kGroupTokens;
            const std::int64_t last = (end + kGroupTokens - 1) / kGroupTokens * kGroupTokens;
            for (std::int64_t k = 0; k < kTileKeys; ++k) {
              if (k >= first && k < last) continue;
              ASSERT_EQ(logits[index(r * kTileKeys + k)], 0.25f) << k;
            }
          }
        }
      }
    }
  }
}

// Any number of outputs, values and dims; what is outside the range is NaN (or, in int8, large) and
// adds nothing; outputs past the last row stay.
TEST_P(TokenPanels, WeightsByValuesMatchTheDefinition) {
  Random random(2);
  for (const ElementType type : testing::kElementTypes) {
    const auto add = kernels_.token_panels.add_values[static_cast<int>(type)];
    if (add == nullptr) continue;
    for (const std::int64_t size : kSizes) {
      for (const auto& [begin, end] : kRanges) {
        Tile values(type, false, size, random);
        for (std::int64_t k = 0; k < kTileKeys; ++k) {
          if (k < begin || k >= end) values.poison_token(k);
        }
        auto weights = random_floats(kMaxRows * kTileKeys, random);
        for (std::int64_t k = 0; k < kMaxRows * kTileKeys; ++k) {
          const std::int64_t column = k % kTileKeys;
          if (column < begin || column >= end) weights[index(k)] = NAN;
        }
        const TokenRows rows = values.rows(begin, end);
        for (std::int64_t num_rows = 1; num_rows <= kMaxRows; ++num_rows) {
          std::vector<float> outputs(index((kMaxRows + 1) * size), 0.5f);
          add(weights.data(), rows, {outputs.data(), size, num_rows});
          for (std::int64_t i = num_rows * size; i < (num_rows + 1) * size; ++i) {
            ASSERT_EQ(outputs[index(i)], 0.5f);
          }
          for (std::int64_t r = 0; r < num_rows; ++r) {
            std::vector<float> alone(index(size), 0.5f);
            add(weights.data() + r * kTileKeys, rows, {alone.data(), size, 1});
            ASSERT_TRUE(same_bits(alone.data(), outputs.data() + r * size, size));
          }
          if (num_rows != kMaxRows) continue;
          for (std::int64_t r = 0; r < num_rows; ++r) {
            for (std::int64_t d = 0; d < size; ++d) {
              double expected = 0.5, magnitude = 1.0;
              for (std::int64_t k = begin; k < end; ++k) {
                const double product =
                    double{weights[index(r * kTileKeys + k)]} * values.value(k, d);
                expected += product;
                magnitude += std::abs(product);
              }
              ASSERT_NEAR(outputs[index(r * size + d)], expected, magnitude * 2e-6);
            }
          }
        }
      }
    }
  }
}

// Everything is fetched in as many calls as were planned for, and nothing else changes.
TEST_P(TokenPanels, LinesAheadAreFetchedMeanwhile) {
  constexpr std::int64_t kSize = 64;
  Random random(3);
  Tile keys(ElementType::kFloat, true, kSize, random);
  auto queries = random_floats(kMaxRows * kSize, random);
  const std::vector<char> memory(100'000);
  for (const std::int64_t num_bytes : {1, 4000, 100'000}) {
    for (const bool multiplies : {true, false}) {
      for (std::int64_t num_rows = 1; num_rows <= kMaxRows; ++num_rows) {
        const MemoryRun run{memory.data(), memory.data() + num_bytes};
        constexpr int kCalls = 3;
        LinesAhead ahead = LinesAhead::of(&run, 1, kCalls);
        std::vector<float> logits(kMaxRows * kTileKeys, 0.5f), outputs(kMaxRows * kSize, 0.5f);
        auto expected_logits = logits, expected_outputs = outputs;
        const auto call = [&](LinesAhead* lines, std::vector<float>& products,
                              std::vector<float>& sums) {
          TokenRows rows = keys.rows(3, 64);
          rows.ahead = lines;
          if (multiplies) {
            kernels_.token_panels.multiply_keys[0]({queries.data(), kSize, num_rows}, rows,
                                                   products.data());
          } else {
            kernels_.token_panels.add_values[0](products.data(), rows,
                                                {sums.data(), kSize, num_rows});
          }
        };
        std::int64_t num_left = ahead.num_groups();
        for (int i = 0; i < kCalls + 1 && ahead.num_runs > 0; ++i) {
          call(&ahead, logits, outputs);
          call(nullptr, expected_logits, expected_outputs);
          EXPECT_LT(ahead.num_groups(), num_left);
          num_left = ahead.num_groups();
        }
        EXPECT_EQ(ahead.num_runs, 0) << num_rows << ' ' << num_bytes;
        EXPECT_EQ(logits, expected_logits);
        EXPECT_EQ(outputs, expected_outputs);
      }
    }
  }
}

}  // namespace
}  // namespace paged_kv::cpu
