// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/request_batch.h"

#include "paged_kv/check.h"

#include <array>
#include <memory>
#include <numeric>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

constexpr std::int64_t kBlockSize = 16;
constexpr std::int64_t kNumRows = 8;

AttentionFormat format() {
  return {.block_size = kBlockSize,
          .num_kv_heads = 1,
          .head_size = 8,
          .head_size_v = 8,
          .dtype = "float32",
          .page_size_padded = {}};
}

// One group of full and one of sliding-window attention.
class RequestBatchTest : public testing::Test {
 protected:
  RequestBatchTest() {
    KVCacheConfig config;
    config.num_blocks = 64;
    config.kv_cache_groups.push_back({{"full"}, std::make_shared<FullAttentionSpec>(format())});
    config.kv_cache_groups.push_back(
        {{"window"}, std::make_shared<SlidingWindowSpec>(format(), 20)});
    manager_ = std::make_unique<KVCacheManager>(
        config, KVCacheManagerOptions{.max_model_len = 256,
                                      .scheduler_block_size = kBlockSize,
                                      .hash_block_size = kBlockSize,
                                      .max_in_flight_tokens = {},
                                      .metrics_collector = {}});
    const BlockTableOptions options{.block_size = kBlockSize,
                                    .max_num_reqs = kNumRows,
                                    .max_num_blocks_per_req = 16,
                                    .max_num_batched_tokens = 1,
                                    .kernel_block_size = kBlockSize};
    for (auto& table : tables_) table = std::make_unique<BlockTable>(options);
    batch_ =
        std::make_unique<RequestBatch>(*manager_, std::vector{tables_[0].get(), tables_[1].get()});
  }

  Request& add_request(std::string id, std::int64_t row_idx) {
    RequestOptions options;
    options.request_id = std::move(id);
    options.prompt_token_ids.resize(static_cast<std::size_t>(kBlockSize));
    requests_.push_back(std::make_unique<Request>(
        std::move(options), make_request_block_hasher(kBlockSize, make_none_hash())));
    batch_->add(*requests_.back(), row_idx);
    return *requests_.back();
  }

  std::unique_ptr<KVCacheManager> manager_;
  std::array<std::unique_ptr<BlockTable>, 2> tables_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::unique_ptr<RequestBatch> batch_;
};

TEST_F(RequestBatchTest, DecodesUntilThePoolIsEmptyAndGivesAllBack) {
  std::array<std::int32_t, kNumRows> rows;
  std::iota(rows.begin(), rows.end(), 0);
  for (const std::int32_t row : rows) add_request(std::to_string(row), row);
  std::array<std::int32_t, kNumRows> num_new_tokens;
  num_new_tokens.fill(kBlockSize);
  std::vector<std::int32_t> refused;
  batch_->allocate_slots(rows, num_new_tokens, {}, refused);
  num_new_tokens.fill(1);
  while (refused.empty()) {
    batch_->append_output_token_ids(rows, num_new_tokens);
    batch_->allocate_slots(rows, num_new_tokens, {}, refused);
    batch_->check_integrity();
  }
  manager_->check_integrity();
  EXPECT_GT(requests_[0]->progress.num_computed_tokens, 3 * kBlockSize);
  batch_->free(rows);
  batch_->check_integrity();
  EXPECT_EQ(manager_->usage(), 0.0);
  EXPECT_EQ(batch_->num_reqs(), 0);
}

// Whether the child was in the batch before it was forked, or comes then.
TEST_F(RequestBatchTest, WritesTheRowsOfForkedRequests) {
  Request& parent = add_request("a", 0);
  std::vector<std::int32_t> refused;
  batch_->allocate_slots(std::vector{0}, std::vector{14}, {}, refused);
  Request& child = add_request("b", 1);
  ASSERT_TRUE(manager_->fork(parent, child).has_value());
  Request& late_child = add_request("c", 2);
  batch_->remove(2);
  ASSERT_TRUE(manager_->fork(parent, late_child).has_value());
  batch_->add(late_child, 3);
  const auto row = tables_[0]->table().subspan(static_cast<std::size_t>(3 * tables_[0]->width()));
  EXPECT_EQ(row[0], manager_->blocks(late_child, 0)[0].value());
  const std::vector rows{0, 1, 3};
  batch_->allocate_slots(rows, std::vector{2, 2, 2}, {}, refused);
  for (std::int32_t step = 0; step < 40; ++step) {
    batch_->append_output_token_ids(rows, std::vector{step, 100 + step, 200 + step});
    batch_->allocate_slots(rows, std::vector{1, 1, 1}, {}, refused);
    ASSERT_TRUE(refused.empty());
    batch_->check_integrity();
    manager_->check_integrity();
  }
  EXPECT_EQ(tables_[0]->num_blocks_per_row()[1], 4);
  batch_->free(rows);
  EXPECT_EQ(manager_->usage(), 0.0);
}

TEST_F(RequestBatchTest, CheckIntegrityFindsRowsThatOthersWrote) {
  add_request("a", 3);
  const std::array rows{3};
  std::vector<std::int32_t> refused;
  batch_->allocate_slots(rows, std::array{static_cast<std::int32_t>(kBlockSize)}, {}, refused);
  batch_->check_integrity();
  const auto entry = static_cast<std::size_t>(3 * tables_[1]->width());
  ++tables_[1]->table()[entry];
  EXPECT_THROW(batch_->check_integrity(), InvariantError);
  --tables_[1]->table()[entry];
  tables_[1]->clear_row(3);
  EXPECT_THROW(batch_->check_integrity(), InvariantError);
}

}  // namespace
}  // namespace paged_kv
