// SPDX-License-Identifier: Apache-2.0
#include "shared_arena.h"

#include "sanitizers.h"

#include <algorithm>
#include <cstdint>
#include <string>

namespace paged_kv::simt {
namespace {

constexpr std::size_t kArenaBytes = 1 << 20;
constexpr std::size_t kGuardBytes = 128;
constexpr std::size_t kArrayAlignment = 128;
constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kMaxStaticBytes = 48 * 1024;  // what nvcc accepts
constexpr std::byte kGuard{0xa5};
constexpr std::byte kPoison{0xff};

// Not memset: TSan would take it for a write by the thread that runs.
void fill(std::byte* start, std::size_t num_bytes, std::byte value) {
  for (std::size_t i = 0; i < num_bytes; ++i) start[i] = value;
}

std::size_t align_up(std::size_t value, std::size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

SharedArena::SharedArena() : memory_(kArenaBytes) {
  sanitizer::poison(memory_.bytes().data(), kArenaBytes);
}

void SharedArena::begin_block(std::size_t dynamic_bytes, std::size_t max_bytes) {
  if (sanitizer::kThread && used_bytes_ > 0) {
    MappedMemory::forget(memory_.bytes().first(align_up(used_bytes_, kPageBytes)));
  }
  sanitizer::poison(memory_.bytes().data(), used_bytes_);
  num_arrays_ = 0;
  used_bytes_ = 0;
  array_bytes_ = 0;
  static_bytes_ = 0;
  max_bytes_ = max_bytes;
  // Always there, so that a kernel that asks for none and uses it hits the guard.
  (void)place(nullptr, dynamic_bytes, kArrayAlignment, "dynamic shared memory");
}

std::byte* SharedArena::place(const void* key, std::size_t num_bytes, std::size_t alignment,
                              const char* name) {
  const std::size_t offset = align_up(used_bytes_, std::max(alignment, kArrayAlignment));
  if (num_arrays_ == kMaxArrays || offset + num_bytes + kGuardBytes > kArenaBytes) return nullptr;
  std::byte* start = memory_.bytes().data() + offset;
  sanitizer::unpoison(start, num_bytes);
  fill(start, num_bytes, kPoison);
  if (sanitizer::kAddress) {
    sanitizer::poison(start + num_bytes, kGuardBytes);
  } else {
    fill(start + num_bytes, kGuardBytes, kGuard);
  }
  arrays_[static_cast<std::size_t>(num_arrays_++)] = {key, start, num_bytes, name};
  used_bytes_ = offset + num_bytes + kGuardBytes;
  array_bytes_ = align_up(array_bytes_, alignment) + num_bytes;
  return start;
}

void* SharedArena::static_array(const void* key, std::size_t num_bytes, std::size_t alignment,
                                const char* name, Location location) {
  for (int i = 1; i < num_arrays_; ++i) {
    if (arrays_[static_cast<std::size_t>(i)].key == key) {
      return arrays_[static_cast<std::size_t>(i)].start;
    }
  }
  static_bytes_ += num_bytes;
  std::byte* start = place(key, num_bytes, alignment, name);
  if (start == nullptr || static_bytes_ > kMaxStaticBytes || array_bytes_ > max_bytes_) {
    fail("too much shared memory: " + std::to_string(static_bytes_) + " bytes static (at most " +
             std::to_string(kMaxStaticBytes) + "), " + std::to_string(array_bytes_) +
             " with the dynamic part (at most " + std::to_string(max_bytes_) + ")",
         location);
  }
  return start;
}

void* SharedArena::dynamic(std::size_t alignment, Location location) {
  if (alignment > kArrayAlignment) {
    fail("dynamic shared memory is aligned to 128 bytes, the kernel wants " +
             std::to_string(alignment),
         location);
  }
  return arrays_[0].start;
}

void SharedArena::check_guards(Location location) const {
  if (sanitizer::kAddress) return;
  for (int i = 0; i < num_arrays_; ++i) {
    const Array& array = arrays_[static_cast<std::size_t>(i)];
    for (std::size_t j = 0; j < kGuardBytes; ++j) {
      if (array.start[array.num_bytes + j] == kGuard) continue;
      fail("shared memory was written " + std::to_string(j + 1) + " bytes past the end of " +
               array.name + " (" + std::to_string(array.num_bytes) + " bytes)",
           location);
    }
  }
}

}  // namespace paged_kv::simt
