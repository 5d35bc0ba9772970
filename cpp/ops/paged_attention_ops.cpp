// SPDX-License-Identifier: Apache-2.0
//
// paged_attention_v1 and _v2: one query a sequence, vLLM's argument lists.

#include "ops/boxed.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/paged_attention.h"
#include "ops/dispatch.h"
#include "ops/paged_attention_checks.h"
#include "ops/registration.h"
#include "ops/torch_thread_runner.h"
#include "paged_kv/math.h"

namespace paged_kv {
namespace {

// All checks of v1, and what follows from them.
cpu::PagedAttentionParams checked_params(const DecodeArguments& args, NamedSizes& sizes) {
  const KvCacheDtype cache_dtype = parse_kv_cache_dtype(args.kv_cache_dtype, OpDevice::kCpu);
  const DecodeInputs inputs = check_decode(args, cache_dtype, sizes);
  cpu::PagedAttentionParams params{};
  params.kernels = &cpu::attention_kernels();
  params.batch = inputs.batch;
  params.mask = {.causal = true, .sliding_window = 0};
  cpu::check_batch(params.batch, params.mask);
  set_tensors(params, args.out, args.query, args.key_cache, args.value_cache, cache_dtype,
              {inputs.k_scale, inputs.v_scale}, sizes);
  params.scale = static_cast<float>(args.scale);
  params.alibi_slopes = inputs.slopes.data;
  params.alibi_stride = inputs.slopes.stride;
  params.sparsity = args.sparsity;
  return params;
}

void run_v1(const DecodeArguments& args) {
  NamedSizes sizes;
  cpu::paged_attention(checked_params(args, sizes), kTorchRunner);
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
  const cpu::PagedAttentionParams params = checked_params(args, sizes);
  dispatch_float(args.query.scalar_type(), "query", [&]<class T>() {
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
