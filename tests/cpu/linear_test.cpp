// SPDX-License-Identifier: Apache-2.0
//
// Products with weights, on each instruction set that this machine can run.
#include "ops/cpu/linear.h"

#include "element_values.h"
#include "ops/cpu/isa/select.h"
#include "sixteen_lanes.h"
#include "test_threads.h"

#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::attention_kernels_to_test;
using testing::bits_of;
using testing::element_value;
using testing::kBackwardsRunner;
using testing::kFloatTypes;
using testing::kFourThreadsRunner;
using testing::pack;

// Rows of random elements with `padding` NaNs behind each.
class Matrix {
 public:
  Matrix(ElementType type, std::int64_t num_rows, std::int64_t size, std::int64_t padding,
         unsigned seed)
      : type_(type), stride_(size + padding) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<float> numbers(-1.0f, 1.0f);
    for (std::int64_t row = 0; row < num_rows; ++row) {
      for (std::int64_t i = 0; i < stride_; ++i) {
        bits_.push_back(bits_of(type, i < size ? numbers(random) : std::nanf("")));
      }
    }
    bytes_ = pack(type, bits_);
  }

  [[nodiscard]] ElementType type() const { return type_; }
  [[nodiscard]] std::int64_t stride() const { return stride_; }
  [[nodiscard]] void* data() { return bytes_.data(); }
  [[nodiscard]] std::uint32_t bits_at(std::int64_t row, std::int64_t i) const {
    return bits_[static_cast<std::size_t>(row * stride_ + i)];
  }
  [[nodiscard]] double at(std::int64_t row, std::int64_t i) const {
    return element_value(type_, bits_at(row, i));
  }

 private:
  ElementType type_;
  std::int64_t stride_;
  std::vector<std::uint32_t> bits_;
  std::vector<std::byte> bytes_;
};

// In panels (isa/panel_kernels.h); NaN where the last one has no more features.
std::vector<std::byte> pack_panels(const Matrix& weight, std::int64_t in, std::int64_t out) {
  const std::int64_t num_panels = (out + kPanelFeatures - 1) / kPanelFeatures;
  std::vector<std::uint32_t> bits(static_cast<std::size_t>(num_panels * in * kPanelFeatures),
                                  bits_of(weight.type(), std::nanf("")));
  for (std::int64_t feature = 0; feature < out; ++feature) {
    const std::int64_t panel = feature / kPanelFeatures, f = feature % kPanelFeatures;
    for (std::int64_t i = 0; i < in; ++i) {
      const std::int64_t place = weight.type() == ElementType::kBFloat16
                                     ? (i / 2 * kPanelFeatures + f) * 2 + i % 2
                                     : i * kPanelFeatures + f;
      bits[static_cast<std::size_t>(panel * in * kPanelFeatures + place)] =
          weight.bits_at(feature, i);
    }
  }
  return pack(weight.type(), bits);
}

struct Product {
  Product(std::int64_t rows, std::int64_t in, std::int64_t out, ElementType x_type,
          ElementType weight_type)
      : num_rows(rows),
        in_features(in),
        out_features(out),
        x(x_type, rows, in, 5, 1),
        weight(weight_type, out, in, 0, 2),
        panels(pack_panels(weight, in, out)),
        bias(weight_type, 1, out, 0, 3),
        results(static_cast<std::size_t>(rows * (out + 1)), kPoison) {}

  void run(const AttentionKernels& kernels, const ThreadRunner& runner, bool has_bias = true) {
    linear({.kernels = &kernels,
            .x = x.data(),
            .weight = panels.data(),
            .bias = has_bias ? bias.data() : nullptr,
            .out = results.data(),
            .x_type = x.type(),
            .weight_type = weight.type(),
            .bias_type = bias.type(),
            .out_type = ElementType::kFloat,
            .x_stride = x.stride(),
            .out_stride = out_features + 1,
            .num_rows = num_rows,
            .in_features = in_features,
            .out_features = out_features},
           runner);
  }

  void expect_right(bool has_bias = true) const {
    for (std::int64_t row = 0; row < num_rows; ++row) {
      for (std::int64_t feature = 0; feature < out_features; ++feature) {
        double sum = has_bias ? bias.at(0, feature) : 0;
        for (std::int64_t i = 0; i < in_features; ++i) sum += x.at(row, i) * weight.at(feature, i);
        ASSERT_NEAR(result(row, feature), sum, 1e-6 * static_cast<double>(4 * in_features))
            << "row " << row << ", feature " << feature;
      }
      ASSERT_EQ(result(row, out_features), kPoison) << "behind row " << row;
    }
  }

  [[nodiscard]] float result(std::int64_t row, std::int64_t feature) const {
    return results[static_cast<std::size_t>(row * (out_features + 1) + feature)];
  }

  static constexpr float kPoison = 12345.0f;
  std::int64_t num_rows, in_features, out_features;
  Matrix x, weight;
  std::vector<std::byte> panels;
  Matrix bias;
  std::vector<float> results;
};

TEST(Linear, IsTheProductForAnyShape) {
  for (const AttentionKernels* kernels : attention_kernels_to_test()) {
    SCOPED_TRACE(kernels->name);
    for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 7, 23, 25, 130}) {
      for (const std::int64_t in : {16, 80}) {
        for (const std::int64_t out : {1, 2, 15, 16, 33, 48, 49, 193}) {
          SCOPED_TRACE(::testing::Message() << rows << " rows, " << in << " to " << out);
          Product product(rows, in, out, ElementType::kFloat, ElementType::kFloat);
          for (const bool has_bias : {false, true}) {
            product.run(*kernels, kSerialRunner, has_bias);
            product.expect_right(has_bias);
          }
        }
      }
    }
  }
}

TEST(Linear, TakesAllFloatTypes) {
  for (const AttentionKernels* kernels : attention_kernels_to_test()) {
    for (const ElementType x_type : kFloatTypes) {
      for (const ElementType weight_type : kFloatTypes) {
        SCOPED_TRACE(::testing::Message()
                     << kernels->name << static_cast<int>(x_type) << static_cast<int>(weight_type));
        Product product(7, 48, 70, x_type, weight_type);
        product.run(*kernels, kSerialRunner, false);
        product.expect_right(false);
        product.run(*kernels, kSerialRunner);
        product.expect_right();
      }
    }
  }
}

TEST(Linear, ResultsAreRoundedToTheTypeOfTheOutput) {
  for (const ElementType type : kFloatTypes) {
    Product product(3, 32, 5, ElementType::kFloat, ElementType::kFloat);
    product.run(attention_kernels(), kSerialRunner);
    std::vector<std::uint32_t> bits(15);
    std::vector<std::byte> rounded = pack(type, bits);
    linear({.kernels = &attention_kernels(),
            .x = product.x.data(),
            .weight = product.panels.data(),
            .bias = product.bias.data(),
            .out = rounded.data(),
            .x_type = ElementType::kFloat,
            .weight_type = ElementType::kFloat,
            .bias_type = ElementType::kFloat,
            .out_type = type,
            .x_stride = product.x.stride(),
            .out_stride = 5,
            .num_rows = 3,
            .in_features = 32,
            .out_features = 5},
           kSerialRunner);
    for (std::int64_t row = 0; row < 3; ++row) {
      attention_kernels().store_row[static_cast<int>(type)](
          &product.results[static_cast<std::size_t>(row * 6)], 1.0f, 5, bits.data());
      const auto row_bytes = static_cast<std::size_t>(5 * element_size(type));
      EXPECT_EQ(std::memcmp(rounded.data() + static_cast<std::size_t>(row) * row_bytes, bits.data(),
                            row_bytes),
                0);
    }
  }
}

// Alone, among others, on several threads, written where results belong (without a bias) or not.
TEST(Linear, ARowHasTheSameBitsInAnyCall) {
  for (const AttentionKernels* kernels : attention_kernels_to_test()) {
    for (const ElementType type : kFloatTypes) {
      for (const bool has_bias : {false, true}) {
        SCOPED_TRACE(::testing::Message() << kernels->name << static_cast<int>(type) << has_bias);
        Product all(70, 160, 192, ElementType::kFloat, type);
        all.run(*kernels, kSerialRunner, has_bias);
        for (const std::int64_t rows : {1, 2, 3, 4, 5, 6, 24, 69}) {
          for (const ThreadRunner& runner : {kSerialRunner, kBackwardsRunner, kFourThreadsRunner}) {
            Product some(rows, 160, 192, ElementType::kFloat, type);
            some.run(*kernels, runner, has_bias);
            EXPECT_EQ(std::memcmp(some.results.data(), all.results.data(),
                                  some.results.size() * sizeof(float)),
                      0)
                << rows << " rows";
          }
        }
      }
    }
  }
}

// More rows than go over the weight at once: 72. Tiles of the weight
// and rows both end with less than a whole one.
TEST(Linear, ManyRowsGoOverTheWeightInChunks) {
  constexpr std::int64_t kOut = 53;
  for (const AttentionKernels* kernels : attention_kernels_to_test()) {
    for (const auto& [in, num_rows] : {std::pair{576, 133}, {4096, 77}}) {
      for (const ElementType type : {ElementType::kFloat, ElementType::kBFloat16}) {
        SCOPED_TRACE(::testing::Message() << kernels->name << " " << in);
        Product all(num_rows, in, kOut, type, type);
        all.run(*kernels, kFourThreadsRunner);
        all.expect_right();
        Product some(17, in, kOut, type, type);
        some.run(*kernels, kBackwardsRunner);
        EXPECT_EQ(std::memcmp(some.results.data(), all.results.data(),
                              some.results.size() * sizeof(float)),
                  0);
      }
    }
  }
}

TEST(Linear, NothingToDo) {
  Product no_rows(0, 16, 65, ElementType::kFloat, ElementType::kFloat);
  no_rows.run(attention_kernels(), kFourThreadsRunner);
  Product no_features(3, 16, 0, ElementType::kFloat, ElementType::kFloat);
  no_features.run(attention_kernels(), kFourThreadsRunner);
  no_features.expect_right();
}

}  // namespace
}  // namespace paged_kv::cpu
