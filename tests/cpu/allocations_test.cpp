// SPDX-License-Identifier: Apache-2.0
//
// Kernels of a decode step keep their scratch memory: a call like one before allocates nothing.
#include "../cpp/failing_allocations.h"
#include "ops/cpu/attention_batch.h"
#include "ops/cpu/float16.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/linear.h"
#include "ops/cpu/paged_attention.h"
#include "ops/cpu/scratch.h"
#include "random_cache.h"

#include <cstdint>
#include <new>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using paged_kv::testing::FailingAllocation;
using testing::index;
using testing::Layout;

// Says that it has four threads, so that a kernel makes work for them, but is the calling thread.
constexpr ThreadRunner kFourInTurnRunner{
    .run = kSerialRunner.run,
    .num_threads = [] { return std::int64_t{4}; },
};

template <class Call>
void expect_no_allocation_the_second_time(const Call& call) {
  call();
  const FailingAllocation any_fails(0);
  EXPECT_NO_THROW(call());
}

// Two sequences with one query each, the first of several partitions.
class Decode {
 public:
  explicit Decode(ElementType cache_type)
      : key_(testing::make_side(Layout::kPacked, true, cache_type, kSizes)),
        value_(testing::make_side(Layout::kPacked, false, cache_type, kSizes)) {
    for (std::int32_t i = 0; i < 2 * kMaxBlocks; ++i) tables_.push_back(i);
  }

  void run_partitioned(const ThreadRunner& runner) {
    const PartitionBuffers<BFloat16> buffers{
        .exp_sums = exp_sums_.data(),
        .max_logits = max_logits_.data(),
        .tmp_out = tmp_out_.data(),
        .exp_sums_seq_stride = kHeads * kPartitions,
        .exp_sums_head_stride = kPartitions,
        .exp_sums_partition_stride = 1,
        .max_logits_seq_stride = kHeads * kPartitions,
        .max_logits_head_stride = kPartitions,
        .max_logits_partition_stride = 1,
        .tmp_out_seq_stride = kHeads * kPartitions * kHeadSize,
        .tmp_out_head_stride = kPartitions * kHeadSize,
        .tmp_out_partition_stride = kHeadSize,
    };
    paged_attention_partitioned(params(), buffers, runner);
  }
  void run(const ThreadRunner& runner) { paged_attention(params(), runner); }

 private:
  static constexpr std::int64_t kHeads = 4, kHeadSize = 32, kMaxBlocks = 130, kPartitions = 5;
  static constexpr testing::Sizes kSizes{
      .num_blocks = 2 * kMaxBlocks, .block_size = 16, .num_kv_heads = 2, .head_size = kHeadSize};

  PagedAttentionParams params() {
    PagedAttentionParams p{};
    p.kernels = &attention_kernels();
    p.batch = {.query_start_loc = {},
               .seq_lens = {lens_.data(), 2, 1},
               .block_tables = {tables_.data(), 2, kMaxBlocks, kMaxBlocks, 1},
               .num_tokens = 2,
               .num_blocks = kSizes.num_blocks,
               .block_size = kSizes.block_size,
               .max_query_len = -1,
               .max_seq_len = -1};
    p.mask = {.causal = true, .sliding_window = 0};
    p.cache_type = key_.type;
    p.key = key_.view;
    p.value = value_.view;
    p.query_type = ElementType::kBFloat16;
    p.query = query_.data();
    p.out = out_.data();
    p.query_token_stride = p.out_token_stride = kHeads * kHeadSize;
    p.query_head_stride = p.out_head_stride = kHeadSize;
    p.num_heads = kHeads;
    p.num_kv_heads = kSizes.num_kv_heads;
    p.head_size = kHeadSize;
    p.scale = 1.0f;
    p.min_products_per_thread = 1;
    return p;
  }

  std::vector<std::int32_t> lens_{2050, 20}, tables_;
  testing::Side key_, value_;
  std::vector<BFloat16> query_ = std::vector<BFloat16>(index(2 * kHeads * kHeadSize));
  std::vector<BFloat16> out_ = query_;
  std::vector<float> exp_sums_ = std::vector<float>(index(2 * kHeads * kPartitions));
  std::vector<float> max_logits_ = exp_sums_;
  std::vector<BFloat16> tmp_out_ =
      std::vector<BFloat16>(index(2 * kHeads * kPartitions * kHeadSize));
};

TEST(Allocations, TheSecondAttentionMakesNone) {
  for (const ElementType cache_type : testing::kElementTypes) {
    Decode decode(cache_type);
    for (const ThreadRunner& runner : {kSerialRunner, kFourInTurnRunner}) {
      expect_no_allocation_the_second_time([&] { decode.run(runner); });
    }
  }
}

TEST(Allocations, TheSecondPartitionedAttentionMakesNone) {
  for (const ElementType cache_type : testing::kElementTypes) {
    Decode decode(cache_type);
    for (const ThreadRunner& runner : {kSerialRunner, kFourInTurnRunner}) {
      expect_no_allocation_the_second_time([&] { decode.run_partitioned(runner); });
    }
  }
}

TEST(Allocations, TheSecondProductMakesNone) {
  constexpr std::int64_t kRows = 3, kIn = 64, kOut = 100;
  const std::vector<std::byte> x(index(kRows * kIn) * sizeof(float));
  const std::vector<std::byte> weight(index(round_up(kOut, kPanelFeatures) * kIn) * sizeof(float));
  std::vector<float> out(index(kRows * kOut));
  for (const ElementType x_type : testing::kFloatTypes) {
    for (const ElementType weight_type : testing::kFloatTypes) {
      const LinearParams params{.kernels = &attention_kernels(),
                                .x = x.data(),
                                .weight = weight.data(),
                                .bias = nullptr,
                                .out = out.data(),
                                .x_type = x_type,
                                .weight_type = weight_type,
                                .bias_type = weight_type,
                                .out_type = ElementType::kFloat,
                                .x_stride = kIn,
                                .out_stride = kOut,
                                .num_rows = kRows,
                                .in_features = kIn,
                                .out_features = kOut};
      for (const ThreadRunner& runner : {kSerialRunner, kFourInTurnRunner}) {
        expect_no_allocation_the_second_time([&] { linear(params, runner); });
      }
    }
  }
}

// Smaller calls in between give nothing back.
TEST(Allocations, ScratchStaysAsLargeAsItWas) {
  Scratch scratch;
  const std::byte* memory = scratch.reserve(1000);
  const FailingAllocation any_fails(0);
  EXPECT_EQ(scratch.reserve(10), memory);
  EXPECT_EQ(scratch.reserve(1000), memory);
  EXPECT_THROW((void)scratch.reserve(1001), std::bad_alloc);
  EXPECT_EQ(scratch.reserve(1000), memory);
}

}  // namespace
}  // namespace paged_kv::cpu
