// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/request_hash.h"

#include "paged_kv/check.h"
#include "paged_kv/token_checks.h"

#include <algorithm>

namespace paged_kv {
namespace {

// Appends a key per feature that overlaps [start, end). Returns the next block's first candidate.
std::int64_t append_mm_keys(std::span<const MultiModalFeature> features, std::int64_t start,
                            std::int64_t end, std::int64_t mm_idx, ExtraKeys& keys) {
  const auto num_features = static_cast<std::int64_t>(features.size());
  std::int64_t next_mm_idx = num_features;
  for (; mm_idx < num_features; ++mm_idx) {
    const MultiModalFeature& feature = features[static_cast<std::size_t>(mm_idx)];
    const std::int64_t feature_end = feature.offset + feature.length;
    // It reaches into the next block, and so may those after it; but they may overlap this block.
    if (feature_end > end) next_mm_idx = std::min(next_mm_idx, mm_idx);
    if (feature.offset >= end) return std::min(next_mm_idx, mm_idx);
    if (feature_end <= start) continue;
    keys.push_back({"mm", feature.identifier, feature.offset - start});
  }
  return next_mm_idx;
}

ExtraKey prompt_embeds_key(const PromptEmbeds& embeds, std::int64_t start, std::int64_t end) {
  const auto num_bytes = static_cast<std::int64_t>(embeds.rows.size());
  const std::int64_t begin_byte = std::min(start * embeds.bytes_per_token, num_bytes);
  const std::int64_t end_byte = std::min(end * embeds.bytes_per_token, num_bytes);
  const Sha256Digest digest = sha256(embeds.rows.subspan(
      static_cast<std::size_t>(begin_byte), static_cast<std::size_t>(end_byte - begin_byte)));
  return {"prompt_embeds", std::vector<std::uint8_t>(digest.begin(), digest.end())};
}

// hash_block(parent, token_ids, extra_keys) hashes one of them.
template <class Token, class HashBlock>
std::vector<BlockHash> hash_blocks(const RequestKeys& request, std::span<const Token> token_ids,
                                   std::int64_t block_size, std::int64_t first_block,
                                   const BlockHash& parent, HashBlock hash_block) {
  PAGED_KV_CHECK(block_size > 0, "block_size must be positive, got ", block_size);
  PAGED_KV_CHECK(first_block >= 0, "first_block must not be negative, got ", first_block);
  const std::int64_t num_full_blocks = static_cast<std::int64_t>(token_ids.size()) / block_size;

  std::vector<BlockHash> hashes;
  hashes.reserve(static_cast<std::size_t>(num_full_blocks));
  BlockHash previous = parent;
  std::int64_t mm_idx = 0;
  for (std::int64_t i = 0; i < num_full_blocks; ++i) {
    const std::int64_t start = (first_block + i) * block_size;
    const BlockExtraKeys extra =
        generate_block_hash_extra_keys(request, start, start + block_size, mm_idx);
    mm_idx = extra.next_mm_idx;
    const auto block_tokens = token_ids.subspan(static_cast<std::size_t>(i * block_size),
                                                static_cast<std::size_t>(block_size));
    previous = hash_block(previous, block_tokens, extra.keys);
    hashes.push_back(previous);
  }
  return hashes;
}

template <class Token>
std::vector<BlockHash> hash_blocks_sha256(const RequestKeys& request,
                                          std::span<const Token> token_ids, std::int64_t block_size,
                                          std::int64_t first_block, const BlockHash& parent) {
  BlockHasher hasher;
  return hash_blocks(request, token_ids, block_size, first_block, parent,
                     [&](const BlockHash& previous, std::span<const Token> tokens,
                         const std::optional<ExtraKeys>& extra_keys) {
                       return hasher.hash(previous, tokens, extra_keys);
                     });
}

}  // namespace

void check_mm_features(std::span<const MultiModalFeature> features) {
  // Offsets are added to lengths and subtracted from token positions.
  std::int64_t previous_offset = 0;
  for (const MultiModalFeature& feature : features) {
    PAGED_KV_CHECK(feature.offset >= 0 && feature.offset <= kMaxTokens && feature.length >= 0 &&
                       feature.length <= kMaxTokens,
                   "mm_features: offset and length must be in [0, 2**40], got ", feature.offset,
                   " and ", feature.length, " for ", feature.identifier);
    PAGED_KV_CHECK(feature.offset >= previous_offset, "mm_features must be ordered by offset, got ",
                   feature.offset, " after ", previous_offset, " for ", feature.identifier);
    previous_offset = feature.offset;
  }
}

BlockExtraKeys generate_block_hash_extra_keys(const RequestKeys& request,
                                              std::int64_t start_token_idx,
                                              std::int64_t end_token_idx,
                                              std::int64_t start_mm_idx) {
  PAGED_KV_CHECK(start_token_idx >= 0 && end_token_idx >= start_token_idx,
                 "token range must be ordered and not negative, got [", start_token_idx, ", ",
                 end_token_idx, ")");
  const auto num_features = static_cast<std::int64_t>(request.mm_features.size());
  PAGED_KV_CHECK(start_mm_idx >= -num_features, "start_mm_idx must be at least ", -num_features,
                 ", got ", start_mm_idx);
  if (start_mm_idx < 0) start_mm_idx += num_features;

  ExtraKeys keys;
  if (request.lora) keys.push_back({"lora", request.lora->name, request.lora->path});
  const std::int64_t next_mm_idx =
      append_mm_keys(request.mm_features, start_token_idx, end_token_idx, start_mm_idx, keys);
  if (start_token_idx == 0 && !request.cache_salt.empty()) {
    keys.push_back({"cache_salt", request.cache_salt});
  }
  if (request.prompt_embeds) {
    keys.push_back(prompt_embeds_key(*request.prompt_embeds, start_token_idx, end_token_idx));
  }
  if (keys.empty()) return {std::nullopt, next_mm_idx};
  return {std::move(keys), next_mm_idx};
}

std::vector<BlockHash> hash_full_blocks(const RequestKeys& request,
                                        std::span<const std::int32_t> token_ids,
                                        std::int64_t block_size, std::int64_t first_block,
                                        const BlockHash& parent) {
  return hash_blocks_sha256(request, token_ids, block_size, first_block, parent);
}

std::vector<BlockHash> hash_full_blocks(const RequestKeys& request,
                                        std::span<const std::int64_t> token_ids,
                                        std::int64_t block_size, std::int64_t first_block,
                                        const BlockHash& parent) {
  return hash_blocks_sha256(request, token_ids, block_size, first_block, parent);
}

std::vector<BlockHash> hash_full_blocks_xxh3(const RequestKeys& request,
                                             std::span<const std::int32_t> token_ids,
                                             std::int64_t block_size, std::int64_t first_block,
                                             const BlockHash& parent,
                                             const std::shared_ptr<PrefixContents>& contents,
                                             ContentHolder& last) {
  BlockHasher hasher;
  ContentHolder holder = last;
  std::vector<BlockHash> hashes = hash_blocks(
      request, token_ids, block_size, first_block, parent,
      [&](const BlockHash& previous, std::span<const std::int32_t> tokens,
          const std::optional<ExtraKeys>& extra_keys) {
        const BlockHash hash = hasher.hash_xxh3(previous, tokens, extra_keys, *contents);
        holder = ContentHolder(contents, hash.content());
        return hash;
      });
  last = std::move(holder);
  return hashes;
}

}  // namespace paged_kv
