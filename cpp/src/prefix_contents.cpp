// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/prefix_contents.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <string_view>

namespace paged_kv {
namespace {

// Not of the digest alone: contents that were made to collide must not all fall into one place.
std::uint32_t hash_of(ContentId parent, std::span<const std::uint8_t> block,
                      std::uint32_t digest_bits) noexcept {
  const std::string_view bytes(reinterpret_cast<const char*>(block.data()), block.size());
  const std::uint64_t hash = std::hash<std::string_view>{}(bytes) +
                             static_cast<std::uint64_t>(parent.value()) * 0x9e3779b97f4a7c15U;
  return static_cast<std::uint32_t>(hash ^ (hash >> 32)) ^ digest_bits;
}

// An entry whose last number was given out is never used again. It counts as kept.
bool is_used_up(std::int32_t generation) noexcept {
  return generation == std::numeric_limits<std::int32_t>::max();
}

}  // namespace

ContentId PrefixContents::acquire(ContentId parent, std::span<const std::uint8_t> block,
                                  std::uint32_t digest_bits) {
  PAGED_KV_CHECK(!parent.valid() || contains(parent), "the prefix before the block is not kept");
  const std::uint32_t hash = hash_of(parent, block, digest_bits);
  const std::int32_t found = find(parent, block, hash);
  if (found != IndexTable::kNotFound) {
    ++entries_[static_cast<std::size_t>(found)].num_holders;
    return id_of(found);
  }
  // Everything that may throw comes first.
  std::vector<std::uint8_t> bytes(block.begin(), block.end());
  index_.reserve(size() + 1);
  if (unused_.empty()) {
    const auto position = narrow<std::int32_t>(entries_.size(), "number of prefix contents");
    if (unused_.capacity() == entries_.size()) unused_.reserve(2 * entries_.size() + 1);
    entries_.emplace_back();
    unused_.push_back(position);
  }
  const std::int32_t position = unused_.back();
  unused_.pop_back();
  Entry& entry = entries_[static_cast<std::size_t>(position)];
  entry.parent = parent;
  entry.block = std::move(bytes);
  entry.hash = hash;
  entry.num_holders = 1;
  if (parent.valid()) retain(parent);
  index_.insert(hash, position);
  return id_of(position);
}

bool PrefixContents::contains(ContentId content) const noexcept {
  if (!content.valid() || position_of(content) >= entries_.size()) return false;
  const auto position = static_cast<std::int32_t>(position_of(content));
  return entries_[position_of(content)].num_holders > 0 && id_of(position) == content;
}

void PrefixContents::release(ContentId content) noexcept {
  while (content.valid()) {
    Entry& entry = at(content);
    if (--entry.num_holders > 0) return;
    const auto position = static_cast<std::int32_t>(position_of(content));
    index_.erase(entry.hash, position);
    entry.block = {};
    content = std::exchange(entry.parent, {});
    if (is_used_up(entry.generation)) continue;
    ++entry.generation;
    unused_.push_back(position);
  }
}

ContentId PrefixContents::id_of(std::int32_t position) const noexcept {
  const std::int64_t generation = entries_[static_cast<std::size_t>(position)].generation;
  return ContentId(generation << 32 | position);
}

std::int32_t PrefixContents::find(ContentId parent, std::span<const std::uint8_t> block,
                                  std::uint32_t hash) const {
  return index_.find(hash, [&](std::int32_t position) {
    const Entry& entry = entries_[static_cast<std::size_t>(position)];
    return entry.parent == parent && std::ranges::equal(entry.block, block);
  });
}

void PrefixContents::check_integrity() const {
  std::size_t num_kept = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    num_kept += entry.num_holders > 0 || is_used_up(entry.generation) ? 1 : 0;
    if (entry.num_holders == 0) continue;
    PAGED_KV_CHECK_AS(InvariantError,
                      find(entry.parent, entry.block, entry.hash) == static_cast<std::int32_t>(i),
                      "P1: content ", i, " is not found by its parent and bytes");
    PAGED_KV_CHECK_AS(InvariantError, !entry.parent.valid() || contains(entry.parent),
                      "P2: the parent of content ", i, " is not kept");
  }
  PAGED_KV_CHECK_AS(InvariantError, num_kept == size(), "P1: ", size(), " contents are kept, ",
                    num_kept, " have holders");
}

}  // namespace paged_kv
