// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/no_hit_report.h"

#include "paged_kv/check.h"

#include <algorithm>
#include <sstream>
#include <utility>

namespace paged_kv {
namespace {

const char* explanation(NoHitReason reason) noexcept {
  switch (reason) {
    case NoHitReason::kCachingDisabled:
      return "prefix caching is off";
    case NoHitReason::kRequestSkipsCache:
      return "the request does not read the prefix cache (skip_reading_prefix_cache)";
    case NoHitReason::kNoBlockHashes:
      return "the request has too few block hashes: it was made without a block hasher, or with "
             "one of another block size";
    case NoHitReason::kNoWholeBlockLeft:
      return "the rest is no whole block, and only whole blocks are found";
    case NoHitReason::kLastToken:
      return "the last token must be computed, and so must its block";
    case NoHitReason::kEagleDrop:
      return "it is cached, but the last block of a hit is computed again for the draft model "
             "(EAGLE)";
    case NoHitReason::kNotCached:
      return "no block with this content and these keys is cached: it was never computed, or it "
             "has been evicted";
    case NoHitReason::kEvicted:
      return "it was cached, and has been evicted";
    case NoHitReason::kOnlyInOtherGroup:
      return "another cache group has it, this one does not: it keeps fewer blocks, or has lost "
             "this one";
    case NoHitReason::kOnlyWithoutAdapter:
      return "the same tokens are cached without the request's adapter";
    case NoHitReason::kOnlyWithoutSalt:
      return "the same tokens are cached without the request's cache_salt";
    case NoHitReason::kOnlyWithoutMedia:
      return "the same tokens are cached without the request's media";
    case NoHitReason::kOnlyWithoutEmbeds:
      return "the same tokens are cached without the request's prompt_embeds";
    case NoHitReason::kOnlyWithoutExtraKeys:
      return "the same tokens are cached without adapter, salt, media and embeddings";
  }
  return "";
}

// A block that a hit would need.
struct WantedBlock {
  std::size_t group = 0;
  std::int64_t block_idx = 0;
  std::int64_t block_size = 0;

  [[nodiscard]] std::int64_t end_token() const noexcept { return (block_idx + 1) * block_size; }
};

// One question, and what its answer is made of.
class Explainer {
 public:
  Explainer(const KVCacheCoordinator& coordinator, const Request& request)
      : coordinator_(coordinator),
        pool_(coordinator.block_pool()),
        request_(request),
        max_length_(std::max(request.num_tokens() - 1, std::int64_t{0})) {}

  // `reason`: of a lookup that is not made.
  [[nodiscard]] NoHitReport without_lookup(NoHitReason reason) {
    report_.num_hit_blocks.resize(coordinator_.num_groups());
    report_.num_group_hit_tokens.resize(coordinator_.num_groups());
    return rest(reason);
  }

  [[nodiscard]] NoHitReport after_lookup() {
    look_up();
    const std::int64_t step = coordinator_.scheduler_block_size();
    const std::int64_t num_hit_tokens = report_.num_hit_tokens;
    if (num_hit_tokens + step > request_.num_tokens()) return rest(NoHitReason::kNoWholeBlockLeft);
    const std::int64_t next = std::max(longest_full_attention_hit(), num_hit_tokens + step);
    if (std::ssize(request_.block_hashes()) * pool_.hash_block_size() < next) {
      return rest(NoHitReason::kNoBlockHashes);
    }
    if (next > max_length_) return rest(NoHitReason::kLastToken);
    for (std::size_t group = 0; group < coordinator_.num_groups(); ++group) {
      if (const auto missing = first_missing_block(group, next)) {
        return at_block(*missing, reason_for(*missing));
      }
    }
    // Every group has the next hit: it lacks the block behind, which EAGLE would drop.
    for (std::size_t group = 0; group < coordinator_.num_groups(); ++group) {
      const auto& manager = coordinator_.manager(group);
      if (!manager.use_eagle()) continue;
      const std::int64_t block_size = manager.block_size();
      return at_block({group, next / block_size - 1, block_size}, NoHitReason::kEagleDrop);
    }
    PAGED_KV_CHECK_AS(InvariantError, false, "a lookup gave ", num_hit_tokens,
                      " tokens, but every group has ", next);
  }

 private:
  [[nodiscard]] NoHitReport rest(NoHitReason reason) {
    report_.reason = reason;
    report_.num_tokens = request_.num_tokens();
    report_.start_token = report_.num_hit_tokens;
    report_.end_token = request_.num_tokens();
    return std::move(report_);
  }

  [[nodiscard]] NoHitReport at_block(const WantedBlock& block, NoHitReason reason) {
    report_.kv_cache_group_id = to_group_id(block.group);
    report_.block_idx = block.block_idx;
    NoHitReport report = rest(reason);
    report.start_token = block.end_token() - block.block_size;
    report.end_token = block.end_token();
    return report;
  }

  [[nodiscard]] static GroupId to_group_id(std::size_t group) {
    return GroupId(static_cast<std::int32_t>(group));
  }

  void look_up() {
    const CacheHit hit = coordinator_.find_longest_cache_hit(request_.block_hashes(), max_length_);
    report_.num_hit_tokens = hit.num_tokens;
    KVCacheBlocks alone = hit.blocks;
    for (std::size_t group = 0; group < coordinator_.num_groups(); ++group) {
      const auto& ids = hit.blocks.block_ids[group];
      report_.num_hit_blocks.push_back(std::ssize(ids) - std::ranges::count(ids, kNullBlockId));
      const GroupId group_id = to_group_id(group);
      report_.num_group_hit_tokens.push_back(coordinator_.manager(group).find_longest_cache_hit(
          {.block_hashes = request_.block_hashes(),
           .max_length = max_length_,
           .kv_cache_group_ids = {&group_id, 1},
           .drop_eagle_block = false,
           .alignment_tokens = coordinator_.scheduler_block_size()},
          alone.block_ids));
    }
  }

  // Of the groups that keep every token; 0 if there are none.
  [[nodiscard]] std::int64_t longest_full_attention_hit() const {
    std::optional<std::int64_t> shortest;
    for (std::size_t group = 0; group < coordinator_.num_groups(); ++group) {
      const auto kind = coordinator_.manager(group).kv_cache_spec().kind();
      if (kind != KVCacheSpecKind::kFullAttention) continue;
      const std::int64_t num_tokens = report_.num_group_hit_tokens[group];
      shortest = std::min(shortest.value_or(num_tokens), num_tokens);
    }
    return shortest.value_or(0);
  }

  [[nodiscard]] bool is_cached(const BlockHash& hash, std::size_t group) const {
    return pool_.cached_block_hash_to_block().get_one_block({hash, to_group_id(group)}).has_value();
  }

  // The first of the blocks that a hit of `num_tokens` tokens needs in the group.
  [[nodiscard]] std::optional<WantedBlock> first_missing_block(std::size_t group,
                                                               std::int64_t num_tokens) const {
    const auto& manager = coordinator_.manager(group);
    const std::int64_t block_size = manager.block_size();
    const CoarseBlockHashes hashes(request_.block_hashes(), pool_.hash_block_size(), block_size);
    const std::int64_t first = manager.get_num_skipped_tokens(num_tokens) / block_size;
    for (std::int64_t i = first; i < num_tokens / block_size; ++i) {
      if (!is_cached(hashes[i], group)) return WantedBlock{group, i, block_size};
    }
    return std::nullopt;
  }

  [[nodiscard]] NoHitReason reason_for(const WantedBlock& block) const {
    const CoarseBlockHashes hashes(request_.block_hashes(), pool_.hash_block_size(),
                                   block.block_size);
    const BlockHash& hash = hashes[block.block_idx];
    if (pool_.was_evicted({hash, to_group_id(block.group)})) return NoHitReason::kEvicted;
    for (std::size_t group = 0; group < coordinator_.num_groups(); ++group) {
      if (group != block.group && is_cached(hash, group)) return NoHitReason::kOnlyInOtherGroup;
    }
    return reason_in_keys(block);
  }

  // Which of the request's keys, if it were not there, would make the block a hit.
  [[nodiscard]] NoHitReason reason_in_keys(const WantedBlock& block) const {
    const RequestKeys& keys = request_.keys();
    RequestKeys none;
    int num_kinds = 0;
    const auto would_hit = [&](bool has_kind, const auto& remove) {
      if (!has_kind) return false;
      ++num_kinds;
      RequestKeys without = keys;
      remove(without);
      return is_cached_under(without, block);
    };
    if (would_hit(keys.lora.has_value(), [](auto& k) { k.lora.reset(); })) {
      return NoHitReason::kOnlyWithoutAdapter;
    }
    if (would_hit(!keys.cache_salt.empty(), [](auto& k) { k.cache_salt.clear(); })) {
      return NoHitReason::kOnlyWithoutSalt;
    }
    if (would_hit(!keys.mm_features.empty(), [](auto& k) { k.mm_features.clear(); })) {
      return NoHitReason::kOnlyWithoutMedia;
    }
    if (would_hit(keys.prompt_embeds.has_value(), [](auto& k) { k.prompt_embeds.reset(); })) {
      return NoHitReason::kOnlyWithoutEmbeds;
    }
    if (num_kinds > 1 && is_cached_under(none, block)) return NoHitReason::kOnlyWithoutExtraKeys;
    return NoHitReason::kNotCached;
  }

  [[nodiscard]] bool is_cached_under(const RequestKeys& keys, const WantedBlock& block) const {
    const auto tokens = request_.all_token_ids().first(static_cast<std::size_t>(block.end_token()));
    ContentHolder last;  // as long as the hashes are used
    std::vector<BlockHash> hashes;
    if (const Sha256BlockHasher* sha256 = request_.sha256_hasher()) {
      hashes = hash_full_blocks(keys, tokens, sha256->hash_block_size, 0, sha256->none_hash);
    } else if (const Xxh3BlockHasher* xxh3 = request_.xxh3_hasher()) {
      hashes = xxh3->hash_prefix(keys, tokens, last);
    }
    return !hashes.empty() && is_cached(hashes.back(), block.group);
  }

  const KVCacheCoordinator& coordinator_;
  const BlockPool& pool_;
  const Request& request_;
  std::int64_t max_length_;
  NoHitReport report_;
};

}  // namespace

std::string NoHitReport::message() const {
  std::ostringstream text;
  text << num_hit_tokens << " of " << num_tokens << " tokens are cached. ";
  if (kv_cache_group_id) {
    text << "Block " << block_idx << " of group " << *kv_cache_group_id << ", tokens [";
  } else {
    text << "Tokens [";
  }
  text << start_token << ", " << end_token << "): " << explanation(reason) << ".";
  return text.str();
}

NoHitReport explain_hit(const KVCacheCoordinator& coordinator, const Request& request,
                        bool enable_caching) {
  Explainer explainer(coordinator, request);
  if (!enable_caching) return explainer.without_lookup(NoHitReason::kCachingDisabled);
  if (request.options().skip_reading_prefix_cache) {
    return explainer.without_lookup(NoHitReason::kRequestSkipsCache);
  }
  return explainer.after_lookup();
}

}  // namespace paged_kv
