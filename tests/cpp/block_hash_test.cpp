// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/block_hash.h"

#include "paged_kv/cbor.h"
#include "paged_kv/request_hash.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

using Tokens = std::vector<std::int64_t>;

BlockHash hash_of(const Tokens& tokens, const std::optional<ExtraKeys>& keys = std::nullopt) {
  return BlockHasher().hash(make_none_hash(), tokens, keys);
}

std::vector<std::uint8_t> cbor_of(std::int64_t value) {
  std::vector<std::uint8_t> out;
  CborWriter(out).write_int(value);
  return out;
}

TEST(Cbor, IntegersTakeTheShortestForm) {
  using Bytes = std::vector<std::uint8_t>;
  EXPECT_EQ(cbor_of(0), (Bytes{0x00}));
  EXPECT_EQ(cbor_of(23), (Bytes{0x17}));
  EXPECT_EQ(cbor_of(24), (Bytes{0x18, 24}));
  EXPECT_EQ(cbor_of(255), (Bytes{0x18, 255}));
  EXPECT_EQ(cbor_of(256), (Bytes{0x19, 1, 0}));
  EXPECT_EQ(cbor_of(65535), (Bytes{0x19, 255, 255}));
  EXPECT_EQ(cbor_of(65536), (Bytes{0x1a, 0, 1, 0, 0}));
  EXPECT_EQ(cbor_of(0xffffffff), (Bytes{0x1a, 255, 255, 255, 255}));
  EXPECT_EQ(cbor_of(0x100000000), (Bytes{0x1b, 0, 0, 0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(cbor_of(-1), (Bytes{0x20}));
  EXPECT_EQ(cbor_of(-24), (Bytes{0x37}));
  EXPECT_EQ(cbor_of(-25), (Bytes{0x38, 24}));
  EXPECT_EQ(cbor_of(INT64_MIN), (Bytes{0x3b, 127, 255, 255, 255, 255, 255, 255, 255}));
}

TEST(Cbor, ManyIntegersAreWrittenAsEachOfThem) {
  std::vector<std::int64_t> values;  // more than fit in the writer's buffer at a time
  for (int shift = 0; shift < 63; ++shift) {
    values.push_back(std::int64_t{1} << shift);
    values.push_back(-values.back());
  }
  std::vector<std::uint8_t> expected;
  for (const std::int64_t value : values) CborWriter(expected).write_int(value);
  std::vector<std::uint8_t> written;
  CborWriter(written).write_ints(std::span<const std::int64_t>(values));
  EXPECT_EQ(written, expected);
  CborWriter(written).write_ints(std::span<const std::int64_t>());
  EXPECT_EQ(written, expected);
}

TEST(BlockHash, Int32AndInt64TokensGiveOneHash) {
  const std::vector<std::int32_t> narrow{1, 2, 300, 70000};
  EXPECT_EQ(BlockHasher().hash(make_none_hash(), narrow, std::nullopt),
            hash_of({1, 2, 300, 70000}));
}

// As vLLM gives for these values of $PYTHONHASHSEED: tests/data/hash_vectors.json.gz.
TEST(BlockHash, TheSeedDecidesTheHashOfNoParent) {
  const auto first_bytes = [](const BlockHash& hash) {
    return std::vector<int>(hash.bytes.begin(), hash.bytes.begin() + 4);
  };
  EXPECT_EQ(first_bytes(make_none_hash()), (std::vector{0x9b, 0xd9, 0x6a, 0x48}));
  EXPECT_EQ(first_bytes(make_none_hash("")), (std::vector{0x8d, 0x33, 0xf5, 0x20}));
  EXPECT_EQ(first_bytes(make_none_hash("12345")), (std::vector{0x72, 0x92, 0x41, 0x2b}));
}

TEST(BlockHash, NoExtraKeysAndEmptyExtraKeysDiffer) {
  EXPECT_NE(hash_of({1}, std::nullopt), hash_of({1}, ExtraKeys{}));
}

TEST(BlockHash, AHasherCanBeUsedAgain) {
  BlockHasher hasher;
  const Tokens first{1, 2, 3}, second{4, 5};
  const BlockHash parent = hasher.hash(make_none_hash(), first, std::nullopt);
  EXPECT_EQ(hasher.hash(parent, second, std::nullopt),
            BlockHasher().hash(hash_of(first), second, std::nullopt));
}

TEST(BlockHash, KeysPackToHashAndBigEndianGroup) {
  const BlockHashWithGroupId key{hash_of({1}), GroupId(0x01020304)};
  const PackedKey packed = pack(key);
  EXPECT_TRUE(std::equal(key.hash.bytes.begin(), key.hash.bytes.end(), packed.begin()));
  EXPECT_EQ(packed[32], 1);
  EXPECT_EQ(packed[35], 4);
  EXPECT_EQ(unpack(packed), key);
}

TEST(BlockHash, AnXxh3HashIsItsDigestToOthersAndTellsItsContent) {
  const Xxh3Digest digest{0xab, 1, 2, 3};
  const BlockHash hash = BlockHash::from_xxh3(digest, ContentId(0x123456789a));
  EXPECT_TRUE(hash.is_xxh3());
  EXPECT_FALSE(hash_of({1}).is_xxh3());
  EXPECT_FALSE(BlockHash{}.is_xxh3());
  EXPECT_TRUE(std::ranges::equal(hash.digest(), digest));
  EXPECT_EQ(hash.content(), ContentId(0x123456789a));
  EXPECT_NE(hash, BlockHash::from_xxh3(digest, ContentId(1)));
  EXPECT_EQ(hash.without_content(), BlockHash::from_xxh3(digest, ContentId()));
  EXPECT_EQ(hash_of({1}).without_content(), hash_of({1}));
  const PackedKey packed = pack({hash, GroupId(2)});
  EXPECT_EQ(packed.size(), 20U);
  EXPECT_EQ(unpack(packed), (BlockHashWithGroupId{hash.without_content(), GroupId(2)}));
  // Forged: what looks like a hash with a content must come from a BlockHash.
  EXPECT_THROW(static_cast<void>(to_block_hash(hash.bytes)), std::invalid_argument);
}

TEST(BlockHash, UnpackRefusesOtherBytes) {
  std::array<std::uint8_t, 36> negative_group{};
  negative_group[32] = 0x80;
  EXPECT_THROW(static_cast<void>(unpack(negative_group)), std::invalid_argument);
  EXPECT_THROW(static_cast<void>(unpack(std::span(negative_group).first(35))),
               std::invalid_argument);
}

TEST(CoarseBlockHashes, NamesABlockByItsLastFineHash) {
  const std::vector<BlockHash> fine{hash_of({0}), hash_of({1}), hash_of({2}), hash_of({3}),
                                    hash_of({4})};
  const CoarseBlockHashes coarse(fine, 16, 32);
  EXPECT_EQ(coarse.size(), 2);
  EXPECT_EQ(coarse[0], fine[1]);
  EXPECT_EQ(coarse[1], fine[3]);
  EXPECT_EQ(CoarseBlockHashes(fine, 16, 16).size(), 5);
  EXPECT_THROW(CoarseBlockHashes(fine, 16, 24), std::invalid_argument);
  EXPECT_THROW(CoarseBlockHashes(fine, 16, 0), std::invalid_argument);
  EXPECT_THROW(CoarseBlockHashes(fine, 0, 16), std::invalid_argument);
}

TEST(RequestHash, ContinuesAChainWhereItStopped) {
  RequestKeys request;
  request.lora = LoraKey{"a", "/a"};
  request.mm_features = {{"picture", 3, 9}};
  request.cache_salt = "salt";
  Tokens tokens(18);
  for (std::size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<std::int64_t>(i * 1000);
  const auto whole = hash_full_blocks(request, tokens, 4, 0, make_none_hash());
  ASSERT_EQ(whole.size(), 4U);
  const auto rest =
      hash_full_blocks(request, std::span<const std::int64_t>(tokens).subspan(8), 4, 2, whole[1]);
  EXPECT_EQ(rest, (std::vector<BlockHash>{whole[2], whole[3]}));
}

TEST(RequestHash, PromptEmbedsAreHashedByBlockAndEmptyPastTheirEnd) {
  const std::vector<std::uint8_t> rows(6 * 2, 7);
  RequestKeys request;
  request.prompt_embeds = PromptEmbeds{rows, 2};
  const auto key_of = [&](std::int64_t start) {
    return std::get<std::vector<std::uint8_t>>(
        (*generate_block_hash_extra_keys(request, start, start + 4, 0).keys)[0][1]);
  };
  const auto digest_of = [&](std::size_t num_bytes) {
    const Sha256Digest digest = sha256(std::span(rows).first(num_bytes));
    return std::vector<std::uint8_t>(digest.begin(), digest.end());
  };
  EXPECT_EQ(key_of(0), digest_of(8));
  EXPECT_EQ(key_of(4), digest_of(4));
  EXPECT_EQ(key_of(8), digest_of(0));
}

}  // namespace
}  // namespace paged_kv
