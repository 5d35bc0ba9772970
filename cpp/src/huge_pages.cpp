// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/huge_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paged_kv {
namespace {

// Also of small arrays, which hold items of up to a cache line.
constexpr std::align_val_t kCacheLine{64};
constexpr std::align_val_t kHugePage{kHugePageBytes};

}  // namespace

void* allocate_huge_pages(std::size_t num_bytes) {
  if (num_bytes < kHugePageBytes) return ::operator new(num_bytes, kCacheLine);
  // To the end of the last page: a part of one would be made of small pages.
  const std::size_t num_page_bytes =
      (num_bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  void* memory = ::operator new(num_page_bytes, kHugePage);
#if defined(__linux__)
  // Advice: where it is refused, the memory is as good as any.
  static_cast<void>(madvise(memory, num_page_bytes, MADV_HUGEPAGE));
#endif
  return memory;
}

void free_huge_pages(void* memory, std::size_t num_bytes) noexcept {
  ::operator delete(memory, num_bytes < kHugePageBytes ? kCacheLine : kHugePage);
}

}  // namespace paged_kv
