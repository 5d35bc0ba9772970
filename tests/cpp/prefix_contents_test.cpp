// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/prefix_contents.h"

#include "failing_allocations.h"
#include "paged_kv/block_pool.h"
#include "paged_kv/check.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr ContentId kNothing;
// Of every content: as if all hashes collided.
constexpr std::uint32_t kDigestBits = 7;

std::shared_ptr<PrefixContents> make_contents() { return std::make_shared<PrefixContents>(); }

// An acquired content.
ContentHolder hold(const std::shared_ptr<PrefixContents>& contents, ContentId parent,
                   const Bytes& block) {
  return {contents, contents->acquire(parent, block, kDigestBits)};
}

TEST(PrefixContents, EqualNumbersMeanEqualPrefixes) {
  const auto contents = make_contents();
  const auto a = hold(contents, kNothing, {1, 2});
  const auto b = hold(contents, kNothing, {1, 3});
  const auto a_then_b = hold(contents, a.content(), {1, 3});
  const auto b_then_b = hold(contents, b.content(), {1, 3});
  const std::set<ContentId> numbers{a.content(), b.content(), a_then_b.content(),
                                    b_then_b.content()};
  EXPECT_EQ(numbers.size(), 4U);
  EXPECT_EQ(hold(contents, a.content(), {1, 3}).content(), a_then_b.content());
  EXPECT_EQ(contents->size(), 4U);
  contents->check_integrity();
}

TEST(PrefixContents, AContentIsKeptByItsHoldersAndByWhatContinuesIt) {
  const auto contents = make_contents();
  auto first = hold(contents, kNothing, {1});
  auto second = hold(contents, first.content(), {2});
  auto copy = second;
  const ContentId first_id = first.content();
  first = {};
  second = {};
  EXPECT_TRUE(contents->contains(first_id));
  EXPECT_EQ(hold(contents, kNothing, {1}).content(), first_id);
  contents->check_integrity();
  copy = {};
  EXPECT_FALSE(contents->contains(first_id));
  EXPECT_EQ(contents->size(), 0U);
  contents->check_integrity();
}

TEST(PrefixContents, ANumberIsNeverGivenTwice) {
  const auto contents = make_contents();
  std::set<ContentId> numbers;
  for (int i = 0; i < 100; ++i) numbers.insert(hold(contents, kNothing, {1}).content());
  EXPECT_EQ(numbers.size(), 100U);
  EXPECT_EQ(contents->size(), 0U);
}

TEST(PrefixContents, APrefixThatIsNotKeptCannotBeContinued) {
  const auto contents = make_contents();
  const ContentId gone = hold(contents, kNothing, {1}).content();
  EXPECT_THROW(static_cast<void>(contents->acquire(gone, Bytes{2}, kDigestBits)),
               std::invalid_argument);
  EXPECT_FALSE(contents->contains(ContentId(5)));
  EXPECT_FALSE(contents->contains(kNothing));
}

TEST(PrefixContents, ContentsThatMeetInTheIndexAreToldApart) {
  // So many have some pairs with the same 32 bits of hash.
  constexpr std::uint32_t kNumContents = 300'000;
  const auto contents = make_contents();
  std::vector<ContentHolder> held;
  for (std::uint32_t i = 0; i < kNumContents; ++i) {
    Bytes block(sizeof i);
    std::memcpy(block.data(), &i, sizeof i);
    held.push_back(hold(contents, kNothing, block));
  }
  EXPECT_EQ(contents->size(), kNumContents);
}

TEST(PrefixContents, ALongPrefixIsReleasedWithoutRecursion) {
  const auto contents = make_contents();
  ContentHolder last;
  for (int i = 0; i < 200'000; ++i) last = hold(contents, last.content(), {1});
  EXPECT_EQ(contents->size(), 200'000U);
  last = {};
  EXPECT_EQ(contents->size(), 0U);
}

TEST(PrefixContents, RandomCallsKeepIt) {
  const auto contents = make_contents();
  std::mt19937 random(3);
  std::vector<ContentHolder> held(50);
  for (int i = 0; i < 3000; ++i) {
    const ContentId parent = held[random() % held.size()].content();
    held[random() % held.size()] =
        hold(contents, parent, {static_cast<std::uint8_t>(random() % 3)});
    if (random() % 4 == 0) held[random() % held.size()] = {};
    if (i % 100 == 0) contents->check_integrity();
  }
  held.clear();
  EXPECT_EQ(contents->size(), 0U);
}

TEST(PrefixContents, AFailedAllocationChangesNothing) {
  const auto contents = make_contents();
  const auto parent = hold(contents, kNothing, {1});
  ContentId added;
  const auto acquire = [&] { added = contents->acquire(parent.content(), Bytes(9), 1); };
  const int num_failures = testing::fail_at_each_allocation(acquire, [&] {
    contents->check_integrity();
    EXPECT_EQ(contents->size(), 1U);
  });
  EXPECT_GT(num_failures, 1);
  EXPECT_EQ(contents->size(), 2U);
  contents->release(added);
}

TEST(Xxh3BlockHasher, ARequestHoldsTheContentsOfItsHashes) {
  const auto contents = make_contents();
  RequestOptions options;
  options.request_id = "a";
  options.prompt_token_ids = {1, 2, 3, 4, 5};
  {
    Request request(options, make_xxh3_block_hasher(2, make_none_hash(), contents));
    EXPECT_EQ(contents->size(), 2U);
    request.append_output_token_ids(std::vector{6});
    ASSERT_EQ(request.block_hashes().size(), 3U);
    EXPECT_EQ(contents->size(), 3U);
    for (const BlockHash& hash : request.block_hashes()) {
      EXPECT_TRUE(hash.is_xxh3());
      EXPECT_TRUE(contents->contains(hash.content()));
    }
    const Request same(options, make_xxh3_block_hasher(2, make_none_hash(), contents));
    EXPECT_EQ(contents->size(), 3U);
    EXPECT_EQ(same.block_hashes().back(), request.block_hashes()[1]);
  }
  EXPECT_EQ(contents->size(), 0U);
}

TEST(Xxh3BlockHasher, BadArgumentsAreRefused) {
  EXPECT_THROW(static_cast<void>(make_xxh3_block_hasher(0, make_none_hash(), make_contents())),
               std::invalid_argument);
  EXPECT_THROW(static_cast<void>(make_xxh3_block_hasher(2, make_none_hash(), nullptr)),
               std::invalid_argument);
}

TEST(BlockPool, WithoutContentsAnXxh3HashIsNotCached) {
  const auto contents = make_contents();
  RequestOptions options;
  options.prompt_token_ids = {1, 2};
  const Request request(options, make_xxh3_block_hasher(2, make_none_hash(), contents));
  BlockPool without(4, /*enable_caching=*/true, 2);
  const auto block = without.get_new_blocks(1);
  EXPECT_THROW(without.cache_full_blocks(request.block_hashes(), block, 0, 1, 2, GroupId(0)),
               std::invalid_argument);
  without.check_integrity();
  EXPECT_EQ(without.cached_block_hash_to_block().size(), 0U);
}

TEST(BlockPool, APoolThatEndsReleasesItsContents) {
  const auto contents = make_contents();
  {
    BlockPool pool(4, /*enable_caching=*/true, 2, /*enable_kv_cache_events=*/false, nullptr,
                   nullptr,
                   /*num_remembered_evictions=*/0, contents);
    const auto blocks = pool.get_new_blocks(2);
    RequestOptions options;
    options.prompt_token_ids = {1, 2, 3, 4, 5, 6};
    const Request request(options, make_xxh3_block_hasher(2, make_none_hash(), contents));
    pool.cache_full_blocks(request.block_hashes(), blocks, 0, 1, 2, GroupId(0));
    // Blocks of 4 tokens in another group, the last of them part-filled.
    pool.cache_full_blocks(request.block_hashes(), std::vector{blocks[1]}, 0, 1, 4, GroupId(1));
    EXPECT_TRUE(pool.cache_partial_block(request.block_hashes(), blocks[1], 2, GroupId(1)));
    pool.check_integrity();
    EXPECT_EQ(contents->size(), 3U);
  }
  EXPECT_EQ(contents->size(), 0U);
}

}  // namespace
}  // namespace paged_kv
