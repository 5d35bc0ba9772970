// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_v1 and _v2: one query a sequence, vLLM's argument lists.

#include "ops/boxed.h"
#include "ops/cpu/paged_attention.h"
#include "ops/dispatch.h"
#include "ops/paged_attention_checks.h"
#include "ops/registration.h"
#include "ops/torch_thread_runner.h"
#include "paged_kv/math.h"

namespace paged_kv {
namespace {

// All checks of v1; calls f<T>(params) with what follows from them.
template <class F>
void with_params(const DecodeArguments& args, NamedSizes& sizes, F&& f) {
  check_kv_cache_dtype_is_auto(args.kv_cache_dtype);
  const DecodeInputs inputs = check_decode(args, KvCacheDtype::kAuto, sizes);
  const cpu::AttentionMask mask{.causal = true, .sliding_window = 0};
  cpu::check_batch(inputs.batch, mask);

  dispatch_float(args.query.scalar_type(), "query", [&]<class T>() {
    f(cpu::PagedAttentionParams<T>{
        .batch = inputs.batch,
        .mask = mask,
        .cache = make_cache<T>(args.key_cache, args.value_cache, sizes),
        .query = data_of<const T>(args.query),
        .query_token_stride = args.query.stride(0),
        .query_head_stride = args.query.stride(1),
        .out = data_of<T>(args.out),
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
        .alibi_slopes = inputs.slopes.data,
        .alibi_stride = inputs.slopes.stride,
        .sinks = nullptr,
        .sinks_stride = 0,
        .sparsity = args.sparsity,
    });
  });
}

void run_v1(const DecodeArguments& args) {
  NamedSizes sizes;
  with_params(args, sizes, [](const auto& params) { cpu::paged_attention(params, kTorchRunner); });
}

// There are enough partitions for every sequence.
void check_max_partitions(const cpu::AttentionBatch& batch, std::int64_t max_partitions) {
  const std::int64_t capacity = max_partitions * kPartitionSize;
  for (std::int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
    const std::int64_t seq_len = batch.seq_lens[seq];
    PAGED_KV_CHECK(seq_len <= capacity,
                   "exp_sums: expected max_partitions >= ", ceil_div(seq_len, kPartitionSize),
                   " (seq_lens[", seq, "] = ", seq_len, ", ", kPartitionSize,
                   " tokens a partition), got ", max_partitions);
  }
}

void run_v2(const DecodeArguments& args, const PartitionTensors& tensors) {
  NamedSizes sizes;
  with_params(args, sizes, [&]<class T>(const cpu::PagedAttentionParams<T>& params) {
    const auto buffers = check_partition_buffers<T>(tensors, args.query.scalar_type(), sizes);
    check_max_partitions(params.batch, sizes["max_partitions"]);
    cpu::paged_attention_partitioned(params, buffers, kTorchRunner);
  });
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("paged_attention_v1", PAGED_KV_BOX(&paged_attention_v1_op<&run_v1>));
  m.impl("paged_attention_v2", PAGED_KV_BOX(&paged_attention_v2_op<&run_v2>));
}

}  // namespace paged_kv
