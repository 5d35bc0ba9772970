// SPDX-License-Identifier: Apache-2.0
//
// Memory for the arrays that have an entry a block. A pool of 10^5 blocks takes 10 MB, one of 10^7
// a gigabyte; in pages of 4 KiB the kernel's work for first use of each is most of what a pool
// costs to make, and walks of the page table most of what a block met at random costs to read.
#pragma once

#include <cstddef>
#include <limits>
#include <new>
#include <vector>

namespace paged_kv {

inline constexpr std::size_t kHugePageBytes = std::size_t{1} << 21;

// As operator new and delete. From kHugePageBytes on: whole huge pages, where the system has them
// for who asks (Linux: transparent huge pages "madvise" or "always"); else ordinary pages.
[[nodiscard]] void* allocate_huge_pages(std::size_t num_bytes);
void free_huge_pages(void* memory, std::size_t num_bytes) noexcept;

// Allocator of the standard library.
template <class T>
struct HugePageAllocator {
  using value_type = T;

  HugePageAllocator() = default;
  template <class U>
  explicit(false) HugePageAllocator(const HugePageAllocator<U>&) noexcept {}

  [[nodiscard]] T* allocate(std::size_t num_items) {
    if (num_items > std::numeric_limits<std::size_t>::max() / 2 / sizeof(T)) {
      throw std::bad_array_new_length();
    }
    return static_cast<T*>(allocate_huge_pages(num_items * sizeof(T)));
  }
  void deallocate(T* items, std::size_t num_items) noexcept {
    free_huge_pages(items, num_items * sizeof(T));
  }

  friend bool operator==(HugePageAllocator, HugePageAllocator) noexcept { return true; }
};

template <class T>
using HugePageVector = std::vector<T, HugePageAllocator<T>>;

}  // namespace paged_kv
