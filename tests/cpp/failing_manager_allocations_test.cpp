// SPDX-License-Identifier: Apache-2.0
//
// Calls of KVCacheManager and RequestBatch that run out of memory change nothing of any request,
// whichever of their allocations fails.
#include "failing_allocations.h"
#include "paged_kv/request_batch.h"

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

using testing::fail_at_each_allocation;
using testing::FailingAllocation;

constexpr std::int64_t kBlockSize = 4;
constexpr std::int64_t kMaxModelLen = 512;
constexpr int kManyAllocations = 200;

AttentionFormat format() {
  return {.block_size = kBlockSize,
          .num_kv_heads = 1,
          .head_size = 8,
          .head_size_v = 8,
          .dtype = "float32",
          .page_size_padded = {}};
}

struct RequestState {
  std::int64_t num_tokens;
  std::size_t num_block_hashes;
  std::int64_t num_computed_tokens;
  std::vector<std::vector<BlockId>> blocks;
  friend bool operator==(const RequestState&, const RequestState&) = default;
};

// All that can be seen of a manager, its requests and their rows.
struct Snapshot {
  std::vector<BlockId> free_order;
  std::map<BlockId, std::int32_t> ref_counts;
  std::map<BlockHashWithGroupId, std::set<BlockId>> hash_map;
  std::vector<RequestState> requests;
  std::vector<std::vector<std::int32_t>> rows;
  std::int64_t num_reqs;
  friend bool operator==(const Snapshot&, const Snapshot&) = default;
};

// A manager with a group of full and one of sliding-window attention, and a batch over it.
class Engine {
 public:
  explicit Engine(bool enable_events = false) {
    KVCacheConfig config;
    config.num_blocks = 128;
    config.kv_cache_groups.push_back({{"full"}, std::make_shared<FullAttentionSpec>(format())});
    config.kv_cache_groups.push_back(
        {{"window"}, std::make_shared<SlidingWindowSpec>(format(), 6)});
    config.prefix_cache_retention_interval = 4 * kBlockSize;
    manager_ = std::make_unique<KVCacheManager>(
        config,
        KVCacheManagerOptions{.max_model_len = kMaxModelLen,
                              .scheduler_block_size = kBlockSize,
                              .hash_block_size = kBlockSize,
                              .max_in_flight_tokens = {},
                              .enable_kv_cache_events = enable_events,
                              .metrics_collector = std::make_shared<KVCacheMetricsCollector>(1.0),
                              .num_remembered_evictions = 8});
    for (auto& table : tables_) {
      table = std::make_unique<BlockTable>(
          BlockTableOptions{.block_size = kBlockSize,
                            .max_num_reqs = 4,
                            .max_num_blocks_per_req = kMaxModelLen / kBlockSize,
                            .max_num_batched_tokens = 1,
                            .kernel_block_size = kBlockSize});
    }
    batch_ =
        std::make_unique<RequestBatch>(*manager_, std::vector{tables_[0].get(), tables_[1].get()});
  }

  // Its tokens are the first of a sequence that all requests have in common.
  Request& make_request(std::string id, int num_tokens) {
    RequestOptions options;
    options.request_id = std::move(id);
    for (int i = 0; i < num_tokens; ++i) options.prompt_token_ids.push_back(i);
    requests_.push_back(std::make_unique<Request>(
        std::move(options), make_request_block_hasher(kBlockSize, make_none_hash())));
    return *requests_.back();
  }
  // Of which all tokens have slots.
  Request& make_running_request(std::string id, int num_tokens) {
    Request& request = make_request(std::move(id), num_tokens);
    EXPECT_TRUE(manager_->try_allocate_slots(request, {.num_new_tokens = num_tokens}));
    request.progress.num_computed_tokens = num_tokens;
    return request;
  }

  KVCacheManager& manager() { return *manager_; }
  RequestBatch& batch() { return *batch_; }

  Snapshot snapshot() {
    manager_->check_integrity();
    batch_->check_integrity();
    Snapshot result;
    BlockPoolDump dump = manager_->block_pool().dump();
    result.free_order = std::move(dump.free_order);
    result.ref_counts = std::move(dump.ref_counts);
    result.hash_map = std::move(dump.hash_map);
    for (const auto& request : requests_) {
      result.requests.push_back({request->num_tokens(), request->block_hashes().size(),
                                 request->progress.num_computed_tokens,
                                 manager_->get_blocks(request->request_id()).block_ids});
    }
    for (const auto& table : tables_) {
      for (std::size_t row = 0; row < 4; ++row) {
        const auto num_blocks = static_cast<std::size_t>(table->num_blocks_per_row()[row]);
        const auto entries =
            table->table().subspan(row * static_cast<std::size_t>(table->width()), num_blocks);
        result.rows.emplace_back(entries.begin(), entries.end());
      }
    }
    result.num_reqs = batch_->num_reqs();
    return result;
  }

  // Returns how many allocations of `call` failed before it succeeded.
  template <class Call>
  int expect_unchanged_by_failures(Call call) {
    const Snapshot before = snapshot();
    return fail_at_each_allocation(call, [&] { EXPECT_EQ(snapshot(), before); });
  }

 private:
  std::unique_ptr<KVCacheManager> manager_;
  std::array<std::unique_ptr<BlockTable>, 2> tables_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::unique_ptr<RequestBatch> batch_;
};

TEST(FailingManagerAllocation, AllocateSlotsOfAPromptChangesNothing) {
  Engine engine;
  const Request& request = engine.make_request("a", 50);
  std::optional<KVCacheBlocks> taken;
  EXPECT_GT(engine.expect_unchanged_by_failures(
                [&] { taken = engine.manager().allocate_slots(request, {.num_new_tokens = 50}); }),
            4);
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->block_ids[0].size(), 13U);
  EXPECT_NE(engine.snapshot().hash_map.size(), 0U);
}

TEST(FailingManagerAllocation, AdoptingAHitChangesNothing) {
  Engine engine;
  engine.make_running_request("a", 50);
  const Request& request = engine.make_request("b", 90);
  const ComputedBlocks hit = engine.manager().get_computed_blocks(request);
  ASSERT_GT(hit.num_tokens, 0);
  EXPECT_GT(engine.expect_unchanged_by_failures([&] {
    std::ignore =
        engine.manager().allocate_slots(request, {.num_new_tokens = 90 - hit.num_tokens,
                                                  .num_new_computed_tokens = hit.num_tokens,
                                                  .new_computed_blocks = &hit.blocks});
  }),
            4);
  EXPECT_EQ(engine.snapshot().requests[1].blocks[0].size(), 23U);
}

TEST(FailingManagerAllocation, ARefusedRequestIsForgotten) {
  Engine engine;
  const Request& request = engine.make_request("a", 50);
  EXPECT_FALSE(
      engine.manager().allocate_slots(request, {.num_new_tokens = 50, .reserved_blocks = 120}));
  EXPECT_FALSE(engine.manager().find(request).valid());
  EXPECT_FALSE(engine.manager().allocate_slots(
      request, {.num_new_tokens = 50, .full_sequence_must_fit = true, .reserved_blocks = 120}));
  EXPECT_FALSE(engine.manager().find(request).valid());
}

TEST(FailingManagerAllocation, AFailedForkForgetsTheChild) {
  Engine engine;
  const Request& parent = engine.make_running_request("a", 50);
  Request& child = engine.make_request("b", 50);
  const Snapshot before = engine.snapshot();
  std::optional<std::vector<GroupBlockCopy>> copies;
  const int num_failures =
      fail_at_each_allocation([&] { copies = engine.manager().fork(parent, child); },
                              [&] {
                                EXPECT_EQ(engine.snapshot(), before);
                                EXPECT_FALSE(engine.manager().find(child).valid());
                              });
  EXPECT_GT(num_failures, 4);
  ASSERT_TRUE(copies);
  EXPECT_EQ(copies->size(), 2U);
  EXPECT_EQ(engine.snapshot().ref_counts.size(), before.ref_counts.size() + 2);
}

TEST(FailingManagerAllocation, CachingCanBeRepeated) {
  Engine engine;
  const Request& request = engine.make_request("a", 50);
  ASSERT_TRUE(engine.manager().try_allocate_slots(
      request, {.num_new_tokens = 50, .delay_cache_blocks = true}));
  fail_at_each_allocation([&] { engine.manager().cache_blocks(request, 50); },
                          [&] { std::ignore = engine.snapshot(); });
  Engine other;
  other.make_running_request("a", 50);
  EXPECT_EQ(engine.snapshot().hash_map, other.snapshot().hash_map);
}

TEST(FailingManagerAllocation, GivingBackNeedsNoMemory) {
  Engine engine;
  const Request& a = engine.make_running_request("a", 50);
  Request& b = engine.make_running_request("b", 30);
  Request& c = engine.make_running_request("c", 30);
  Request& d = engine.make_request("d", 30);
  engine.batch().add(b, 0);
  engine.batch().add(c, 1);
  engine.batch().add(d, 2);
  const std::vector<std::int32_t> rows{0};
  const auto give_back = [&] {
    engine.manager().remove_skipped_blocks("a", 40);
    engine.manager().free(a);
    engine.batch().free(rows);
    engine.batch().remove(1);
    engine.batch().remove(2);
    engine.manager().free(c);
  };
  EXPECT_EQ(engine.expect_unchanged_by_failures(give_back), 0);
  EXPECT_EQ(engine.manager().block_pool().get_num_free_blocks(), 127);
}

TEST(FailingManagerAllocation, PoppingBlocksChangesNothing) {
  Engine engine;
  const Request& request = engine.make_running_request("a", 50);
  std::vector<BlockId> blocks;
  EXPECT_GT(engine.expect_unchanged_by_failures(
                [&] { blocks = engine.manager().pop_blocks_for_free(request); }),
            0);
  EXPECT_EQ(blocks.size(), 26U);
}

TEST(FailingManagerAllocation, AddingToABatchChangesNothing) {
  Engine engine;
  Request& request = engine.make_running_request("a", 50);
  EXPECT_GT(engine.expect_unchanged_by_failures([&] { engine.batch().add(request, 0); }), 0);
  EXPECT_EQ(engine.snapshot().rows[0].size(), 13U);
}

// Three requests that need longer tables, one of them its first blocks.
TEST(FailingManagerAllocation, ABatchOfSlotsChangesNothing) {
  Engine engine;
  const std::vector<std::int32_t> rows{0, 1, 2};
  engine.batch().add(engine.make_running_request("a", 40), 0);
  engine.batch().add(engine.make_request("b", 30), 1);
  engine.batch().add(engine.make_running_request("c", 40), 2);
  std::vector<std::int32_t> refused;
  EXPECT_GT(engine.expect_unchanged_by_failures([&] {
    engine.batch().allocate_slots(rows, std::vector<std::int32_t>{60, 30, 60}, {}, refused);
  }),
            4);
  EXPECT_TRUE(refused.empty());
  const Snapshot after = engine.snapshot();
  EXPECT_EQ(after.requests[0].num_computed_tokens, 100);
  EXPECT_EQ(after.rows[1].size(), 8U);
}

TEST(FailingManagerAllocation, ABatchOfTokensChangesNothing) {
  Engine engine;
  const std::vector<std::int32_t> rows{0, 1, 2};
  engine.batch().add(engine.make_request("a", 3), 0);
  engine.batch().add(engine.make_request("b", 7), 1);
  engine.batch().add(engine.make_request("c", 11), 2);
  EXPECT_GT(engine.expect_unchanged_by_failures([&] {
    engine.batch().append_output_token_ids(rows, std::vector<std::int32_t>{1, 2, 3});
  }),
            4);
  const Snapshot after = engine.snapshot();
  EXPECT_EQ(after.requests[2].num_tokens, 12);
  EXPECT_EQ(after.requests[2].num_block_hashes, 3U);
}

// What changes the cache does not fail for an event; who follows the events forgets all then.
TEST(FailingManagerAllocation, LostEventsAreToldAsAClearedCache) {
  int num_cleared = 0;
  for (int num_allowed = 0; num_allowed < kManyAllocations; ++num_allowed) {
    Engine engine(/*enable_events=*/true);
    const Request& request = engine.make_request("a", 50);
    const Snapshot before = engine.snapshot();
    bool is_allocated = false;
    try {
      const FailingAllocation failing(num_allowed);
      is_allocated = engine.manager().try_allocate_slots(request, {.num_new_tokens = 50});
    } catch (const std::bad_alloc&) {
    }
    const Snapshot after = engine.snapshot();
    const std::vector<KVCacheEvent> events = engine.manager().take_events();
    if (!is_allocated) {
      EXPECT_EQ(after, before);
      EXPECT_TRUE(events.empty());
      continue;
    }
    std::size_t num_stored = 0;
    for (const KVCacheEvent& event : events) {
      if (const auto* stored = std::get_if<BlockStored>(&event)) {
        num_stored += stored->block_hashes.size();
      }
    }
    const bool is_cleared =
        !events.empty() && std::holds_alternative<AllBlocksCleared>(events.front());
    EXPECT_TRUE(is_cleared || num_stored == after.hash_map.size());
    EXPECT_LE(num_stored, after.hash_map.size());
    if (is_cleared) ++num_cleared;
  }
  EXPECT_GT(num_cleared, 4);
}

TEST(FailingManagerAllocation, ASecondKeyOfABlockChangesNothing) {
  BlockPool pool(8, /*enable_caching=*/true, /*hash_block_size=*/2);
  RequestOptions options;
  options.prompt_token_ids = {1, 2, 3, 4, 5, 6, 7, 8};
  const Request request(std::move(options), make_request_block_hasher(2, make_none_hash()));
  const std::vector<BlockId> blocks = pool.get_new_blocks(2);
  pool.cache_full_blocks(request.block_hashes(), blocks, 0, 2, 4, GroupId(0));
  const auto cache_parts = [&](std::int64_t num_tokens) {
    const auto before = pool.dump().hash_map;
    return fail_at_each_allocation(
        [&] {
          EXPECT_TRUE(
              pool.cache_partial_block(request.block_hashes(), blocks[1], num_tokens, GroupId(1)));
        },
        [&] {
          pool.check_integrity();
          EXPECT_EQ(pool.dump().hash_map, before);
        });
  };
  EXPECT_GT(cache_parts(2), 1);
  EXPECT_GT(cache_parts(6), 0);
  EXPECT_EQ(pool.dump().hash_map.size(), 4U);
  pool.evict_blocks(blocks);
  pool.check_integrity();
  EXPECT_TRUE(pool.dump().hash_map.empty());
}

}  // namespace
}  // namespace paged_kv
