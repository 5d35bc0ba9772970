// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "simt/options.h"

#include <array>
#include <cstdint>
#include <utility>

namespace paged_kv::simt {

inline constexpr int kMaxThreadsPerBlock = 1024;

// A small generator of which every seed is good (splitmix64, Steele et al. 2014).
class RandomSequence {
 public:
  explicit RandomSequence(std::uint64_t seed) : state_(seed) {}
  [[nodiscard]] int below(int bound) noexcept {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    bits ^= bits >> 31;
    return static_cast<int>((bits >> 33) % static_cast<std::uint64_t>(bound));
  }

 private:
  std::uint64_t state_;
};

// The threads of a block that can go on, in the order of the schedule. A fixed ring: it is used
// from inside kernels, where nothing may be allocated. All operations O(1).
class ReadyQueue {
 public:
  void reset(ThreadOrder order, RandomSequence random) noexcept {
    order_ = order;
    random_ = random;
    head_ = 0;
    count_ = 0;
  }
  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }
  // Each thread is in the queue at most once.
  void push(int thread) noexcept { at(count_++) = static_cast<std::int16_t>(thread); }
  // Needs !empty().
  [[nodiscard]] int pop() noexcept {
    --count_;
    if (order_ == ThreadOrder::kLifo) return at(count_);
    if (order_ == ThreadOrder::kRandom) std::swap(at(0), at(random_.below(count_ + 1)));
    const int thread = at(0);
    head_ = (head_ + 1) % kMaxThreadsPerBlock;
    return thread;
  }

 private:
  [[nodiscard]] std::int16_t& at(int position) noexcept {
    return ring_[static_cast<std::size_t>((head_ + position) % kMaxThreadsPerBlock)];
  }

  std::array<std::int16_t, kMaxThreadsPerBlock> ring_;
  int head_ = 0;
  int count_ = 0;
  ThreadOrder order_ = ThreadOrder::kFifo;
  RandomSequence random_{0};
};

}  // namespace paged_kv::simt
