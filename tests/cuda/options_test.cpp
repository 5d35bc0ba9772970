// SPDX-License-Identifier: Apache-2.0
//
// options() reads the environment once, so each case is a process of its own (a death test's).
#include "simt/options.h"

#include <array>
#include <cstdlib>
#include <iostream>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>

namespace paged_kv::simt {
namespace {

[[noreturn]] void print_options_with(const char* name, const char* value) {
  setenv(name, value, 1);
  try {
    std::cerr << to_string(options()) << " stack=" << options().stack_bytes
              << " shared=" << options().max_shared_bytes << '\n';
  } catch (const std::invalid_argument& error) {
    std::cerr << error.what() << '\n';
  }
  std::exit(1);
}

using OptionsDeathTest = ::testing::TestWithParam<std::array<const char*, 3>>;

TEST_P(OptionsDeathTest, FromTheEnvironment) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto [name, value, expected] = GetParam();
  EXPECT_DEATH(print_options_with(name, value), expected);
}

using Case = std::array<const char*, 3>;
INSTANTIATE_TEST_SUITE_P(
    Each, OptionsDeathTest,
    ::testing::Values(Case{"PAGED_KV_SIMT_ORDER", "lifo", "order=lifo async_copy=late"},
                      Case{"PAGED_KV_SIMT_ORDER", "random", "order=random seed=1"},
                      Case{"PAGED_KV_SIMT_ORDER", "up",
                           "PAGED_KV_SIMT_ORDER: expected fifo, lifo or random, got 'up'"},
                      Case{"PAGED_KV_SIMT_ASYNC_COPY", "eager", "order=fifo async_copy=eager"},
                      Case{"PAGED_KV_SIMT_ASYNC_COPY", "", "expected late or eager, got ''"},
                      Case{"PAGED_KV_SIMT_STACK_KB", "128", "stack=131072"},
                      Case{"PAGED_KV_SIMT_STACK_KB", "1x", "expected a number, got '1x'"},
                      Case{"PAGED_KV_SIMT_MAX_SHARED_KB", "99", "shared=101376"}),
    [](const auto& test) { return std::to_string(test.index); });

TEST(Options, AllSchedulesAreDistinct) {
  const auto schedules = all_schedules(3);
  EXPECT_EQ(schedules.size(), 10u);
  for (std::size_t i = 0; i < schedules.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(to_string(schedules[i]), to_string(schedules[j]));
  }
}

TEST(Options, ScopeEnds) {
  const std::string before = to_string(options());
  {
    const ScopedOptions scope({.order = ThreadOrder::kRandom, .seed = 7});
    EXPECT_EQ(to_string(options()), "order=random seed=7 async_copy=late");
  }
  EXPECT_EQ(to_string(options()), before);
}

}  // namespace
}  // namespace paged_kv::simt
