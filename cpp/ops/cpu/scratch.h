// SPDX-License-Identifier: Apache-2.0
//
// Memory that a kernel needs while it runs, without an allocation in each call.
#pragma once

#include "paged_kv/math.h"

#include <cstddef>
#include <cstdint>
#include <new>

namespace paged_kv::cpu {

// A buffer that grows and is kept. Contents are lost when it grows.
class Scratch {
 public:
  static constexpr std::int64_t kAlignment = 64;

  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  // At least `num_bytes`, aligned. Throws std::bad_alloc, then it is as before.
  [[nodiscard]] std::byte* reserve(std::int64_t num_bytes) {
    if (num_bytes > num_bytes_) {
      auto* grown = static_cast<std::byte*>(
          ::operator new(static_cast<std::size_t>(num_bytes), std::align_val_t{kAlignment}));
      release();
      data_ = grown;
      num_bytes_ = num_bytes;
    }
    return data_;
  }

 private:
  void release() noexcept {
    if (data_ != nullptr) ::operator delete(data_, std::align_val_t{kAlignment});
  }

  std::byte* data_ = nullptr;
  std::int64_t num_bytes_ = 0;
};

// Cuts a buffer into arrays, one after the other, each on a cache line of its own. With a null
// buffer it only counts the bytes.
class ScratchCutter {
 public:
  explicit ScratchCutter(std::byte* buffer) noexcept : buffer_(buffer) {}

  template <class T>
  [[nodiscard]] T* take(std::int64_t count) noexcept {
    std::byte* result = buffer_ == nullptr ? nullptr : buffer_ + num_bytes_;
    num_bytes_ += round_up<std::int64_t>(count * std::int64_t{sizeof(T)}, Scratch::kAlignment);
    return reinterpret_cast<T*>(result);
  }

  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_bytes_; }

 private:
  std::byte* buffer_;
  std::int64_t num_bytes_ = 0;
};

}  // namespace paged_kv::cpu
