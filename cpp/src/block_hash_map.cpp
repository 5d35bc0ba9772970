// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_hash_map.h"

#include "paged_kv/check.h"
#include "paged_kv/make_room.h"
#include "paged_kv/math.h"

#include <cstring>

namespace paged_kv {
namespace {

constexpr std::int32_t kNotFound = IndexTable::kNotFound;

// The key is a SHA-256 digest already: any of its bits will do. Of an XXH3 digest also those of the
// content: many contents can be made to have one digest.
std::uint32_t hash_of(const BlockHashWithGroupId& key) noexcept {
  std::uint32_t prefix = 0;
  std::uint32_t content = 0;
  std::memcpy(&prefix, key.hash.bytes.data(), sizeof prefix);
  std::memcpy(&content, key.hash.bytes.data() + kXxh3DigestBytes, sizeof content);
  return prefix + content + static_cast<std::uint32_t>(key.group_id.value()) * 0x9e3779b9U;
}

std::uint32_t hash_of(const BlockHashWithGroupId& key, BlockId block) noexcept {
  // Blocks that share a key differ in their ids alone, so these bits are spread.
  std::uint32_t hash = hash_of(key) ^ (static_cast<std::uint32_t>(block.value()) * 0x85ebca6bU);
  hash ^= hash >> 15;
  return hash * 0xc2b2ae35U;
}

}  // namespace

void BlockHashToBlockMap::reserve(std::size_t num_entries) {
  make_room(entries_, num_entries);
  first_by_key_.reserve(num_entries);
  entry_by_key_and_block_.reserve(num_entries);
}

std::optional<BlockId> BlockHashToBlockMap::get_one_block(const BlockHashWithGroupId& key) const {
  const std::int32_t first = find_first(key);
  if (first == kNotFound) return std::nullopt;
  return at(first).block;
}

bool BlockHashToBlockMap::contain(const BlockHashWithGroupId& key, BlockId block) const {
  return find_entry(key, block) != kNotFound;
}

std::vector<BlockId> BlockHashToBlockMap::get_all_blocks(const BlockHashWithGroupId& key) const {
  std::vector<BlockId> blocks;
  const std::int32_t first = find_first(key);
  if (first == kNotFound) return blocks;
  std::int32_t entry = first;
  do {
    blocks.push_back(at(entry).block);
    entry = at(entry).next;
  } while (entry != first);
  return blocks;
}

std::vector<BlockHashWithGroupId> BlockHashToBlockMap::get_all_keys() const {
  std::vector<BlockHashWithGroupId> keys;
  keys.reserve(num_keys_);
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (entry.block.valid() && find_first(entry.key) == static_cast<std::int32_t>(i)) {
      keys.push_back(entry.key);
    }
  }
  return keys;
}

void BlockHashToBlockMap::insert(const BlockHashWithGroupId& key, BlockId block) {
  PAGED_KV_CHECK(block.valid(), "block id must not be negative, got ", block);
  if (contain(key, block)) return;

  // Everything that may throw comes first.
  first_by_key_.reserve(num_keys_ + 1);
  entry_by_key_and_block_.reserve(num_entries_ + 1);
  const std::int32_t entry = take_unused_entry();

  at(entry) = {.key = key, .block = block, .previous = entry, .next = entry};
  const std::int32_t first = find_first(key);
  if (first == kNotFound) {
    first_by_key_.insert(hash_of(key), entry);
    ++num_keys_;
  } else {
    const std::int32_t last = at(first).previous;
    at(entry).previous = last;
    at(entry).next = first;
    at(last).next = entry;
    at(first).previous = entry;
  }
  entry_by_key_and_block_.insert(hash_of(key, block), entry);
  ++num_entries_;
}

bool BlockHashToBlockMap::pop(const BlockHashWithGroupId& key, BlockId block) {
  const std::int32_t entry = find_entry(key, block);
  if (entry == kNotFound) return false;

  const std::int32_t next = at(entry).next;
  if (next == entry) {
    first_by_key_.erase(hash_of(key), entry);
    --num_keys_;
  } else {
    const std::int32_t first = find_first(key);
    if (first == entry) first_by_key_.replace(hash_of(key), entry, next);
    at(at(entry).previous).next = next;
    at(next).previous = at(entry).previous;
  }
  entry_by_key_and_block_.erase(hash_of(key, block), entry);
  at(entry) = Entry{.key = {}, .block = BlockId(), .next = first_unused_};
  first_unused_ = entry;
  --num_entries_;
  return true;
}

void BlockHashToBlockMap::clear() noexcept {
  entries_.clear();
  first_by_key_.clear();
  entry_by_key_and_block_.clear();
  first_unused_ = kNotFound;
  num_keys_ = 0;
  num_entries_ = 0;
}

std::int32_t BlockHashToBlockMap::find_first(const BlockHashWithGroupId& key) const {
  return first_by_key_.find(hash_of(key), [&](std::int32_t entry) { return at(entry).key == key; });
}

std::int32_t BlockHashToBlockMap::find_entry(const BlockHashWithGroupId& key, BlockId block) const {
  return entry_by_key_and_block_.find(hash_of(key, block), [&](std::int32_t entry) {
    return at(entry).block == block && at(entry).key == key;
  });
}

std::int32_t BlockHashToBlockMap::take_unused_entry() {
  if (first_unused_ == kNotFound) {
    const auto entry = narrow<std::int32_t>(entries_.size(), "number of cached blocks");
    entries_.emplace_back();
    return entry;
  }
  const std::int32_t entry = first_unused_;
  first_unused_ = at(entry).next;
  return entry;
}

void BlockHashToBlockMap::check_integrity() const {
  std::size_t num_unused = 0;
  for (std::int32_t i = first_unused_; i != kNotFound; i = at(i).next) {
    ++num_unused;
    PAGED_KV_CHECK_AS(InvariantError, !at(i).block.valid() && num_unused <= entries_.size(),
                      "M1: the list of unused entries holds entry ", i, " of block ", at(i).block);
  }
  PAGED_KV_CHECK_AS(InvariantError, num_unused + num_entries_ == entries_.size(),
                    "M1: ", num_unused, " unused and ", num_entries_, " used entries of ",
                    entries_.size());

  std::size_t num_in_rings = 0;
  std::size_t num_first = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    if (!entry.block.valid()) continue;
    const auto position = static_cast<std::int32_t>(i);
    PAGED_KV_CHECK_AS(InvariantError, find_entry(entry.key, entry.block) == position,
                      "M2: the entry of block ", entry.block, " is not found by key and block");
    PAGED_KV_CHECK_AS(InvariantError,
                      at(entry.next).previous == position && at(entry.next).key == entry.key,
                      "M2: the ring of block ", entry.block, " is broken");
    const std::int32_t first = find_first(entry.key);
    PAGED_KV_CHECK_AS(InvariantError, first != kNotFound && at(first).block.valid(),
                      "M2: the entry of block ", entry.block, " is not found by key");
    if (first != position) continue;
    ++num_first;
    num_in_rings += get_all_blocks(entry.key).size();
  }
  PAGED_KV_CHECK_AS(InvariantError, num_first == num_keys_ && num_in_rings == num_entries_,
                    "M3: ", num_first, " rings hold ", num_in_rings, " entries, expected ",
                    num_keys_, " and ", num_entries_);
}

}  // namespace paged_kv
