// SPDX-License-Identifier: Apache-2.0
//
// Gated activations on each instruction set that this machine can run.
#include "ops/cpu/gated_activation.h"

#include "element_values.h"
#include "sixteen_lanes.h"
#include "test_threads.h"

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::bits_of;
using testing::element_value;
using testing::kFloatTypes;
using testing::kFourThreadsRunner;
using testing::pack;

class GatedActivations : public ::testing::TestWithParam<const AttentionKernels*> {
 protected:
  const GatedActivationKernels& kernels_ = GetParam()->gated_activations;
};

INSTANTIATE_TEST_SUITE_P(InstructionSets, GatedActivations,
                         ::testing::ValuesIn(testing::attention_kernels_to_test()),
                         [](const auto& test) { return std::string(test.param->name); });

double silu(double x) { return x / (1 + std::exp(-x)); }

double gelu_tanh(double x) {
  return x / (1 + std::exp(-2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

// Of each size around the vectors'; a read behind a row's end is an error under ASan.
TEST_P(GatedActivations, RowsOfAnySizeAreActivatedAndMultiplied) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  for (const ElementType type : kFloatTypes) {
    const double epsilon = type == ElementType::kFloat  ? 4e-6
                           : type == ElementType::kHalf ? 0x1p-10
                                                        : 0x1p-7;
    for (std::int64_t size = 0; size <= 37; ++size) {
      std::vector<std::uint32_t> gate, up;
      for (std::int64_t i = 0; i < size; ++i) gate.push_back(bits_of(type, 3 * normal(random)));
      for (std::int64_t i = 0; i < size; ++i) up.push_back(bits_of(type, normal(random)));
      const auto packed_gate = pack(type, gate);
      const auto packed_up = pack(type, up);
      auto out = packed_gate;
      for (const auto& [rows, exact] :
           {std::pair(kernels_.silu, &silu), std::pair(kernels_.gelu_tanh, &gelu_tanh)}) {
        rows[static_cast<int>(type)](packed_gate.data(), packed_up.data(), size, out.data());
        for (std::size_t i = 0; i < gate.size(); ++i) {
          std::uint32_t bits = 0;
          const auto bytes = static_cast<std::size_t>(element_size(type));
          std::memcpy(&bits, out.data() + i * bytes, bytes);
          const double expected = exact(element_value(type, gate[i])) * element_value(type, up[i]);
          EXPECT_NEAR(element_value(type, bits), expected, 2 * epsilon * std::abs(expected) + 1e-6);
        }
      }
    }
  }
}

TEST_P(GatedActivations, ThreadsChangeNoBit) {
  constexpr std::int64_t kRows = 300;
  constexpr std::int64_t kSize = 101;
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> input(kRows * 2 * kSize);
  for (float& x : input) x = normal(random);
  std::vector<float> serial(kRows * kSize), threaded(kRows * kSize);
  GatedActivationParams params{.multiply_row = kernels_.silu[0],
                               .out = serial.data(),
                               .input = input.data(),
                               .type = ElementType::kFloat,
                               .out_stride = kSize,
                               .input_stride = 2 * kSize,
                               .num_rows = kRows,
                               .size = kSize};
  gated_activation(params, kSerialRunner);
  params.out = threaded.data();
  gated_activation(params, kFourThreadsRunner);
  EXPECT_EQ(std::memcmp(serial.data(), threaded.data(), serial.size() * sizeof(float)), 0);
}

}  // namespace
}  // namespace paged_kv::cpu
