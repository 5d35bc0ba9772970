// SPDX-License-Identifier: Apache-2.0
//
// Memory that the runtime maps itself: thread stacks, the shared memory arena, TSan's tokens.
#pragma once

#include <cstddef>
#include <span>

namespace paged_kv::simt {

// Address space that becomes memory when it is touched.
class MappedMemory {
 public:
  MappedMemory() = default;
  explicit MappedMemory(std::size_t num_bytes);  // throws std::bad_alloc
  ~MappedMemory();
  MappedMemory(MappedMemory&& other) noexcept;
  MappedMemory& operator=(MappedMemory&& other) noexcept;

  [[nodiscard]] std::span<std::byte> bytes() const noexcept { return {start_, num_bytes_}; }

  // Makes a part inaccessible: a stack that overflows into it ends in SIGSEGV.
  static void protect(std::span<std::byte> part);
  // Zero, and without a past: TSan forgets who accessed it, and takes the caller as its writer.
  static void forget(std::span<std::byte> part);

 private:
  std::byte* start_ = nullptr;
  std::size_t num_bytes_ = 0;
};

// One stack for each thread of a block, with a guard page below.
class StackPool {
 public:
  // Makes room for `num_stacks` of `stack_bytes`; keeps what it has if that is enough.
  void reserve(int num_stacks, std::size_t stack_bytes);
  [[nodiscard]] std::span<std::byte> stack(int index) const;
  // For ASan, after threads were abandoned in the middle of their frames.
  void unpoison_all() const;

 private:
  MappedMemory memory_;
  std::size_t stack_bytes_ = 0;
  int num_stacks_ = 0;
};

}  // namespace paged_kv::simt
