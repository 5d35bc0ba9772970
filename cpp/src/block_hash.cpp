// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_hash.h"

#include "paged_kv/big_endian.h"
#include "paged_kv/cbor.h"
#include "paged_kv/check.h"

#include <algorithm>

namespace paged_kv {
namespace {

void write_item(CborWriter& writer, const ExtraKeyItem& item) {
  if (const auto* number = std::get_if<std::int64_t>(&item)) {
    writer.write_int(*number);
  } else if (const auto* text = std::get_if<std::string>(&item)) {
    writer.write_text(*text);
  } else {
    writer.write_bytes(std::get<std::vector<std::uint8_t>>(item));
  }
}

void write_extra_keys(CborWriter& writer, const std::optional<ExtraKeys>& extra_keys) {
  if (!extra_keys) return writer.write_null();
  writer.begin_array(extra_keys->size());
  for (const ExtraKey& key : *extra_keys) {
    writer.begin_array(key.size());
    for (const ExtraKeyItem& item : key) write_item(writer, item);
  }
}

}  // namespace

BlockHash BlockHash::from_xxh3(const Xxh3Digest& digest, ContentId content) noexcept {
  BlockHash hash;
  std::ranges::copy(digest, hash.bytes.begin());
  const std::int64_t number = content.value();
  std::memcpy(hash.bytes.data() + kContentOffset, &number, sizeof number);
  std::ranges::copy(kXxh3Mark, hash.bytes.begin() + kMarkOffset);
  return hash;
}

ContentId BlockHash::content() const noexcept {
  std::int64_t number = 0;
  std::memcpy(&number, bytes.data() + kContentOffset, sizeof number);
  return ContentId(number);
}

BlockHash BlockHash::without_content() const noexcept {
  BlockHash hash = *this;
  if (is_xxh3())
    std::fill_n(hash.bytes.begin() + kContentOffset, sizeof(ContentId), std::uint8_t{0xff});
  return hash;
}

BlockHash to_block_hash(std::span<const std::uint8_t> digest) {
  if (digest.size() == kXxh3DigestBytes) {
    Xxh3Digest bytes;
    std::ranges::copy(digest, bytes.begin());
    return BlockHash::from_xxh3(bytes, ContentId());
  }
  PAGED_KV_CHECK(digest.size() == kSha256DigestBytes, "a block hash has ", kSha256DigestBytes,
                 " or ", kXxh3DigestBytes, " bytes, got ", digest.size());
  BlockHash hash;
  std::ranges::copy(digest, hash.bytes.begin());
  PAGED_KV_CHECK(!hash.is_xxh3(), "these 32 bytes are no SHA-256 digest");
  return hash;
}

PackedKey pack(const BlockHashWithGroupId& key) {
  const auto digest = key.hash.digest();
  PackedKey packed(digest.size() + kPackedGroupIdBytes);
  std::ranges::copy(digest, packed.begin());
  store_big_endian(static_cast<std::uint32_t>(key.group_id.value()), packed.data() + digest.size());
  return packed;
}

BlockHashWithGroupId unpack(std::span<const std::uint8_t> bytes) {
  PAGED_KV_CHECK(bytes.size() == kSha256DigestBytes + kPackedGroupIdBytes ||
                     bytes.size() == kXxh3DigestBytes + kPackedGroupIdBytes,
                 "a block hash with group id has ", kSha256DigestBytes + kPackedGroupIdBytes,
                 " or ", kXxh3DigestBytes + kPackedGroupIdBytes, " bytes, got ", bytes.size());
  BlockHashWithGroupId key;
  key.hash = to_block_hash(bytes.first(bytes.size() - kPackedGroupIdBytes));
  std::uint32_t group_id = 0;
  for (const std::uint8_t byte : bytes.last(kPackedGroupIdBytes)) {
    group_id = group_id << 8 | byte;
  }
  key.group_id = GroupId(static_cast<std::int32_t>(group_id));
  PAGED_KV_CHECK(key.group_id.valid(), "group id must be below 2**31, got ", group_id);
  return key;
}

BlockHash make_none_hash(std::string_view seed) {
  std::vector<std::uint8_t> message;
  CborWriter(message).write_text(seed);
  return BlockHash{sha256(message)};
}

template <class Token>
void BlockHasher::write_message(const BlockHash& parent, std::span<const Token> token_ids,
                                const std::optional<ExtraKeys>& extra_keys) {
  message_.clear();
  message_.reserve(2 * kSha256DigestBytes + 8 * (token_ids.size() + 1) + 64);  // with padding
  CborWriter writer(message_);
  writer.begin_array(3);
  writer.write_bytes(parent.digest());
  block_begin_ = message_.size();
  writer.begin_array(token_ids.size());
  writer.write_ints(token_ids);
  write_extra_keys(writer, extra_keys);
}

BlockHash BlockHasher::hash(const BlockHash& parent, std::span<const std::int32_t> token_ids,
                            const std::optional<ExtraKeys>& extra_keys) {
  write_message(parent, token_ids, extra_keys);
  return BlockHash{sha256_in_place(message_)};
}

BlockHash BlockHasher::hash(const BlockHash& parent, std::span<const std::int64_t> token_ids,
                            const std::optional<ExtraKeys>& extra_keys) {
  write_message(parent, token_ids, extra_keys);
  return BlockHash{sha256_in_place(message_)};
}

BlockHash BlockHasher::hash_xxh3(const BlockHash& parent, std::span<const std::int32_t> token_ids,
                                 const std::optional<ExtraKeys>& extra_keys,
                                 PrefixContents& contents) {
  write_message(parent, token_ids, extra_keys);
  const Xxh3Digest digest = xxh3_128(message_);
  std::uint32_t digest_bits = 0;
  std::memcpy(&digest_bits, digest.data(), sizeof digest_bits);
  const ContentId before = parent.is_xxh3() ? parent.content() : ContentId();
  const auto block = std::span<const std::uint8_t>(message_).subspan(block_begin_);
  return BlockHash::from_xxh3(digest, contents.acquire(before, block, digest_bits));
}

CoarseBlockHashes::CoarseBlockHashes(std::span<const BlockHash> fine_hashes,
                                     std::int64_t hash_block_size, std::int64_t block_size)
    : fine_hashes_(fine_hashes), scale_(1) {
  PAGED_KV_CHECK(hash_block_size > 0, "hash_block_size must be positive, got ", hash_block_size);
  PAGED_KV_CHECK(block_size > 0 && block_size % hash_block_size == 0,
                 "block_size must be a positive multiple of hash_block_size (", hash_block_size,
                 "), got ", block_size);
  scale_ = block_size / hash_block_size;
}

}  // namespace paged_kv
