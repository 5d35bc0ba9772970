// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/no_hit_report.h"

#include "paged_kv/kv_cache_manager.h"

#include <numeric>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

constexpr std::int64_t kBlockSize = 16;

KVCacheManager make_manager() {
  const AttentionFormat format{.block_size = kBlockSize,
                               .num_kv_heads = 1,
                               .head_size = 8,
                               .head_size_v = 8,
                               .dtype = "float32",
                               .page_size_padded = {}};
  KVCacheConfig config;
  config.num_blocks = 16;
  config.kv_cache_groups.push_back({{"layer"}, std::make_shared<FullAttentionSpec>(format)});
  return KVCacheManager(config, {.max_model_len = 4096,
                                 .scheduler_block_size = kBlockSize,
                                 .hash_block_size = kBlockSize,
                                 .max_in_flight_tokens = {},
                                 .metrics_collector = {}});
}

std::unique_ptr<Request> make_request(int num_tokens, RequestKeys keys = {}) {
  RequestOptions options;
  options.request_id = "r";
  options.prompt_token_ids.resize(static_cast<std::size_t>(num_tokens));
  std::iota(options.prompt_token_ids.begin(), options.prompt_token_ids.end(), 0);
  options.keys = std::move(keys);
  return std::make_unique<Request>(std::move(options),
                                   make_request_block_hasher(kBlockSize, make_none_hash()));
}

void compute(KVCacheManager& manager, const Request& request) {
  AllocateSlotsArgs args;
  args.num_new_tokens = request.num_tokens();
  ASSERT_TRUE(manager.try_allocate_slots(request, args));
  manager.free(request);
}

TEST(NoHitReport, NamesTheFirstMissingBlock) {
  KVCacheManager manager = make_manager();
  compute(manager, *make_request(40));
  const NoHitReport report = manager.why_no_hit(*make_request(70));
  EXPECT_EQ(report.reason, NoHitReason::kNotCached);
  EXPECT_EQ(report.num_hit_tokens, 32);
  EXPECT_EQ(report.block_idx, 2);
  EXPECT_EQ(report.kv_cache_group_id, GroupId(0));
  EXPECT_EQ(report.start_token, 32);
  EXPECT_EQ(report.end_token, 48);
  EXPECT_EQ(report.message(),
            "32 of 70 tokens are cached. Block 2 of group 0, tokens [32, 48): no block with this "
            "content and these keys is cached: it was never computed, or it has been evicted.");
}

TEST(NoHitReport, EmbeddingsAreTriedToo) {
  KVCacheManager manager = make_manager();
  compute(manager, *make_request(40));
  const std::vector<std::uint8_t> rows(40);
  RequestKeys keys;
  keys.prompt_embeds = PromptEmbeds{.rows = rows, .bytes_per_token = 1};
  EXPECT_EQ(manager.why_no_hit(*make_request(40, keys)).reason, NoHitReason::kOnlyWithoutEmbeds);
  keys.cache_salt = "salt";
  EXPECT_EQ(manager.why_no_hit(*make_request(40, keys)).reason, NoHitReason::kOnlyWithoutExtraKeys);
}

}  // namespace
}  // namespace paged_kv
