// SPDX-License-Identifier: Apache-2.0
//
// main() of the tests: under TSan a race fails the test that it happened in, not only the process,
// so that tests of planted races can expect theirs.
#include "test_support.h"

#include <utility>

#include <gtest/gtest.h>

namespace {

int num_race_reports = 0;

class RacesFailTests : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { num_race_reports = 0; }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (num_race_reports > 0) ADD_FAILURE() << num_race_reports << " data races in " << test.name();
  }
};

}  // namespace

// Called by TSan, once for each pair of stacks that race, with its locks held: not instrumented.
extern "C" __attribute__((visibility("default"), no_sanitize("thread"))) void __tsan_on_report(
    void*) {
  ++num_race_reports;
}
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_options() {
  return "exitcode=0:report_thread_leaks=0:suppress_equal_addresses=0";
}

int paged_kv::cuda::testing::take_race_reports() { return std::exchange(num_race_reports, 0); }

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  testing::UnitTest::GetInstance()->listeners().Append(new RacesFailTests);
  return RUN_ALL_TESTS();
}
