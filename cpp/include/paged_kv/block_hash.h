// SPDX-License-Identifier: Apache-2.0
//
// The identity of a full block's content: a SHA-256 chain over the block's tokens.
//
//   hash(block) = sha256(cbor([parent hash, [token ids], extra keys or null]))
//
// The parent of a first block is the "none hash". So equal hashes mean equal prefixes, from the
// first token on. Bytes are those of vLLM's `sha256_cbor`, so hashes can be shared with it.
//
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::hash_block_tokens, utils/hashing.py::sha256_cbor.
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/sha256.h"

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace paged_kv {

// 32 bytes that name the content of a block and of all blocks before it.
struct BlockHash {
  Sha256Digest bytes{};

  friend auto operator<=>(const BlockHash&, const BlockHash&) = default;
};

// Key of the prefix cache: equal content in two cache groups is two different things.
struct BlockHashWithGroupId {
  BlockHash hash;
  GroupId group_id;

  friend auto operator<=>(const BlockHashWithGroupId&, const BlockHashWithGroupId&) = default;
};

// The packed form of a key: the hash, then the group id as 4 big-endian bytes.
inline constexpr std::size_t kPackedKeyBytes = kSha256DigestBytes + 4;
using PackedKey = std::array<std::uint8_t, kPackedKeyBytes>;
[[nodiscard]] PackedKey pack(const BlockHashWithGroupId& key) noexcept;
// Throws std::invalid_argument unless `bytes` is what pack() returns for some key.
[[nodiscard]] BlockHashWithGroupId unpack(std::span<const std::uint8_t> bytes);

// What besides its tokens distinguishes a block, e.g. ("lora", name, path). The first item is the
// kind of key; every item is typed and length-framed, so that no two keys can be confused.
using ExtraKeyItem = std::variant<std::int64_t, std::string, std::vector<std::uint8_t>>;
using ExtraKey = std::vector<ExtraKeyItem>;
using ExtraKeys = std::vector<ExtraKey>;

inline constexpr std::string_view kDefaultNoneHashSeed = "vllm-none-hash";

// The parent of first blocks for a seed. Processes that share cached blocks need the same seed.
[[nodiscard]] BlockHash make_none_hash(std::string_view seed = kDefaultNoneHashSeed);

// Hashes blocks one after the other, with one scratch buffer for all of them.
class BlockHasher {
 public:
  // Hash of one block. `extra_keys` nullopt and empty differ (null and an empty array).
  // Cost: a compression per 64 bytes of CBOR (35 bytes, and up to 5 for a token id below 2**32).
  [[nodiscard]] BlockHash hash(const BlockHash& parent, std::span<const std::int32_t> token_ids,
                               const std::optional<ExtraKeys>& extra_keys);
  [[nodiscard]] BlockHash hash(const BlockHash& parent, std::span<const std::int64_t> token_ids,
                               const std::optional<ExtraKeys>& extra_keys);

 private:
  template <class Token>
  BlockHash hash_tokens(const BlockHash& parent, std::span<const Token> token_ids,
                        const std::optional<ExtraKeys>& extra_keys);

  std::vector<std::uint8_t> message_;
};

// View of hashes of `hash_block_size` tokens as hashes of `block_size` tokens. Since hashes are
// chained, coarse block i is named by its last fine hash, (i + 1) * scale - 1.
class CoarseBlockHashes {
 public:
  // Does not own `fine_hashes`. Throws std::invalid_argument unless block_size is a positive
  // multiple of hash_block_size.
  CoarseBlockHashes(std::span<const BlockHash> fine_hashes, std::int64_t hash_block_size,
                    std::int64_t block_size);

  // A last block with only a part of its fine hashes does not count.
  [[nodiscard]] std::int64_t size() const noexcept {
    return static_cast<std::int64_t>(fine_hashes_.size()) / scale_;
  }
  [[nodiscard]] const BlockHash& operator[](std::int64_t block_idx) const noexcept {
    return fine_hashes_[static_cast<std::size_t>((block_idx + 1) * scale_ - 1)];
  }

 private:
  std::span<const BlockHash> fine_hashes_;
  std::int64_t scale_;
};

}  // namespace paged_kv
