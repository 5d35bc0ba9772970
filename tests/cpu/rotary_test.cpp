// SPDX-License-Identifier: Apache-2.0
//
// Rotation of heads on each instruction set that this machine can run: the bits of the formula.
#include "ops/cpu/rotary.h"

#include "element_values.h"
#include "sixteen_lanes.h"
#include "test_threads.h"

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

class Rotary : public ::testing::TestWithParam<const AttentionKernels*> {};

INSTANTIATE_TEST_SUITE_P(InstructionSets, Rotary,
                         ::testing::ValuesIn(testing::attention_kernels_to_test()),
                         [](const auto& test) { return std::string(test.param->name); });

std::vector<std::uint32_t> random_bits(ElementType type, std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint32_t> result;
  for (std::int64_t i = 0; i < count; ++i) result.push_back(bits_of(type, normal(random)));
  return result;
}

// The bits of x * cos + partner * signed_sin, all rounded to the type.
std::uint32_t rotated(ElementType type, std::uint32_t x, std::uint32_t cos, std::uint32_t partner,
                      std::uint32_t signed_sin) {
  const auto product = [type](std::uint32_t a, std::uint32_t b) {
    const volatile float exact = element_value(type, a) * element_value(type, b);
    return element_value(type, bits_of(type, exact));
  };
  return bits_of(type, product(x, cos) + product(partner, signed_sin));
}

// Halves of each size around the vectors'; a read behind a head's end is an error under ASan.
TEST_P(Rotary, AHeadOfAnyEvenSizeHasTheFormulasBits) {
  for (const ElementType type : kFloatTypes) {
    for (std::size_t half = 0; half <= 37; ++half) {
      const auto size = static_cast<std::int64_t>(2 * half);
      const auto x = random_bits(type, size, 0);
      const auto cos = random_bits(type, size, 1);
      const auto sin = random_bits(type, size, 2);
      std::vector<std::uint32_t> expected;
      for (std::size_t i = 0; i < 2 * half; ++i) {
        expected.push_back(rotated(type, x[i], cos[i], x[(i + half) % (2 * half)], sin[i]));
      }
      auto head = pack(type, x);
      GetParam()->rotate_head[static_cast<int>(type)](head.data(), pack(type, cos).data(),
                                                      pack(type, sin).data(), size / 2);
      EXPECT_EQ(head, pack(type, expected)) << half;
    }
  }
}

TEST_P(Rotary, ThreadsChangeNoBit) {
  constexpr std::int64_t kTokens = 200;
  constexpr std::int64_t kHeads = 3;
  constexpr std::int64_t kHeadSize = 80;
  const auto type = ElementType::kBFloat16;
  auto serial = pack(type, random_bits(type, kTokens * kHeads * kHeadSize, 0));
  auto threaded = serial;
  const auto cos = pack(type, random_bits(type, kTokens * kHeadSize, 1));
  const auto sin = pack(type, random_bits(type, kTokens * kHeadSize, 2));
  RotaryParams params{.rotate_head = GetParam()->rotate_head[static_cast<int>(type)],
                      .x = serial.data(),
                      .cos = cos.data(),
                      .signed_sin = sin.data(),
                      .type = type,
                      .x_token_stride = kHeads * kHeadSize,
                      .x_head_stride = kHeadSize,
                      .cos_stride = kHeadSize,
                      .sin_stride = kHeadSize,
                      .num_tokens = kTokens,
                      .num_heads = kHeads,
                      .head_size = kHeadSize};
  apply_rotary(params, kSerialRunner);
  params.x = threaded.data();
  apply_rotary(params, kFourThreadsRunner);
  EXPECT_EQ(serial, threaded);
}

}  // namespace
}  // namespace paged_kv::cpu
