// SPDX-License-Identifier: Apache-2.0
#include "simt/options.h"

#include <cstdlib>
#include <stdexcept>
#include <string_view>

namespace paged_kv::simt {
namespace {

[[noreturn]] void refuse(const char* name, std::string_view value, const char* expected) {
  throw std::invalid_argument(std::string(name) + ": expected " + expected + ", got '" +
                              std::string(value) + "'");
}

std::uint64_t number_from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const std::uint64_t value = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0') refuse(name, text, "a number");
  return value;
}

Options from_environment() {
  Options value;
  if (const char* text = std::getenv("PAGED_KV_SIMT_ORDER")) {
    const std::string_view order = text;
    if (order == "lifo") {
      value.order = ThreadOrder::kLifo;
    } else if (order == "random") {
      value.order = ThreadOrder::kRandom;
    } else if (order != "fifo") {
      refuse("PAGED_KV_SIMT_ORDER", order, "fifo, lifo or random");
    }
  }
  if (const char* text = std::getenv("PAGED_KV_SIMT_ASYNC_COPY")) {
    const std::string_view mode = text;
    if (mode == "eager") {
      value.async_copy = AsyncCopyMode::kEager;
    } else if (mode != "late") {
      refuse("PAGED_KV_SIMT_ASYNC_COPY", mode, "late or eager");
    }
  }
  value.seed = number_from_environment("PAGED_KV_SIMT_SEED", value.seed);
  value.stack_bytes = static_cast<int>(number_from_environment("PAGED_KV_SIMT_STACK_KB", 0) * 1024);
  value.max_shared_bytes =
      static_cast<int>(number_from_environment("PAGED_KV_SIMT_MAX_SHARED_KB", 227) * 1024);
  return value;
}

}  // namespace

Options& options() {
  static Options value = from_environment();
  return value;
}

std::vector<Options> all_schedules(int num_seeds) {
  std::vector<Options> schedules;
  for (const AsyncCopyMode mode : {AsyncCopyMode::kLate, AsyncCopyMode::kEager}) {
    Options schedule = options();
    schedule.async_copy = mode;
    for (const ThreadOrder order : {ThreadOrder::kFifo, ThreadOrder::kLifo}) {
      schedule.order = order;
      schedules.push_back(schedule);
    }
    schedule.order = ThreadOrder::kRandom;
    for (int seed = 1; seed <= num_seeds; ++seed) {
      schedule.seed = static_cast<std::uint64_t>(seed);
      schedules.push_back(schedule);
    }
  }
  return schedules;
}

std::string to_string(const Options& value) {
  std::string text = "order=fifo";
  if (value.order == ThreadOrder::kLifo) text = "order=lifo";
  if (value.order == ThreadOrder::kRandom) {
    text = "order=random seed=" + std::to_string(value.seed);
  }
  return text +
         (value.async_copy == AsyncCopyMode::kLate ? " async_copy=late" : " async_copy=eager");
}

}  // namespace paged_kv::simt
