// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_result.h"
#include "ops/cpu/attention_tile.h"
#include "ops/cpu/attention_workers.h"
#include "ops/cpu/float16.h"
#include "ops/cpu/paged_attention.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace paged_kv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <class T>
void write_partition(const PagedAttentionParams& params, const PartitionBuffers<T>& buffers,
                     const AttentionTile& result, std::int64_t seq, std::int64_t first_head,
                     std::int64_t partition) {
  for (std::int64_t r = 0; r < result.num_rows(); ++r) {
    const AttentionRow& row = result.row(r);
    const std::int64_t head = first_head + r;
    buffers.exp_sums[seq * buffers.exp_sums_seq_stride + head * buffers.exp_sums_head_stride +
                     partition * buffers.exp_sums_partition_stride] = row.state.sum;
    buffers.max_logits[seq * buffers.max_logits_seq_stride + head * buffers.max_logits_head_stride +
                       partition * buffers.max_logits_partition_stride] = row.state.max;
    write_output(params, row, head, /*use_sinks=*/false,
                 buffers.tmp_out + seq * buffers.tmp_out_seq_stride +
                     head * buffers.tmp_out_head_stride +
                     partition * buffers.tmp_out_partition_stride);
  }
}

// Joins the partitions of one (sequence, head), in order.
template <class T>
void reduce_partitions(const PartitionBuffers<T>& buffers, std::int64_t seq, std::int64_t head,
                       std::int64_t num_partitions, std::int64_t head_size, T* out) {
  const float* exp_sums =
      buffers.exp_sums + seq * buffers.exp_sums_seq_stride + head * buffers.exp_sums_head_stride;
  const float* max_logits = buffers.max_logits + seq * buffers.max_logits_seq_stride +
                            head * buffers.max_logits_head_stride;
  const T* parts =
      buffers.tmp_out + seq * buffers.tmp_out_seq_stride + head * buffers.tmp_out_head_stride;

  float max_logit = -kInfinity;
  for (std::int64_t i = 0; i < num_partitions; ++i) {
    max_logit = std::max(max_logit, max_logits[i * buffers.max_logits_partition_stride]);
  }
  std::array<float, kMaxHeadSize> sum{};
  float total = 0;
  for (std::int64_t i = 0; i < num_partitions; ++i) {
    const float part_max = max_logits[i * buffers.max_logits_partition_stride];
    if (part_max == -kInfinity) continue;
    const float weight =
        exp_sums[i * buffers.exp_sums_partition_stride] * std::exp(part_max - max_logit);
    const T* part = parts + i * buffers.tmp_out_partition_stride;
    for (std::int64_t d = 0; d < head_size; ++d) {
      sum[static_cast<std::size_t>(d)] += weight * to_float(part[d]);
    }
    total += weight;
  }
  for (std::int64_t d = 0; d < head_size; ++d) {
    // total is 0 only where no partition has a visible key.
    out[d] = to<T>(total == 0 ? 0.0f : sum[static_cast<std::size_t>(d)] / total);
  }
}

}  // namespace

template <class T>
void paged_attention_partitioned(const PagedAttentionParams& params,
                                 const PartitionBuffers<T>& buffers, const ThreadRunner& runner) {
  static thread_local Scratch scratch;
  const auto& batch = params.batch;
  const auto num_partitions = [&batch](std::int64_t seq) {
    return ceil_div<std::int64_t>(batch.seq_lens[seq], kPartitionSize);
  };
  std::int64_t max_partitions = 0;
  for (std::int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    max_partitions = std::max(max_partitions, num_partitions(seq));
  }

  const std::int64_t num_items = batch.num_seqs() * params.num_kv_heads * max_partitions;
  // No keys for what is no partition of its sequence.
  const auto work_of = [&](std::int64_t item) -> AttentionWork {
    if (item >= num_items) return {};
    const std::int64_t begin = item % max_partitions * kPartitionSize;
    const std::int64_t seq = item / max_partitions / params.num_kv_heads;
    return {{.seq = seq,
             .kv_head_begin = item / max_partitions % params.num_kv_heads,
             .num_kv_heads = 1,
             .query_begin = 0,
             .num_queries = 1},
            {begin, std::min<std::int64_t>(begin + kPartitionSize, batch.seq_lens[seq])}};
  };
  const auto run_item = [&](AttentionTile& worker, std::int64_t item, const auto& next_item) {
    const AttentionWork work = work_of(item);
    if (work.keys.empty()) return;
    worker.run(work, [&] { return work_of(next_item()); });
    write_partition(params, buffers, worker, work.tile.seq,
                    work.tile.kv_head_begin * params.group_size(), item % max_partitions);
  };
  for_each_item(params, num_items, num_workers(params, runner), runner, scratch, run_item);

  parallel_for(
      runner, batch.num_seqs() * params.num_heads, 8, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::int64_t seq = i / params.num_heads;
          const std::int64_t head = i % params.num_heads;
          T* out = static_cast<T*>(params.out) + seq * params.out_token_stride +
                   head * params.out_head_stride;
          reduce_partitions(buffers, seq, head, num_partitions(seq), params.head_size, out);
        }
      });
}

template void paged_attention_partitioned(const PagedAttentionParams&,
                                          const PartitionBuffers<float>&, const ThreadRunner&);
template void paged_attention_partitioned(const PagedAttentionParams&,
                                          const PartitionBuffers<Half>&, const ThreadRunner&);
template void paged_attention_partitioned(const PagedAttentionParams&,
                                          const PartitionBuffers<BFloat16>&, const ThreadRunner&);

}  // namespace paged_kv::cpu
