// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/block_hash_map.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace paged_kv {

// The keys that left the prefix cache last: a ring, and an index over it. For diagnosis, so that of
// an XXH3 hash the digest alone counts: its content is not kept for this.
//
// Cost: O(1) per call; memory is taken once, about 150 bytes a key.
// Thread rule: one owner thread.
class EvictedKeys {
 public:
  // Remembers the last `capacity` keys. Throws std::invalid_argument if that is negative.
  explicit EvictedKeys(std::int32_t capacity);

  void push(const BlockHashWithGroupId& key);
  [[nodiscard]] bool contains(const BlockHashWithGroupId& key) const {
    return places_.get_one_block(without_content(key)).has_value();
  }
  void clear() noexcept;

 private:
  [[nodiscard]] static BlockHashWithGroupId without_content(
      const BlockHashWithGroupId& key) noexcept {
    return {key.hash.without_content(), key.group_id};
  }

  std::vector<BlockHashWithGroupId> ring_;  // an unused place has no group
  std::size_t next_ = 0;
  BlockHashToBlockMap places_;  // a "block" is a place in the ring
};

}  // namespace paged_kv
