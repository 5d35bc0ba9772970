// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include "sanitizers.h"

#include <cstdlib>
#include <new>
#include <sys/mman.h>
#include <utility>

namespace paged_kv::simt {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr int kMapFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

MappedMemory::MappedMemory(std::size_t num_bytes) : num_bytes_(num_bytes) {
  void* start = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, kMapFlags, -1, 0);
  if (start == MAP_FAILED) throw std::bad_alloc();
  start_ = static_cast<std::byte*>(start);
}

MappedMemory::~MappedMemory() {
  if (start_ == nullptr) return;
  sanitizer::unpoison(start_, num_bytes_);
  munmap(start_, num_bytes_);
}

MappedMemory::MappedMemory(MappedMemory&& other) noexcept
    : start_(std::exchange(other.start_, nullptr)),
      num_bytes_(std::exchange(other.num_bytes_, 0)) {}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
  std::swap(start_, other.start_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

void MappedMemory::protect(std::span<std::byte> part) {
  if (mprotect(part.data(), part.size(), PROT_NONE) != 0) throw std::bad_alloc();
}

void MappedMemory::forget(std::span<std::byte> part) {
  void* again =
      mmap(part.data(), part.size(), PROT_READ | PROT_WRITE, kMapFlags | MAP_FIXED, -1, 0);
  if (again == MAP_FAILED) throw std::bad_alloc();
}

void StackPool::reserve(int num_stacks, std::size_t stack_bytes) {
  if (num_stacks <= num_stacks_ && stack_bytes == stack_bytes_) return;
  const std::size_t stride = kPageBytes + stack_bytes;
  memory_ = MappedMemory(stride * static_cast<std::size_t>(num_stacks));
  stack_bytes_ = stack_bytes;
  num_stacks_ = num_stacks;
  for (int i = 0; i < num_stacks; ++i) {
    MappedMemory::protect(
        memory_.bytes().subspan(stride * static_cast<std::size_t>(i), kPageBytes));
  }
}

std::span<std::byte> StackPool::stack(int index) const {
  const std::size_t stride = kPageBytes + stack_bytes_;
  return memory_.bytes().subspan(stride * static_cast<std::size_t>(index) + kPageBytes,
                                 stack_bytes_);
}

void StackPool::unpoison_all() const {
  for (int i = 0; i < num_stacks_; ++i) {
    sanitizer::unpoison(stack(i).data(), stack_bytes_);
  }
}

}  // namespace paged_kv::simt
