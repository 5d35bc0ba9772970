// SPDX-License-Identifier: Apache-2.0
//
// Error types and checks. What is thrown where, and what Python sees:
//   bad argument          std::invalid_argument / std::out_of_range   ValueError / IndexError
//   pool exhausted        OutOfBlocksError                            OutOfBlocksError(ValueError)
//   our own bug           InvariantError InvariantError(AssertionError)
// A message names the argument, what was expected and what was given.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace paged_kv {

class OutOfBlocksError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// The arguments streamed one after the other: concat("n=", 3) == "n=3".
template <class... Args>
[[nodiscard]] std::string concat(const Args&... args) {
  std::ostringstream stream;
  (stream << ... << args);
  return stream.str();
}

}  // namespace paged_kv

// Throws `error` with the streamed message unless `condition` holds. Always evaluated. A macro, so
// that the message is only built on failure.
#define PAGED_KV_CHECK_AS(error, condition, ...)    \
  do {                                              \
    if (!(condition)) [[unlikely]] {                \
      throw error(::paged_kv::concat(__VA_ARGS__)); \
    }                                               \
  } while (false)

#define PAGED_KV_CHECK(condition, ...) \
  PAGED_KV_CHECK_AS(::std::invalid_argument, condition, __VA_ARGS__)
