// SPDX-License-Identifier: Apache-2.0
//
// A hash table of positions: it finds the position of an element that lies in a vector elsewhere.
#pragma once

#include "paged_kv/huge_pages.h"

#include <bit>
#include <cstddef>
#include <cstdint>

namespace paged_kv {

// Open addressing with linear probing, eight bytes a slot, at most half full. Erasing moves later
// entries up instead of leaving tombstones, so lookups do not slow down with age.
//
// Equality is the caller's: a lookup compares 32 bits of hash, then asks `is_equal(position)`.
class IndexTable {
 public:
  static constexpr std::int32_t kNotFound = -1;

  // Makes room for `num_entries` entries; insert() does not allocate up to that number.
  void reserve(std::size_t num_entries) {
    const std::size_t num_slots = std::bit_ceil(2 * num_entries + 2);
    if (num_slots > slots_.size()) rehash(num_slots);
  }

  void clear() noexcept {
    for (Slot& slot : slots_) slot = Slot{};
    num_entries_ = 0;
  }

  template <class IsEqual>
  [[nodiscard]] std::int32_t find(std::uint32_t hash, IsEqual is_equal) const {
    const std::size_t slot = find_slot(hash, is_equal);
    return slot == kNoSlot ? kNotFound : slots_[slot].position;
  }

  // Adds an entry that is not there yet.
  void insert(std::uint32_t hash, std::int32_t position) {
    reserve(num_entries_ + 1);
    insert_without_growing({hash, position});
    ++num_entries_;
  }

  // Lets the entry at `old_position` point to `new_position`. It must be there.
  void replace(std::uint32_t hash, std::int32_t old_position, std::int32_t new_position) noexcept {
    slots_[find_position(hash, old_position)].position = new_position;
  }

  // Removes the entry at `position`. It must be there.
  void erase(std::uint32_t hash, std::int32_t position) noexcept {
    std::size_t hole = find_position(hash, position);
    for (std::size_t i = next(hole); !slots_[i].is_empty(); i = next(i)) {
      // An entry may move up into the hole unless the hole lies before its home slot.
      const std::size_t distance_from_home = (i - home(slots_[i].hash)) & mask();
      const std::size_t distance_from_hole = (i - hole) & mask();
      if (distance_from_home < distance_from_hole) continue;
      slots_[hole] = slots_[i];
      hole = i;
    }
    slots_[hole] = Slot{};
    --num_entries_;
  }

 private:
  struct Slot {
    std::uint32_t hash = 0;
    std::int32_t position = kNotFound;
    [[nodiscard]] bool is_empty() const noexcept { return position == kNotFound; }
  };
  static constexpr std::size_t kNoSlot = ~std::size_t{0};

  [[nodiscard]] std::size_t mask() const noexcept { return slots_.size() - 1; }
  [[nodiscard]] std::size_t home(std::uint32_t hash) const noexcept { return hash & mask(); }
  [[nodiscard]] std::size_t next(std::size_t slot) const noexcept { return (slot + 1) & mask(); }

  template <class IsEqual>
  [[nodiscard]] std::size_t find_slot(std::uint32_t hash, IsEqual is_equal) const {
    if (slots_.empty()) return kNoSlot;
    for (std::size_t i = home(hash); !slots_[i].is_empty(); i = next(i)) {
      if (slots_[i].hash == hash && is_equal(slots_[i].position)) return i;
    }
    return kNoSlot;
  }

  [[nodiscard]] std::size_t find_position(std::uint32_t hash,
                                          std::int32_t position) const noexcept {
    return find_slot(hash, [position](std::int32_t other) { return other == position; });
  }

  void insert_without_growing(Slot slot) noexcept {
    std::size_t i = home(slot.hash);
    while (!slots_[i].is_empty()) i = next(i);
    slots_[i] = slot;
  }

  void rehash(std::size_t num_slots) {
    HugePageVector<Slot> old(num_slots);
    old.swap(slots_);
    for (const Slot& slot : old) {
      if (!slot.is_empty()) insert_without_growing(slot);
    }
  }

  HugePageVector<Slot> slots_;  // a power of two, or none
  std::size_t num_entries_ = 0;
};

}  // namespace paged_kv
