// SPDX-License-Identifier: Apache-2.0
//
// The identity of a full block's content: a hash chain over the block's tokens.
//
//   hash(block) = sha256(cbor([parent hash, [token ids], extra keys or null]))
//
// The parent of a first block is the "none hash". So equal hashes mean equal prefixes, from the
// first token on. Bytes are those of vLLM's `sha256_cbor`, so hashes can be shared with it; with
// XXH3 in the place of SHA-256 they are those of `xxhash_cbor`. Of XXH3 equal digests prove
// nothing, so such a hash carries the number of its content too (prefix_contents.h).
//
// Source: vLLM 0.32 v1/core/kv_cache_utils.py::hash_block_tokens, utils/hashing.py::sha256_cbor,
// xxhash_cbor.
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/prefix_contents.h"
#include "paged_kv/sha256.h"
#include "paged_kv/xxh3.h"

#include <array>
#include <compare>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace paged_kv {

// 32 bytes that name the content of a block and of all blocks before it: a SHA-256 digest; or an
// XXH3 digest of 16 bytes, the ContentId that goes with it, and a mark. (That a SHA-256 digest ends
// with the mark happens once in 2**64 blocks; such a block cannot be cached.)
struct BlockHash {
  Sha256Digest bytes{};

  // `content` invalid: only the digest is known, so that nothing is found under it.
  [[nodiscard]] static BlockHash from_xxh3(const Xxh3Digest& digest, ContentId content) noexcept;

  [[nodiscard]] bool is_xxh3() const noexcept {
    return std::memcmp(bytes.data() + kMarkOffset, kXxh3Mark, sizeof kXxh3Mark) == 0;
  }
  // What others see of it: 32 or 16 bytes.
  [[nodiscard]] std::span<const std::uint8_t> digest() const noexcept {
    return std::span(bytes).first(is_xxh3() ? kXxh3DigestBytes : kSha256DigestBytes);
  }
  // Of one that is_xxh3().
  [[nodiscard]] ContentId content() const noexcept;
  // Itself, or of one that is_xxh3() what its digest alone tells.
  [[nodiscard]] BlockHash without_content() const noexcept;

  friend auto operator<=>(const BlockHash&, const BlockHash&) = default;

 private:
  static constexpr std::size_t kContentOffset = kXxh3DigestBytes;
  static constexpr std::size_t kMarkOffset = kContentOffset + sizeof(ContentId);
  static constexpr std::uint8_t kXxh3Mark[] = {'x', 'x', 'h', '3', '_', '1', '2', '8'};
  static_assert(kMarkOffset + sizeof kXxh3Mark == kSha256DigestBytes);
};

// Key of the prefix cache: equal content in two cache groups is two different things.
struct BlockHashWithGroupId {
  BlockHash hash;
  GroupId group_id;

  friend auto operator<=>(const BlockHashWithGroupId&, const BlockHashWithGroupId&) = default;
};

// The packed form of a key: the digest, then the group id as 4 big-endian bytes.
inline constexpr std::size_t kPackedGroupIdBytes = 4;
using PackedKey = std::vector<std::uint8_t>;
[[nodiscard]] PackedKey pack(const BlockHashWithGroupId& key);
// The hash whose digest() these bytes are; of an XXH3 digest without its content. Throws
// std::invalid_argument unless there are 32 or 16.
[[nodiscard]] BlockHash to_block_hash(std::span<const std::uint8_t> digest);
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

  // The same with XXH3. `contents` gets one holder more of the block's content; the one of
  // `parent`, if that is an XXH3 hash of a block, must be kept there.
  [[nodiscard]] BlockHash hash_xxh3(const BlockHash& parent,
                                    std::span<const std::int32_t> token_ids,
                                    const std::optional<ExtraKeys>& extra_keys,
                                    PrefixContents& contents);

 private:
  template <class Token>
  void write_message(const BlockHash& parent, std::span<const Token> token_ids,
                     const std::optional<ExtraKeys>& extra_keys);

  std::vector<std::uint8_t> message_;
  std::size_t block_begin_ = 0;  // in the message: behind the parent's digest
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
