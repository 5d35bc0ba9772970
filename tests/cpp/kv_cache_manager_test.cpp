// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_manager.h"

#include "paged_kv/check.h"

#include <numeric>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

constexpr std::int64_t kBlockSize = 16;

AttentionFormat format(std::int64_t block_size = kBlockSize) {
  return {.block_size = block_size,
          .num_kv_heads = 1,
          .head_size = 8,
          .head_size_v = 8,
          .dtype = "float32",
          .page_size_padded = {}};
}

KVCacheConfig make_config(const std::vector<KVCacheSpecPtr>& specs, std::int64_t num_blocks) {
  KVCacheConfig config;
  config.num_blocks = num_blocks;
  for (const KVCacheSpecPtr& spec : specs) config.kv_cache_groups.push_back({{"layer"}, spec});
  return config;
}

std::unique_ptr<KVCacheManager> make_manager(const std::vector<KVCacheSpecPtr>& specs,
                                             std::int64_t num_blocks = 64) {
  return std::make_unique<KVCacheManager>(make_config(specs, num_blocks),
                                          KVCacheManagerOptions{.max_model_len = 4096,
                                                                .scheduler_block_size = kBlockSize,
                                                                .hash_block_size = kBlockSize,
                                                                .max_in_flight_tokens = {},
                                                                .metrics_collector = {}});
}

std::unique_ptr<Request> make_request(std::string id, int num_tokens) {
  RequestOptions options;
  options.request_id = std::move(id);
  options.prompt_token_ids.resize(static_cast<std::size_t>(num_tokens));
  std::iota(options.prompt_token_ids.begin(), options.prompt_token_ids.end(), 0);
  return std::make_unique<Request>(std::move(options),
                                   make_request_block_hasher(kBlockSize, make_none_hash()));
}

AllocateSlotsArgs tokens(std::int64_t num_new_tokens) {
  AllocateSlotsArgs args;
  args.num_new_tokens = num_new_tokens;
  return args;
}

std::vector<BlockId> ids(std::initializer_list<std::int32_t> values) {
  return {values.begin(), values.end()};
}

TEST(KVCacheManager, ReusesAPrefix) {
  const auto manager = make_manager({std::make_shared<FullAttentionSpec>(format())});
  const auto a = make_request("a", 48);
  EXPECT_EQ(manager->allocate_slots(*a, tokens(48))->block_ids[0], ids({1, 2, 3}));
  const auto b = make_request("b", 48);
  const ComputedBlocks hit = manager->get_computed_blocks(*b);
  EXPECT_EQ(hit.num_tokens, 32);
  AllocateSlotsArgs args = tokens(16);
  args.num_new_computed_tokens = hit.num_tokens;
  args.new_computed_blocks = &hit.blocks;
  EXPECT_EQ(manager->allocate_slots(*b, args)->block_ids[0], ids({4}));
  EXPECT_EQ(manager->get_blocks("b").block_ids[0], ids({1, 2, 4}));
  manager->check_integrity();
}

TEST(KVCacheManager, TheLastBlocksAreTheNewOnes) {
  const auto manager = make_manager({std::make_shared<FullAttentionSpec>(format()),
                                     std::make_shared<SlidingWindowSpec>(format(), 32)});
  const auto request = make_request("a", 40);
  ASSERT_TRUE(manager->try_allocate_slots(*request, tokens(40)));
  EXPECT_EQ(manager->num_new_blocks()[0], 3);
  EXPECT_EQ(manager->num_new_blocks()[1], 3);
  request->progress.num_computed_tokens = 40;
  ASSERT_TRUE(manager->try_allocate_slots(*request, tokens(1)));
  EXPECT_EQ(manager->num_new_blocks()[0], 0);
  EXPECT_EQ(manager->blocks(*request, 1).size(), 3U);
}

TEST(KVCacheManager, CheckIntegrityFindsABlockWithTooFewHolders) {
  const auto manager = make_manager({std::make_shared<FullAttentionSpec>(format())});
  const auto a = make_request("a", 16);
  static_cast<void>(manager->allocate_slots(*a, tokens(16)));
  const auto stolen = ids({1});
  manager->block_pool().free_blocks(stolen);
  EXPECT_THROW(manager->check_integrity(), InvariantError);
}

TEST(KVCacheManager, CheckIntegrityFindsABlockInTwoTables) {
  const auto manager = make_manager({std::make_shared<FullAttentionSpec>(format())}, 2);
  const auto a = make_request("a", 16);
  const auto b = make_request("b", 17);
  static_cast<void>(manager->allocate_slots(*a, tokens(16)));
  const auto stolen = ids({1});
  manager->block_pool().free_blocks(stolen);
  static_cast<void>(manager->allocate_slots(*b, tokens(1)));
  EXPECT_THROW(manager->check_integrity(), InvariantError);
}

TEST(KVCacheManager, CheckIntegrityFindsABlockAtTwoPlaces) {
  const auto manager = make_manager({std::make_shared<FullAttentionSpec>(format())});
  const auto a = make_request("a", 32);
  const auto b = make_request("b", 48);
  static_cast<void>(manager->allocate_slots(*a, tokens(32)));
  const KVCacheBlocks moved{{ids({2})}};  // not what a lookup finds
  AllocateSlotsArgs args = tokens(1);
  args.new_computed_blocks = &moved;
  args.num_new_computed_tokens = kBlockSize;
  args.delay_cache_blocks = true;
  static_cast<void>(manager->allocate_slots(*b, args));
  EXPECT_THROW(manager->check_integrity(), InvariantError);
}

TEST(KVCacheManager, ThePartOfAPromptIsNamedWhereHashesAreFinerThanBlocks) {
  KVCacheConfig config = make_config({std::make_shared<FullAttentionSpec>(format(32)),
                                      std::make_shared<SlidingWindowSpec>(format(16), 32)},
                                     64);
  KVCacheManager manager(config, {.max_model_len = 4096,
                                  .scheduler_block_size = 32,
                                  .hash_block_size = 16,
                                  .max_in_flight_tokens = {},
                                  .metrics_collector = {}});
  const auto request = make_request("a", 64);
  static_cast<void>(manager.allocate_slots(*request, tokens(64)));
  const BlockHashWithGroupId part{request->block_hashes()[2], GroupId(0)};
  const BlockHashWithGroupId whole{request->block_hashes()[3], GroupId(0)};
  const auto& index = manager.block_pool().cached_block_hash_to_block();
  ASSERT_TRUE(index.get_one_block(part).has_value());
  EXPECT_EQ(index.get_one_block(part), index.get_one_block(whole));
  manager.check_integrity();
  // Both names leave together.
  const auto evicted = *index.get_one_block(part);
  manager.evict_blocks({&evicted, 1});
  EXPECT_FALSE(index.get_one_block(part).has_value());
  EXPECT_FALSE(index.get_one_block(whole).has_value());
  manager.check_integrity();
}

TEST(KVCacheManager, AThousandRequestsLeaveNothing) {
  const auto manager = make_manager({std::make_shared<FullAttentionSpec>(format()),
                                     std::make_shared<ChunkedLocalAttentionSpec>(format(), 32)},
                                    32);
  for (int i = 0; i < 1000; ++i) {
    const auto request = make_request(std::to_string(i), 20 + i % 60);
    const ComputedBlocks hit = manager->get_computed_blocks(*request);
    AllocateSlotsArgs args = tokens(request->num_tokens() - hit.num_tokens);
    args.num_new_computed_tokens = hit.num_tokens;
    args.new_computed_blocks = &hit.blocks;
    ASSERT_TRUE(manager->try_allocate_slots(*request, args));
    manager->check_integrity();
    manager->free(*request);
  }
  EXPECT_EQ(manager->usage(), 0.0);
}

TEST(KVCacheManager, EventsComeInOrderAndOnce) {
  KVCacheManagerOptions options{.max_model_len = 64,
                                .scheduler_block_size = kBlockSize,
                                .hash_block_size = kBlockSize,
                                .max_in_flight_tokens = {},
                                .metrics_collector = {}};
  options.enable_kv_cache_events = true;
  KVCacheManager manager(make_config({std::make_shared<FullAttentionSpec>(format())}, 2), options);
  const auto a = make_request("a", 16);
  static_cast<void>(manager.allocate_slots(*a, tokens(16)));
  manager.free(*a);
  ASSERT_TRUE(manager.reset_prefix_cache());
  const auto events = manager.take_events();
  ASSERT_EQ(events.size(), 2U);
  const auto& stored = std::get<BlockStored>(events[0]);
  EXPECT_EQ(stored.block_hashes.size(), 1U);
  EXPECT_EQ(stored.token_ids.size(), 16U);
  EXPECT_EQ(stored.kv_cache_spec_kind, "full_attention");
  EXPECT_TRUE(std::holds_alternative<AllBlocksCleared>(events[1]));
  EXPECT_TRUE(manager.take_events().empty());
}

}  // namespace
}  // namespace paged_kv
