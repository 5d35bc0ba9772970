// SPDX-License-Identifier: Apache-2.0
//
// Slots as block and offset, of caches with less than 2^32 slots: so that one division of 32 bits
// does. Where positions may be longer, see paged_kv/cuda/division.cuh.
#pragma once

#include "paged_kv/check.h"

#include <cstdint>
#include <limits>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// A cache's slots; made on the host.
struct Slots {
  std::int64_t num_slots;
  std::uint32_t block_size;  // any if there are no slots
};

// Where a token lies.
struct SlotPlace {
  std::int64_t block;
  std::int64_t offset;  // inside the block
};

// Throws std::invalid_argument: 2^32 slots or more.
[[nodiscard]] inline Slots slots_of(std::int64_t num_blocks, std::int64_t block_size) {
  constexpr std::int64_t kMaxSlots = std::numeric_limits<std::uint32_t>::max();
  if (num_blocks == 0 || block_size == 0) return {.num_slots = 0, .block_size = 1};
  PAGED_KV_CHECK(num_blocks <= kMaxSlots / block_size, "cache: expected less than 2^32 slots, got ",
                 num_blocks, " blocks of ", block_size);
  return {.num_slots = num_blocks * block_size,
          .block_size = static_cast<std::uint32_t>(block_size)};
}

[[nodiscard]] __device__ __forceinline__ bool has_slot(const Slots& slots, std::int64_t slot) {
  return slot >= 0 && slot < slots.num_slots;
}

// Needs has_slot().
[[nodiscard]] __device__ __forceinline__ SlotPlace place_of(const Slots& slots, std::int64_t slot) {
  const auto index = static_cast<std::uint32_t>(slot);
  const std::uint32_t block = index / slots.block_size;
  return {.block = block, .offset = index - block * slots.block_size};
}

}  // namespace paged_kv::cuda
