// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/paged_attention_varlen.h"

#include "paged_attention_problem.h"
#include "test_support.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cuda::testing {
namespace {

struct VarlenSizes {
  std::vector<int> query_lens;
  std::vector<std::int32_t> seq_lens;
  int head_size = 32;
  int num_heads = 2;
  int block_size = 8;
  std::int64_t sliding_window = 0;
};

// Every tensor is exactly as large as it must be, so that ASan sees any access past it. One KV
// head; blocks of the cache in reverse order; NaN in slots that no sequence holds.
template <class T, class CacheT>
class VarlenProblem {
 public:
  explicit VarlenProblem(VarlenSizes sizes) : sizes_(std::move(sizes)) {
    starts_ = {0};
    for (const int query_len : sizes_.query_lens) starts_.push_back(starts_.back() + query_len);
    int num_blocks = 0;
    for (const std::int32_t seq_len : sizes_.seq_lens) {
      max_blocks_ = std::max(max_blocks_, ceil_div(seq_len, sizes_.block_size));
      num_blocks += ceil_div(seq_len, sizes_.block_size);
    }
    num_blocks_ = num_blocks;
    const CacheT nan = from_float<CacheT>(std::numeric_limits<float>::quiet_NaN());
    keys_.assign(as_size(num_blocks_ * sizes_.block_size * sizes_.head_size), nan);
    values_ = keys_;
    tables_.assign(as_size(num_seqs() * max_blocks_), 2'147'480'000);
    for (int i = 0; i < num_tokens() * sizes_.num_heads * sizes_.head_size; ++i) {
      query_.push_back(from_float<T>(normal_(random_)));
    }
    for (int seq = 0; seq < num_seqs(); ++seq) {
      for (int pos = 0; pos < sizes_.seq_lens[as_size(seq)]; ++pos) {
        if (pos % sizes_.block_size == 0) table(seq, pos / sizes_.block_size) = --num_blocks;
        for (int d = 0; d < sizes_.head_size; ++d) {
          keys_[slot(seq, pos) + as_size(d)] = from_float<CacheT>(normal_(random_));
          values_[slot(seq, pos) + as_size(d)] = from_float<CacheT>(normal_(random_));
        }
      }
    }
  }

  [[nodiscard]] int num_blocks() const { return num_blocks_; }
  [[nodiscard]] std::int32_t& table(int seq, int i) {
    return tables_[as_size(seq * max_blocks_ + i)];
  }
  [[nodiscard]] std::int32_t& start(int seq) { return starts_[as_size(seq)]; }
  [[nodiscard]] std::int32_t& seq_len(int seq) { return sizes_.seq_lens[as_size(seq)]; }

  // out, then lse; a row that was left alone is 7.
  [[nodiscard]] std::vector<float> run() {
    std::vector<T> out(query_.size(), from_float<T>(7.0f));
    std::vector<float> lse(as_size(num_tokens() * sizes_.num_heads), 7.0f);
    paged_attention_varlen(params(out, lse), nullptr);
    std::vector<float> result;
    for (const T element : out) result.push_back(to_float(element));
    result.insert(result.end(), lse.begin(), lse.end());
    return result;
  }

  // The largest difference from float64.
  [[nodiscard]] double error_of(const std::vector<float>& result) {
    double error = 0;
    for (int seq = 0; seq < num_seqs(); ++seq) {
      for (int i = 0; i < sizes_.query_lens[as_size(seq)]; ++i) {
        for (int head = 0; head < sizes_.num_heads; ++head) {
          const int row = (starts_[as_size(seq)] + i) * sizes_.num_heads + head;
          const std::vector<double> expected = answer(seq, i, head);
          for (int d = 0; d < sizes_.head_size; ++d) {
            const double actual = result[as_size(row * sizes_.head_size + d)];
            const double difference = std::fabs(actual - expected[as_size(d)]);
            if (!(difference <= error)) error = difference;  // NaN is the largest
          }
        }
      }
    }
    return error;
  }

 private:
  static std::size_t as_size(int i) { return static_cast<std::size_t>(i); }
  [[nodiscard]] int num_seqs() const { return static_cast<int>(sizes_.query_lens.size()); }
  [[nodiscard]] int num_tokens() const {
    int sum = 0;
    for (const int query_len : sizes_.query_lens) sum += query_len;
    return sum;
  }
  [[nodiscard]] std::size_t slot(int seq, int pos) {
    const int block = table(seq, pos / sizes_.block_size);
    return as_size((block * sizes_.block_size + pos % sizes_.block_size) * sizes_.head_size);
  }

  [[nodiscard]] PagedAttentionVarlenParams params(std::vector<T>& out, std::vector<float>& lse) {
    const std::int64_t head_size = sizes_.head_size;
    const VarlenCacheSide key{
        keys_.data(), sizes_.block_size * head_size, head_size, 0, {&k_scale_, 0}};
    VarlenCacheSide value = key;
    value.data = values_.data();
    value.scale = {&v_scale_, 0};
    return {
        .dtype = kDtype<T>,
        .kv_cache_dtype = kCacheDtype<CacheT>,
        .out = out.data(),
        .query = query_.data(),
        .out_token_stride = sizes_.num_heads * head_size,
        .out_head_stride = head_size,
        .query_token_stride = sizes_.num_heads * head_size,
        .query_head_stride = head_size,
        .lse = {lse.data(), sizes_.num_heads, num_tokens(), 1, sizes_.num_heads},
        .key = key,
        .value = value,
        .query_start_loc = {starts_.data(), num_seqs() + 1, 1},
        .seq_lens = {sizes_.seq_lens.data(), num_seqs(), 1},
        .block_tables = {tables_.data(), num_seqs(), max_blocks_, max_blocks_, 1},
        .alibi_slopes = {slopes_.data(), sizes_.num_heads, 1},
        .sinks = {},
        .num_tokens = num_tokens(),
        .num_blocks = num_blocks_,
        .block_size = sizes_.block_size,
        .num_heads = sizes_.num_heads,
        .num_kv_heads = 1,
        .head_size = sizes_.head_size,
        .max_seq_len = -1,
        .sliding_window = sizes_.sliding_window,
        .causal = true,
        .scale = 0.2f,
        .softcap = 20.0f,
    };
  }

  [[nodiscard]] std::vector<double> answer(int seq, int i, int head) {
    const bool is_quantised = kCacheDtype<CacheT> != KvCacheDtype::kAuto;
    const int position = sizes_.seq_lens[as_size(seq)] - sizes_.query_lens[as_size(seq)] + i;
    const int window = static_cast<int>(sizes_.sliding_window);
    const int begin = window > 0 ? std::max(0, position - window + 1) : 0;
    std::vector<double> sums(as_size(sizes_.head_size), 0.0);
    double total = 0;
    for (int pos = begin; pos <= position; ++pos) {
      const int row = (starts_[as_size(seq)] + i) * sizes_.num_heads + head;
      double logit = 0;
      for (int d = 0; d < sizes_.head_size; ++d) {
        logit += double{to_float(query_[as_size(row * sizes_.head_size + d)])} *
                 to_float(keys_[slot(seq, pos) + as_size(d)]);
      }
      logit *= double{0.2f} * (is_quantised ? k_scale_ : 1.0f);
      logit = 20 * std::tanh(logit / 20) + double{slopes_[as_size(head)]} * (pos - position);
      const double weight = std::exp(logit);
      total += weight;
      for (int d = 0; d < sizes_.head_size; ++d) {
        sums[as_size(d)] += weight * (is_quantised ? v_scale_ : 1.0f) *
                            to_float(values_[slot(seq, pos) + as_size(d)]);
      }
    }
    for (double& sum : sums) sum = total == 0 ? 0 : sum / total;
    return sums;
  }

  VarlenSizes sizes_;
  int max_blocks_ = 0;
  int num_blocks_ = 0;
  std::mt19937 random_{1};
  std::normal_distribution<float> normal_;
  std::vector<std::int32_t> starts_, tables_;
  std::vector<T> query_;
  std::vector<CacheT> keys_, values_;
  std::vector<float> slopes_{0.25f, -0.125f};
  float k_scale_ = 0.5f;
  float v_scale_ = 0.75f;
};

template <class>
class PagedAttentionVarlen : public ::testing::Test {};
TYPED_TEST_SUITE(PagedAttentionVarlen, AllElements);

TYPED_TEST(PagedAttentionVarlen, EqualsTheDefinitionUnderEverySchedule) {
  using T = typename TypeParam::T;
  VarlenSizes sizes{.query_lens = {2}, .seq_lens = {37}, .num_heads = 1};  // sanitizers are slow
  if (!kUnderTsan && !kUnderAsan) {
    sizes = {.query_lens = {5, 0, 1, 3},
             .seq_lens = {5, 9, 130, 2},
             .head_size = 80,
             .sliding_window = 100};
  }
  VarlenProblem<T, typename TypeParam::CacheT> problem(sizes);
  std::vector<float> result;
  if (kUnderTsan || kUnderAsan) {
    result = problem.run();
  } else {
    const auto results = results_by_schedule([&] { return problem.run(); });
    result = results[0];
    for (const auto& other : results) {
      EXPECT_EQ(std::memcmp(other.data(), result.data(), result.size() * sizeof(float)), 0);
    }
  }
  EXPECT_LT(problem.error_of(result), (std::is_same_v<T, float>  ? 1e-4
                                       : std::is_same_v<T, Half> ? 4e-3
                                                                 : 4e-2));
}

using FloatProblem = VarlenProblem<float, float>;
constexpr std::int32_t kLargest = std::numeric_limits<std::int32_t>::max();
constexpr std::int32_t kSmallest = std::numeric_limits<std::int32_t>::min();

// Under ASan any access outside the tensors is an error.
TEST(PagedAttentionVarlenBadValues, LengthsAreCutAtTheTable) {
  FloatProblem problem({.query_lens = {2}, .seq_lens = {16}});
  const auto expected = problem.run();
  for (const std::int32_t length : {17, kLargest}) {
    problem.seq_len(0) = length;
    EXPECT_EQ(problem.run(), expected);
  }
  for (const std::int32_t length : {-1, kSmallest}) {
    problem.seq_len(0) = length;
    const auto result = problem.run();
    EXPECT_EQ(std::vector<float>(result.begin(), result.end() - 4), std::vector<float>(128));
    EXPECT_EQ(result.back(), -INFINITY);
  }
}

TEST(PagedAttentionVarlenBadValues, ABlockThatIsNotInTheCacheIsNotVisible) {
  FloatProblem problem({.query_lens = {2}, .seq_lens = {16}});
  for (const std::int32_t block : {-1, problem.num_blocks(), kLargest, kSmallest}) {
    problem.table(0, 0) = block;
    for (const float element : problem.run()) EXPECT_TRUE(std::isfinite(element));
    problem.table(0, 1) = block;
    EXPECT_EQ(problem.run().back(), -INFINITY);
    problem.table(0, 1) = 0;
  }
}

TEST(PagedAttentionVarlenBadValues, AnyStartsAreRead) {
  for (const std::int32_t wrong : {-1, 1, 3, kLargest, kSmallest}) {
    for (const int place : {0, 1, 2}) {
      FloatProblem problem({.query_lens = {2, 2}, .seq_lens = {16, 3}});
      problem.start(place) = wrong;
      for (const float element : problem.run()) EXPECT_FALSE(std::isnan(element));
    }
  }
}

TEST(PagedAttentionVarlenEmpty, ABatchOfNoneLaunchesNothing) {
  FloatProblem problem({.query_lens = {}, .seq_lens = {}});
  EXPECT_TRUE(problem.run().empty());
  FloatProblem no_queries({.query_lens = {0}, .seq_lens = {9}});
  EXPECT_TRUE(no_queries.run().empty());
}

}  // namespace
}  // namespace paged_kv::cuda::testing
