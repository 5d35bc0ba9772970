// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/paged_attention.h"
#include "ops/paged_attention_varlen_checks.h"
#include "ops/registration.h"
#include "ops/torch_thread_runner.h"

namespace paged_kv {
namespace {

// The CPU kernel balances its threads while it runs and needs no plan and no scratch from outside.
void run_varlen(const VarlenArguments& args) {
  NamedSizes sizes;
  const KvCacheDtype cache_dtype = parse_kv_cache_dtype(args.kv_cache_dtype, OpDevice::kCpu);
  const VarlenInputs inputs = check_varlen(args, cache_dtype, sizes);
  const cpu::AttentionMask mask{.causal = args.causal, .sliding_window = args.sliding_window};
  cpu::check_batch(inputs.batch, mask);

  cpu::PagedAttentionParams params{};
  params.kernels = &cpu::attention_kernels();
  params.batch = inputs.batch;
  params.mask = mask;
  set_tensors(params, args.out, args.query, args.key_cache, args.value_cache, cache_dtype,
              inputs.scales, sizes);
  if (args.lse) {
    params.lse = args.lse->mutable_data_ptr<float>();
    params.lse_head_stride = args.lse->stride(0);
    params.lse_token_stride = args.lse->stride(1);
  }
  params.scale = static_cast<float>(args.scale);
  params.softcap = static_cast<float>(args.softcap);
  params.alibi_slopes = inputs.slopes.data;
  params.alibi_stride = inputs.slopes.stride;
  params.sinks = inputs.sinks.data;
  params.sinks_stride = inputs.sinks.stride;
  cpu::paged_attention(params, kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("paged_attention_varlen", PAGED_KV_BOX(&paged_attention_varlen_op<&run_varlen>));
}

}  // namespace paged_kv
