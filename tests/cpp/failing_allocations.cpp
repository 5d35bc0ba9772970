// SPDX-License-Identifier: Apache-2.0
#include "failing_allocations.h"

#include <cstddef>
#include <cstdlib>

namespace {

constexpr int kNeverFail = -1;
thread_local int num_allowed_allocations = kNeverFail;

constexpr std::size_t kAlignment = alignof(std::max_align_t);

void* allocate_or_null(std::size_t size, std::size_t alignment) noexcept {
  if (num_allowed_allocations >= 0 && num_allowed_allocations-- == 0) return nullptr;
  if (alignment <= kAlignment) return std::malloc(size == 0 ? 1 : size);
  // Wants a size that is a multiple.
  return std::aligned_alloc(alignment, (size / alignment + 1) * alignment);
}

void* allocate(std::size_t size, std::size_t alignment) {
  void* memory = allocate_or_null(size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

namespace paged_kv::testing {

FailingAllocation::FailingAllocation(int num_allowed) noexcept {
  num_allowed_allocations = num_allowed;
}
FailingAllocation::~FailingAllocation() { num_allowed_allocations = kNeverFail; }

}  // namespace paged_kv::testing

// All forms: the runtime of a sanitizer has its own of each, which would not go with free().
void* operator new(std::size_t size) { return allocate(size, kAlignment); }
void* operator new[](std::size_t size) { return allocate(size, kAlignment); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allocate_or_null(size, kAlignment);
}
void* operator new[](std::size_t size, const std::nothrow_t&) noexcept {
  return allocate_or_null(size, kAlignment);
}
void* operator new(std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate_or_null(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  return allocate_or_null(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
