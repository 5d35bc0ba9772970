// SPDX-License-Identifier: Apache-2.0
//
// Why a request finds no more in the prefix cache than it does.
//
// For operators: whether other requests have computed a content under another key is what a salt
// hides. Do not show a report to the request's sender.
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/kv_cache_coordinator.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace paged_kv {

enum class NoHitReason : std::int8_t {
  // The lookup was not made, or could not be.
  kCachingDisabled,
  kRequestSkipsCache,
  kNoBlockHashes,
  // Everything that can be found was found.
  kNoWholeBlockLeft,  // only whole blocks are found
  kLastToken,         // the last token must be computed, to have an output: so must its block
  kEagleDrop,         // the block is cached, and dropped: a draft model needs its tokens computed
  // A block is missing.
  kNotCached,             // never computed, or evicted
  kEvicted,               // known to be evicted
  kOnlyInOtherGroup,      // another group has it: this one keeps less, or has lost it
  kOnlyWithoutAdapter,    // the same content is cached without the request's LoRA adapter,
  kOnlyWithoutSalt,       // without its salt,
  kOnlyWithoutMedia,      // without its media,
  kOnlyWithoutEmbeds,     // without its prompt embeddings,
  kOnlyWithoutExtraKeys,  // without any of these
};

struct NoHitReport {
  NoHitReason reason = NoHitReason::kNotCached;
  std::int64_t num_tokens = 0;      // of the request
  std::int64_t num_hit_tokens = 0;  // that get_computed_blocks() finds
  // By group: the blocks of the hit, those without null blocks.
  std::vector<std::int64_t> num_hit_blocks;
  // By group: the tokens of the hit if there were no other group, and no EAGLE.
  std::vector<std::int64_t> num_group_hit_tokens;
  // Tokens [start_token, end_token): those of the block, or else all that are not found.
  std::int64_t start_token = 0;
  std::int64_t end_token = 0;
  // The first block that the next longer hit lacks; none if no block is missing.
  std::optional<GroupId> kv_cache_group_id;
  std::int64_t block_idx = -1;

  // The report in a sentence or two.
  [[nodiscard]] std::string message() const;
};

// The report on a lookup for `request`. It is judged by the next longer hit: that which all groups
// with full attention have, or else one block more than the hit.
//
// That a block differs by an extra key is found by hashing the request without that key, which
// needs the native hasher (Request::sha256_hasher(), xxh3_hasher()) and finds only what was cached
// without the key, not what was cached with another one.
//
// Cost: lookups of all blocks, in each group once more than get_computed_blocks(); at most 5 times
// the hashes of the tokens up to the missing block. Allocates.
[[nodiscard]] NoHitReport explain_hit(const KVCacheCoordinator& coordinator, const Request& request,
                                      bool enable_caching);

}  // namespace paged_kv
