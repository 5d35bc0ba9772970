// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "memory.h"
#include "sanitizers.h"

#include <cstddef>

namespace paged_kv::simt {

// Addresses through which TSan is told what is ordered: release() before, acquire() after. One
// token for everything would order threads that no barrier orders, and hide races; so each block
// has its own, and within it each barrier. Nothing without TSan.
class Tokens {
 public:
  void begin_launch() {
    if (sanitizer::kThread) memory_ = MappedMemory(kBytes);
    block_start_ = 1;
    block_count_ = 0;
  }
  void begin_block(int num_tokens) {
    block_start_ += block_count_;
    block_count_ = num_tokens;
    // Tokens of long gone blocks again: may hide a race, cannot invent one.
    if (static_cast<std::size_t>(block_start_ + num_tokens) * kStride > kBytes) block_start_ = 1;
  }
  void release(int token) const { sanitizer::tsan_release(address(block_start_ + token)); }
  void acquire(int token) const { sanitizer::tsan_acquire(address(block_start_ + token)); }
  // The end of the launch comes after all that the threads did.
  void release_before_launch_end() const { sanitizer::tsan_release(address(0)); }
  void acquire_at_launch_end() const { sanitizer::tsan_acquire(address(0)); }

 private:
  static constexpr std::size_t kStride = 8;  // TSan's granularity
  static constexpr std::size_t kBytes = std::size_t{1} << 28;

  [[nodiscard]] const std::byte* address(int token) const {
    return memory_.bytes().data() + static_cast<std::size_t>(token) * kStride;
  }

  MappedMemory memory_;
  int block_start_ = 1;
  int block_count_ = 0;
};

}  // namespace paged_kv::simt
