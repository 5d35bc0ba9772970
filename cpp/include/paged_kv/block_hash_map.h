// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/huge_pages.h"
#include "paged_kv/ids.h"
#include "paged_kv/index_table.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace paged_kv {

// The prefix-cache index: key -> the blocks that hold this content.
//
// Several blocks may have one key: two requests that compute the same prefix at the same time each
// keep their own blocks, because block tables are only appended to. A lookup gives the block that
// was inserted first.
//
// One entry per (key, block), in one vector. Two tables find entries: by key (the first entry of
// the key; the others hang on it in a ring) and by key and block. So every method is O(1), however
// many blocks share a key.
//
// Invariants, checked by check_integrity():
//   M1  num_entries() entries are in use, the others are on the list of unused entries;
//   M2  each used entry is found by its key and block, and by its key in the ring of that key;
//   M3  the rings of the size() distinct keys hold all used entries.
//
// Cost: O(1) expected; only insert() beyond what was reserved allocates.
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/core/block_pool.py::BlockHashToBlockMap.
class BlockHashToBlockMap {
 public:
  BlockHashToBlockMap() = default;

  // Room for `num_entries` (key, block) pairs.
  void reserve(std::size_t num_entries);

  // Number of distinct keys, and of (key, block) pairs.
  [[nodiscard]] std::size_t size() const noexcept { return num_keys_; }
  [[nodiscard]] std::size_t num_entries() const noexcept { return num_entries_; }

  // The first inserted of the blocks with `key`.
  [[nodiscard]] std::optional<BlockId> get_one_block(const BlockHashWithGroupId& key) const;
  [[nodiscard]] bool contain(const BlockHashWithGroupId& key, BlockId block) const;

  // All blocks with `key`, in order of insertion. Allocates.
  [[nodiscard]] std::vector<BlockId> get_all_blocks(const BlockHashWithGroupId& key) const;
  // All keys, in no particular order. Allocates.
  [[nodiscard]] std::vector<BlockHashWithGroupId> get_all_keys() const;

  // Adds `block` behind the other blocks with `key`. A pair that is there stays where it is.
  void insert(const BlockHashWithGroupId& key, BlockId block);

  // Removes the pair; other blocks with `key` stay. False, and no change, if it is not there.
  bool pop(const BlockHashWithGroupId& key, BlockId block);

  void clear() noexcept;

  // Throws InvariantError if M1 .. M3 do not hold. O(num_entries).
  void check_integrity() const;

 private:
  struct Entry {
    BlockHashWithGroupId key;
    BlockId block;
    // Ring of the entries with the same key, first inserted to last inserted and round.
    // In an unused entry, `next` leads to the next unused one.
    std::int32_t previous = IndexTable::kNotFound;
    std::int32_t next = IndexTable::kNotFound;
  };

  [[nodiscard]] Entry& at(std::int32_t entry) noexcept {
    return entries_[static_cast<std::size_t>(entry)];
  }
  [[nodiscard]] const Entry& at(std::int32_t entry) const noexcept {
    return entries_[static_cast<std::size_t>(entry)];
  }
  [[nodiscard]] std::int32_t find_first(const BlockHashWithGroupId& key) const;
  [[nodiscard]] std::int32_t find_entry(const BlockHashWithGroupId& key, BlockId block) const;
  [[nodiscard]] std::int32_t take_unused_entry();

  HugePageVector<Entry> entries_;
  IndexTable first_by_key_;
  IndexTable entry_by_key_and_block_;
  std::int32_t first_unused_ = IndexTable::kNotFound;
  std::size_t num_keys_ = 0;
  std::size_t num_entries_ = 0;
};

}  // namespace paged_kv
