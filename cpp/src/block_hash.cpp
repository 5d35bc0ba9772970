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

PackedKey pack(const BlockHashWithGroupId& key) noexcept {
  PackedKey packed;
  std::ranges::copy(key.hash.bytes, packed.begin());
  store_big_endian(static_cast<std::uint32_t>(key.group_id.value()),
                   packed.data() + kSha256DigestBytes);
  return packed;
}

BlockHashWithGroupId unpack(std::span<const std::uint8_t> bytes) {
  PAGED_KV_CHECK(bytes.size() == kPackedKeyBytes, "a block hash with group id has ",
                 kPackedKeyBytes, " bytes, got ", bytes.size());
  BlockHashWithGroupId key;
  std::copy_n(bytes.begin(), kSha256DigestBytes, key.hash.bytes.begin());
  std::uint32_t group_id = 0;
  for (const std::uint8_t byte : bytes.subspan(kSha256DigestBytes)) {
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
BlockHash BlockHasher::hash_tokens(const BlockHash& parent, std::span<const Token> token_ids,
                                   const std::optional<ExtraKeys>& extra_keys) {
  message_.clear();
  message_.reserve(kSha256DigestBytes + 8 * (token_ids.size() + 1));
  CborWriter writer(message_);
  writer.begin_array(3);
  writer.write_bytes(parent.bytes);
  writer.begin_array(token_ids.size());
  writer.write_ints(token_ids);
  write_extra_keys(writer, extra_keys);
  return BlockHash{sha256(message_)};
}

BlockHash BlockHasher::hash(const BlockHash& parent, std::span<const std::int32_t> token_ids,
                            const std::optional<ExtraKeys>& extra_keys) {
  return hash_tokens(parent, token_ids, extra_keys);
}

BlockHash BlockHasher::hash(const BlockHash& parent, std::span<const std::int64_t> token_ids,
                            const std::optional<ExtraKeys>& extra_keys) {
  return hash_tokens(parent, token_ids, extra_keys);
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
