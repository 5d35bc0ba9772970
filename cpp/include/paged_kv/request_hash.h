// SPDX-License-Identifier: Apache-2.0
//
// Block hashes of a request: which extra keys its blocks carry, and the hash chain over its tokens.
//
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::generate_block_hash_extra_keys,
// get_request_block_hasher.
#pragma once

#include "paged_kv/block_hash.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paged_kv {

// The path is part of the key: a name may be pointed at another adapter.
struct LoraKey {
  std::string name;
  std::string path;
};

// A picture, sound, ... whose embeddings stand in the place of tokens [offset, offset + length).
struct MultiModalFeature {
  std::string identifier;
  std::int64_t offset = 0;
  std::int64_t length = 0;
};

// Embeddings given in the place of prompt tokens: one row of `bytes_per_token` bytes a token.
// Does not own the rows. Tokens past the last row have none.
struct PromptEmbeds {
  std::span<const std::uint8_t> rows;
  std::int64_t bytes_per_token = 0;
};

// All that besides token ids decides the KV of a request.
struct RequestKeys {
  std::optional<LoraKey> lora;
  std::vector<MultiModalFeature> mm_features;  // see check_mm_features()
  std::string cache_salt;                      // empty: none
  std::optional<PromptEmbeds> prompt_embeds;
};

// Throws std::invalid_argument unless features are ordered by offset, with offsets and lengths in
// [0, 2**40]. They may overlap: the sound of a film lies among its pictures.
void check_mm_features(std::span<const MultiModalFeature> features);

struct BlockExtraKeys {
  std::optional<ExtraKeys> keys;  // nullopt: the tokens alone name the block
  std::int64_t next_mm_idx = 0;   // first feature that may reach into the next block
};

// Extra keys of the block of tokens [start_token_idx, end_token_idx), in this order:
//   ("lora", name, path)                    every block
//   ("mm", identifier, offset - start)      per feature that overlaps the block
//   ("cache_salt", salt)                    the first block only: the chain carries it on
//   ("prompt_embeds", sha256 of the rows)   every block
// Features before `start_mm_idx` are not looked at; a negative index counts from the end. Features
// are as check_mm_features() asks for.
// Cost: O(features from start_mm_idx up to the end of the block).
[[nodiscard]] BlockExtraKeys generate_block_hash_extra_keys(const RequestKeys& request,
                                                            std::int64_t start_token_idx,
                                                            std::int64_t end_token_idx,
                                                            std::int64_t start_mm_idx);

// Hashes of the full blocks of a request from block `first_block` on. `token_ids` are the request's
// tokens from that block on; `parent` is the hash of the block before it, or the none hash. A last,
// partial block has no hash. Features are as check_mm_features() asks for; who sets them checks
// them once, so that a decode step does not look at all of them. Cost: one BlockHasher::hash() per
// block.
[[nodiscard]] std::vector<BlockHash> hash_full_blocks(const RequestKeys& request,
                                                      std::span<const std::int32_t> token_ids,
                                                      std::int64_t block_size,
                                                      std::int64_t first_block,
                                                      const BlockHash& parent);
[[nodiscard]] std::vector<BlockHash> hash_full_blocks(const RequestKeys& request,
                                                      std::span<const std::int64_t> token_ids,
                                                      std::int64_t block_size,
                                                      std::int64_t first_block,
                                                      const BlockHash& parent);

// The same with XXH3: what vLLM calls `xxhash_cbor`. Contents of the blocks are kept in `contents`;
// `last` becomes the holder of the last one, and so of all. `parent` is the none hash, or what
// `last` holds.
[[nodiscard]] std::vector<BlockHash> hash_full_blocks_xxh3(
    const RequestKeys& request, std::span<const std::int32_t> token_ids, std::int64_t block_size,
    std::int64_t first_block, const BlockHash& parent,
    const std::shared_ptr<PrefixContents>& contents, ContentHolder& last);

}  // namespace paged_kv
