// SPDX-License-Identifier: Apache-2.0
//
// KVCacheManager::fork(): what is shared, what is copied, and that failures change nothing.
#include "failing_allocations.h"
#include "paged_kv/check.h"
#include "paged_kv/kv_cache_manager.h"

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

using testing::fail_at_each_allocation;

constexpr std::int64_t kBlockSize = 4;
constexpr std::int64_t kMaxModelLen = 64;

AttentionFormat format(std::int64_t block_size = kBlockSize) {
  return {.block_size = block_size,
          .num_kv_heads = 1,
          .head_size = 8,
          .head_size_v = 8,
          .dtype = "float32",
          .page_size_padded = {}};
}

KVCacheSpecPtr full(std::int64_t block_size = kBlockSize) {
  return std::make_shared<FullAttentionSpec>(format(block_size));
}
KVCacheSpecPtr window(std::int64_t size, std::int64_t num_extra_tokens = 0) {
  return std::make_shared<SlidingWindowSpec>(format(), size, num_extra_tokens);
}
KVCacheSpecPtr chunked(std::int64_t size) {
  return std::make_shared<ChunkedLocalAttentionSpec>(format(), size);
}

std::vector<BlockId> ids(std::initializer_list<std::int32_t> values) {
  return {values.begin(), values.end()};
}

GroupBlockCopy copy(std::int32_t group, std::int32_t src, std::int32_t dst) {
  return {GroupId(group), BlockId(src), BlockId(dst)};
}

using Copies = std::vector<GroupBlockCopy>;

// All that can be seen of a manager's pool and of two requests.
struct Snapshot {
  std::vector<BlockId> free_order;
  std::map<BlockId, std::int32_t> ref_counts;
  std::map<BlockHashWithGroupId, std::set<BlockId>> hash_map;
  std::vector<KVCacheBlocks> tables;
  std::vector<std::int64_t> num_computed_tokens;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

class ForkTest : public ::testing::Test {
 protected:
  void make(const std::vector<KVCacheSpecPtr>& specs, std::int64_t num_blocks = 64,
            KVCacheManagerOptions options = {}) {
    KVCacheConfig config;
    config.num_blocks = num_blocks;
    for (const KVCacheSpecPtr& spec : specs) config.kv_cache_groups.push_back({{"layer"}, spec});
    options.max_model_len = kMaxModelLen;
    options.scheduler_block_size = std::max(options.scheduler_block_size, kBlockSize);
    options.hash_block_size = kBlockSize;
    manager_ = std::make_unique<KVCacheManager>(config, options);
  }

  static std::unique_ptr<Request> request(std::string id, std::int64_t num_tokens,
                                          std::string salt = "") {
    RequestOptions options;
    options.request_id = std::move(id);
    options.keys.cache_salt = std::move(salt);
    options.prompt_token_ids.resize(static_cast<std::size_t>(num_tokens));
    std::iota(options.prompt_token_ids.begin(), options.prompt_token_ids.end(), 0);
    return std::make_unique<Request>(std::move(options),
                                     make_request_block_hasher(kBlockSize, make_none_hash()));
  }

  // Makes `request` compute all of its tokens.
  void run(Request& request, std::int64_t num_lookahead_tokens = 0) {
    AllocateSlotsArgs args;
    args.num_new_tokens = request.num_tokens() - request.progress.num_computed_tokens;
    args.num_lookahead_tokens = num_lookahead_tokens;
    ASSERT_TRUE(manager_->try_allocate_slots(request, args));
    request.progress.num_computed_tokens = request.num_tokens();
  }

  void decode(Request& request, std::int32_t token_id) {
    request.append_output_token_ids({&token_id, 1});
    run(request);
  }

  [[nodiscard]] std::vector<BlockId> blocks(const Request& request, std::size_t group = 0) const {
    const auto held = manager_->blocks(request, group);
    return {held.begin(), held.end()};
  }
  [[nodiscard]] std::int32_t num_holders(std::int32_t block) const {
    return manager_->block_pool().blocks()[static_cast<std::size_t>(block)].ref_cnt;
  }

  [[nodiscard]] Snapshot snapshot(const Request& parent, const Request& child) const {
    manager_->check_integrity();
    BlockPoolDump pool = manager_->block_pool().dump();
    return {std::move(pool.free_order),
            std::move(pool.ref_counts),
            std::move(pool.hash_map),
            {manager_->get_blocks(parent.request_id()), manager_->get_blocks(child.request_id())},
            {parent.progress.num_computed_tokens, child.progress.num_computed_tokens}};
  }

  void expect_refused(const Request& parent, Request& child) {
    const Snapshot before = snapshot(parent, child);
    EXPECT_THROW(static_cast<void>(manager_->fork(parent, child)), std::invalid_argument);
    EXPECT_EQ(snapshot(parent, child), before);
  }

  std::unique_ptr<KVCacheManager> manager_;
};

TEST_F(ForkTest, SharesFullBlocksAndCopiesThePartFilledOne) {
  make({full()});
  const auto parent = request("a", 10);
  const auto child = request("b", 10);
  run(*parent);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies({copy(0, 3, 4)}));
  EXPECT_EQ(blocks(*parent), ids({1, 2, 3}));
  EXPECT_EQ(blocks(*child), ids({1, 2, 4}));
  EXPECT_EQ(child->progress.num_computed_tokens, 10);
  EXPECT_EQ(num_holders(2), 2);
  EXPECT_EQ(num_holders(3), 1);
  EXPECT_EQ(num_holders(4), 1);
  manager_->check_integrity();
}

TEST_F(ForkTest, CopiesNothingWhereBlocksAreFull) {
  make({full()}, 3);
  const auto parent = request("a", 8);
  run(*parent);
  const auto child = request("b", 8);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies());  // though no block is free
  EXPECT_EQ(blocks(*child), ids({1, 2}));
}

TEST_F(ForkTest, EachGroupHasItsOwnCopyAndNullBlocksStayNull) {
  make({full(), window(6), chunked(8)});
  const auto parent = request("a", 9);
  run(*parent);
  decode(*parent, 7);  // gives back what has left the window and the chunk
  ASSERT_EQ(blocks(*parent, 1), ids({0, 5, 6}));
  ASSERT_EQ(blocks(*parent, 2), ids({0, 0, 9}));
  const auto child = request("b", 9);
  const std::int32_t token = 7;
  child->append_output_token_ids({&token, 1});
  const auto copies = manager_->fork(*parent, *child);
  ASSERT_TRUE(copies.has_value());
  EXPECT_EQ(copies->size(), 3U);
  for (std::size_t group = 0; group < 3; ++group) {
    EXPECT_EQ((*copies)[group].group_id.index(), group);
    EXPECT_EQ((*copies)[group].src, blocks(*parent, group).back());
    EXPECT_EQ((*copies)[group].dst, blocks(*child, group).back());
  }
  EXPECT_EQ(blocks(*child, 1)[0], kNullBlockId);
  EXPECT_EQ(blocks(*child, 1)[1], BlockId(5));
  EXPECT_EQ(manager_->coordinator().manager(2).num_skipped_blocks(manager_->find(*child)), 2);
  manager_->check_integrity();
  // Windows move on for each of them alone.
  for (std::int32_t i = 0; i < 8; ++i) decode(*child, 100 + i);
  EXPECT_EQ(blocks(*parent, 1)[1], BlockId(5));
  EXPECT_EQ(num_holders(5), 1);
  manager_->check_integrity();
  manager_->free(*parent);
  manager_->free(*child);
  EXPECT_EQ(manager_->usage(), 0.0);
}

TEST_F(ForkTest, TokensThatAWindowRetainsForDraftsAreShared) {
  make({window(4, 5)});
  const auto parent = request("a", 12);
  run(*parent);
  decode(*parent, 1);
  ASSERT_EQ(blocks(*parent), ids({0, 2, 3, 4}));  // 13 - 3 - 5 tokens are skipped
  const auto child = request("b", 12);
  const std::int32_t token = 1;
  child->append_output_token_ids({&token, 1});
  ASSERT_TRUE(manager_->fork(*parent, *child).has_value());
  EXPECT_EQ(blocks(*child), ids({0, 2, 3, 5}));
}

TEST_F(ForkTest, SlotsAfterTheComputedTokensStayTheParents) {
  make({full()});
  const auto parent = request("a", 6);
  run(*parent, 8);
  ASSERT_EQ(blocks(*parent), ids({1, 2, 3, 4}));
  const auto child = request("b", 6);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies({copy(0, 2, 5)}));
  EXPECT_EQ(blocks(*child), ids({1, 5}));
  EXPECT_EQ(num_holders(3), 1);
}

// An allocation caches what its step will have computed.
TEST_F(ForkTest, BlocksThatAreCachedButNotComputedAreTheChildsToCache) {
  make({full()});
  const auto parent = request("a", 10);
  run(*parent);
  parent->progress.num_computed_tokens = 6;
  const auto child = request("b", 10);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies({copy(0, 2, 4)}));
  run(*child);
  EXPECT_TRUE(manager_->block_pool().blocks()[4].is_hashed());
  manager_->check_integrity();
}

// With several drafting steps the last tokens of a chunk are computed again.
TEST_F(ForkTest, BlocksThatADraftModelWritesAgainAreCopied) {
  KVCacheManagerOptions options;
  options.use_eagle = true;
  options.num_prefill_lookahead = 3;
  make({full()}, 64, options);
  const auto parent = request("a", 9);
  run(*parent);
  const auto child = request("b", 9);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies({copy(0, 2, 4), copy(0, 3, 5)}));
  EXPECT_EQ(blocks(*child), ids({1, 4, 5}));
  EXPECT_TRUE(manager_->coordinator().tracks_cached_blocks(manager_->find(*child)));
  manager_->check_integrity();
}

TEST_F(ForkTest, EachGoesOnAloneAndIsCachedUnderItsOwnTokens) {
  KVCacheManagerOptions options;
  options.enable_kv_cache_events = true;
  make({full()}, 64, options);
  const auto parent = request("a", 6);
  const auto child = request("b", 6);
  run(*parent);
  static_cast<void>(manager_->take_events());
  ASSERT_TRUE(manager_->fork(*parent, *child).has_value());
  EXPECT_TRUE(manager_->take_events().empty());
  EXPECT_FALSE(manager_->block_pool().blocks()[3].is_hashed());
  for (const std::int32_t token : {11, 12}) decode(*parent, token);
  for (const std::int32_t token : {21, 22}) decode(*child, token);
  const auto& index = manager_->block_pool().cached_block_hash_to_block();
  EXPECT_EQ(index.get_one_block({parent->block_hashes()[1], GroupId(0)}), BlockId(2));
  EXPECT_EQ(index.get_one_block({child->block_hashes()[1], GroupId(0)}), BlockId(3));
  // The shared block was reported once, with the parent.
  const auto events = manager_->take_events();
  ASSERT_EQ(events.size(), 2U);
  EXPECT_EQ(std::get<BlockStored>(events[1]).parent_block_hash, parent->block_hashes()[0]);
  EXPECT_EQ(std::get<BlockStored>(events[1]).token_ids, (std::vector<std::int32_t>{4, 5, 21, 22}));
  manager_->check_integrity();
}

// The end of the prompt, inside the block, is a name too.
TEST_F(ForkTest, ACopyOfABlockWithTwoNamesHasNone) {
  KVCacheManagerOptions options;
  options.scheduler_block_size = 8;
  make({full(8), window(6)}, 64, options);
  const auto parent = request("a", 16);
  run(*parent);
  ASSERT_TRUE(manager_->block_pool().blocks()[2].has_secondary_keys);
  parent->progress.num_computed_tokens = 14;
  const auto child = request("b", 16);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies({copy(0, 2, 7), copy(1, 6, 8)}));
  EXPECT_FALSE(manager_->block_pool().blocks()[7].is_hashed());
  run(*child);
  EXPECT_TRUE(manager_->block_pool().blocks()[7].has_secondary_keys);
  manager_->check_integrity();
}

TEST_F(ForkTest, ThirtyChildrenFreedInAnyOrderLeaveNothing) {
  make({full(), window(6)}, 200);
  const auto parent = request("p", 23);
  run(*parent);
  std::vector<std::unique_ptr<Request>> children;
  for (std::int32_t i = 0; i < 30; ++i) {
    children.push_back(request(std::to_string(i), 23));
    // A child of a child shares with all of them.
    const Request& source = i < 15 ? *parent : *children[static_cast<std::size_t>(i - 15)];
    ASSERT_TRUE(manager_->fork(source, *children.back()).has_value());
  }
  for (std::int32_t i = 0; i < 30; ++i) decode(*children[static_cast<std::size_t>(i)], i);
  manager_->free(*parent);
  for (std::size_t i = 0; i < children.size(); ++i) {
    manager_->free(*children[i * 7 % children.size()]);
    manager_->check_integrity();
  }
  EXPECT_EQ(manager_->usage(), 0.0);
  EXPECT_TRUE(manager_->reset_prefix_cache());
}

TEST_F(ForkTest, TooFewFreeBlocksChangeNothing) {
  make({full(), window(6)}, 6);
  const auto parent = request("a", 6);
  const auto child = request("b", 6);
  run(*parent);  // takes 4 of 5 blocks; 2 are needed
  const Snapshot before = snapshot(*parent, *child);
  EXPECT_EQ(manager_->fork(*parent, *child), std::nullopt);
  EXPECT_EQ(snapshot(*parent, *child), before);
  EXPECT_FALSE(manager_->find(*child).valid());
}

TEST_F(ForkTest, BadArgumentsChangeNothing) {
  make({full()});
  const auto parent = request("a", 10);
  const auto child = request("b", 10);
  expect_refused(*parent, *child);  // the parent holds no blocks
  run(*parent);
  expect_refused(*parent, *parent);

  const auto holder = request("c", 10);
  run(*holder);
  expect_refused(*parent, *holder);
  const auto shorter = request("d", 9);
  expect_refused(*parent, *shorter);
  const auto salted = request("e", 10, "salt");
  expect_refused(*parent, *salted);
  const auto other = request("f", 9);
  const std::int32_t token = 100;
  other->append_output_token_ids({&token, 1});
  expect_refused(*parent, *other);

  for (const std::int64_t num_computed_tokens : {0, -1, 11}) {
    parent->progress.num_computed_tokens = num_computed_tokens;
    const auto longer = request("g", 20);
    expect_refused(*parent, *longer);
  }
}

TEST_F(ForkTest, AParentWithTooFewSlotsIsRefused) {
  make({full()});
  const auto parent = request("a", 10);
  AllocateSlotsArgs args;
  args.num_new_tokens = 4;
  ASSERT_TRUE(manager_->try_allocate_slots(*parent, args));
  parent->progress.num_computed_tokens = 10;
  const auto child = request("b", 10);
  expect_refused(*parent, *child);
}

TEST_F(ForkTest, TokensPastTheLongestSequenceHaveNoSlots) {
  make({full()});
  const auto parent = request("a", kMaxModelLen + 3);
  run(*parent);
  const auto child = request("b", kMaxModelLen + 3);
  EXPECT_EQ(manager_->fork(*parent, *child), Copies());
  EXPECT_EQ(std::ssize(blocks(*child)), kMaxModelLen / kBlockSize);
  EXPECT_EQ(child->progress.num_computed_tokens, kMaxModelLen + 3);
}

TEST_F(ForkTest, WithoutCachingNothingIsNamed) {
  KVCacheManagerOptions options;
  options.enable_caching = false;
  make({full(), window(6)}, 64, options);
  const auto parent = request("a", 9);
  const auto child = request("b", 9, "salt");  // means nothing without caching
  run(*parent);
  EXPECT_EQ(manager_->fork(*parent, *child)->size(), 2U);
  decode(*child, 5);
  EXPECT_FALSE(manager_->coordinator().tracks_cached_blocks(manager_->find(*child)));
  manager_->check_integrity();
}

TEST_F(ForkTest, RunningOutOfMemoryChangesNothing) {
  make({full(), window(6), chunked(8)});
  const auto parent = request("a", 10);
  const auto child = request("an id that is too long to be kept without an allocation", 10);
  run(*parent);
  const Snapshot before = snapshot(*parent, *child);
  const auto fork = [&] { ASSERT_TRUE(manager_->fork(*parent, *child).has_value()); };
  EXPECT_GT(fail_at_each_allocation(fork, [&] { EXPECT_EQ(snapshot(*parent, *child), before); }),
            4);
  EXPECT_EQ(blocks(*child, 0).size(), 3U);
  manager_->check_integrity();
}

}  // namespace
}  // namespace paged_kv
