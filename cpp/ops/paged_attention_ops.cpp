// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_v1 and _v2: one query a sequence, vLLM's argument lists.

#include "ops/attention_checks.h"
#include "ops/boxed.h"
#include "ops/cpu/paged_attention.h"
#include "ops/dispatch.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"
#include "paged_kv/math.h"

#include <optional>
#include <string>

namespace paged_kv {
namespace {

// The arguments that v1 and v2 share, in their order.
struct DecodeArguments {
  const Tensor& out;
  const Tensor& query;
  const Tensor& key_cache;
  const Tensor& value_cache;
  std::int64_t num_kv_heads;
  double scale;
  const Tensor& block_tables;
  const Tensor& seq_lens;
  std::int64_t block_size;
  std::int64_t max_seq_len;
  const std::optional<Tensor>& alibi_slopes;
  const std::string& kv_cache_dtype;
  const Tensor& k_scale;
  const Tensor& v_scale;
  cpu::BlockSparsity sparsity;
};

constexpr std::int64_t kMaxRank = 1 << 16;
constexpr std::int64_t kMaxSlidingStep = 1 << 20;

void check_sparsity(const cpu::BlockSparsity& sparsity, std::int64_t block_size) {
  if (!sparsity.enabled()) return;
  PAGED_KV_CHECK(sparsity.block_size > 0 && sparsity.block_size % block_size == 0,
                 "blocksparse_block_size: expected a multiple of block_size = ", block_size,
                 ", got ", sparsity.block_size);
  PAGED_KV_CHECK(sparsity.local_blocks >= 0, "blocksparse_local_blocks: expected >= 0, got ",
                 sparsity.local_blocks);
  // The bounds keep the pattern's offsets within 64 bits.
  PAGED_KV_CHECK(sparsity.tp_rank >= 0 && sparsity.tp_rank <= kMaxRank, "tp_rank: expected in [0, ",
                 kMaxRank, "], got ", sparsity.tp_rank);
  PAGED_KV_CHECK(sparsity.head_sliding_step >= -kMaxSlidingStep &&
                     sparsity.head_sliding_step <= kMaxSlidingStep,
                 "blocksparse_head_sliding_step: expected in [", -kMaxSlidingStep, ", ",
                 kMaxSlidingStep, "], got ", sparsity.head_sliding_step);
}

// All checks of v1; calls f<T>(params) with what follows from them.
template <class F>
void with_params(const DecodeArguments& args, NamedSizes& sizes, F&& f) {
  check_kv_cache_dtype_is_auto(args.kv_cache_dtype);
  check_query(args.out, args.query, sizes);
  sizes.bind("num_kv_heads", args.num_kv_heads, "num_kv_heads");
  sizes.bind("block_size", args.block_size, "block_size");
  check_cache(args.key_cache, args.value_cache, args.query.scalar_type(), sizes);
  sizes.bind("num_seqs", sizes["num_tokens"], "query");
  const cpu::AttentionBatch batch =
      make_batch(nullptr, args.seq_lens, args.block_tables, -1, args.max_seq_len, sizes);
  const PerHead slopes = check_per_head(args.alibi_slopes, "alibi_slopes", sizes);
  check_scale(args.k_scale, "k_scale", sizes);
  check_scale(args.v_scale, "v_scale", sizes);
  check_attention_scale(args.scale);
  check_sparsity(args.sparsity, args.block_size);
  const cpu::AttentionMask mask{.causal = true, .sliding_window = 0};
  cpu::check_batch(batch, mask);

  dispatch_float(args.query.scalar_type(), "query", [&]<class T>() {
    f(cpu::PagedAttentionParams<T>{
        .batch = batch,
        .mask = mask,
        .cache = make_cache<T>(args.key_cache, args.value_cache, sizes),
        .query = static_cast<const T*>(args.query.const_data_ptr()),
        .query_token_stride = args.query.stride(0),
        .query_head_stride = args.query.stride(1),
        .out = static_cast<T*>(args.out.mutable_data_ptr()),
        .out_token_stride = args.out.stride(0),
        .out_head_stride = args.out.stride(1),
        .lse = nullptr,
        .lse_head_stride = 0,
        .lse_token_stride = 0,
        .num_heads = sizes["num_heads"],
        .num_kv_heads = args.num_kv_heads,
        .head_size = sizes["head_size"],
        .scale = static_cast<float>(args.scale),
        .softcap = 0,
        .alibi_slopes = slopes.data,
        .alibi_stride = slopes.stride,
        .sinks = nullptr,
        .sinks_stride = 0,
        .sparsity = args.sparsity,
    });
  });
}

void paged_attention_v1(const Tensor& out, const Tensor& query, const Tensor& key_cache,
                        const Tensor& value_cache, std::int64_t num_kv_heads, double scale,
                        const Tensor& block_tables, const Tensor& seq_lens, std::int64_t block_size,
                        std::int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                        const std::string& kv_cache_dtype, const Tensor& k_scale,
                        const Tensor& v_scale, std::int64_t tp_rank,
                        std::int64_t blocksparse_local_blocks, std::int64_t blocksparse_vert_stride,
                        std::int64_t blocksparse_block_size,
                        std::int64_t blocksparse_head_sliding_step) {
  const DecodeArguments args{out,
                             query,
                             key_cache,
                             value_cache,
                             num_kv_heads,
                             scale,
                             block_tables,
                             seq_lens,
                             block_size,
                             max_seq_len,
                             alibi_slopes,
                             kv_cache_dtype,
                             k_scale,
                             v_scale,
                             {blocksparse_local_blocks, blocksparse_vert_stride,
                              blocksparse_block_size, blocksparse_head_sliding_step, tp_rank}};
  NamedSizes sizes;
  with_params(args, sizes, [](const auto& params) { cpu::paged_attention(params, kTorchRunner); });
}

// Binds max_partitions and checks that it is enough for every sequence.
void check_partitions(const Tensor& exp_sums, const Tensor& max_logits, const Tensor& tmp_out,
                      const Tensor& query, const Tensor& seq_lens, NamedSizes& sizes) {
  check(exp_sums, "exp_sums", sizes)
      .shape({"num_tokens", "num_heads", "max_partitions"})
      .dtype(ScalarType::Float)
      .writable();
  check(max_logits, "max_logits", sizes)
      .shape({"num_tokens", "num_heads", "max_partitions"})
      .dtype(ScalarType::Float)
      .writable();
  check(tmp_out, "tmp_out", sizes)
      .shape({"num_tokens", "num_heads", "max_partitions", "head_size"})
      .dtype(query.scalar_type())
      .dense(-1)
      .writable();
  const std::int64_t capacity = sizes["max_partitions"] * cpu::kPartitionSize;
  const auto* lens = seq_lens.const_data_ptr<std::int32_t>();
  for (std::int64_t seq = 0; seq < seq_lens.size(0); ++seq) {
    const std::int64_t seq_len = lens[seq * seq_lens.stride(0)];
    PAGED_KV_CHECK(seq_len <= capacity,
                   "exp_sums: expected max_partitions >= ", ceil_div(seq_len, cpu::kPartitionSize),
                   " (seq_lens[", seq, "] = ", seq_len, ", ", cpu::kPartitionSize,
                   " tokens a partition), got ", sizes["max_partitions"]);
  }
}

void paged_attention_v2(const Tensor& out, const Tensor& exp_sums, const Tensor& max_logits,
                        const Tensor& tmp_out, const Tensor& query, const Tensor& key_cache,
                        const Tensor& value_cache, std::int64_t num_kv_heads, double scale,
                        const Tensor& block_tables, const Tensor& seq_lens, std::int64_t block_size,
                        std::int64_t max_seq_len, const std::optional<Tensor>& alibi_slopes,
                        const std::string& kv_cache_dtype, const Tensor& k_scale,
                        const Tensor& v_scale, std::int64_t tp_rank,
                        std::int64_t blocksparse_local_blocks, std::int64_t blocksparse_vert_stride,
                        std::int64_t blocksparse_block_size,
                        std::int64_t blocksparse_head_sliding_step) {
  const DecodeArguments args{out,
                             query,
                             key_cache,
                             value_cache,
                             num_kv_heads,
                             scale,
                             block_tables,
                             seq_lens,
                             block_size,
                             max_seq_len,
                             alibi_slopes,
                             kv_cache_dtype,
                             k_scale,
                             v_scale,
                             {blocksparse_local_blocks, blocksparse_vert_stride,
                              blocksparse_block_size, blocksparse_head_sliding_step, tp_rank}};
  NamedSizes sizes;
  with_params(args, sizes, [&]<class T>(const cpu::PagedAttentionParams<T>& params) {
    check_partitions(exp_sums, max_logits, tmp_out, query, seq_lens, sizes);
    const cpu::PartitionBuffers<T> buffers{
        .exp_sums = exp_sums.mutable_data_ptr<float>(),
        .max_logits = max_logits.mutable_data_ptr<float>(),
        .tmp_out = static_cast<T*>(tmp_out.mutable_data_ptr()),
        .exp_sums_seq_stride = exp_sums.stride(0),
        .exp_sums_head_stride = exp_sums.stride(1),
        .exp_sums_partition_stride = exp_sums.stride(2),
        .max_logits_seq_stride = max_logits.stride(0),
        .max_logits_head_stride = max_logits.stride(1),
        .max_logits_partition_stride = max_logits.stride(2),
        .tmp_out_seq_stride = tmp_out.stride(0),
        .tmp_out_head_stride = tmp_out.stride(1),
        .tmp_out_partition_stride = tmp_out.stride(2),
    };
    cpu::paged_attention_partitioned(params, buffers, kTorchRunner);
  });
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("paged_attention_v1", PAGED_KV_BOX(&paged_attention_v1));
  m.impl("paged_attention_v2", PAGED_KV_BOX(&paged_attention_v2));
}

}  // namespace paged_kv
