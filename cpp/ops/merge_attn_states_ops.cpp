// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/merge_attn_states.h"
#include "ops/dispatch.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"

#include <optional>

namespace paged_kv {
namespace {

void merge_attn_states(const Tensor& output, const std::optional<Tensor>& output_lse,
                       const Tensor& prefix_output, const Tensor& prefix_lse,
                       const Tensor& suffix_output, const Tensor& suffix_lse) {
  const ScalarType dtype = output.scalar_type();
  NamedSizes sizes;
  const auto check_output = [&](const Tensor& tensor, const char* name) {
    return check(tensor, name, sizes)
        .shape({"num_tokens", "num_heads", "head_size"})
        .dtype(dtype)
        .dense(-1);
  };
  const auto check_lse = [&](const Tensor& tensor, const char* name) {
    return check(tensor, name, sizes).shape({"num_heads", "num_tokens"}).dtype(ScalarType::Float);
  };
  check_output(output, "output").writable();
  check_output(prefix_output, "prefix_output");
  check_output(suffix_output, "suffix_output");
  check_lse(prefix_lse, "prefix_lse");
  check_lse(suffix_lse, "suffix_lse");
  if (output_lse) check_lse(*output_lse, "output_lse").writable();

  dispatch_float(dtype, "output", [&]<class T>() {
    const cpu::MergeAttnStatesParams<T> params{
        .output = static_cast<T*>(output.mutable_data_ptr()),
        .output_lse = output_lse ? output_lse->mutable_data_ptr<float>() : nullptr,
        .prefix_output = static_cast<const T*>(prefix_output.const_data_ptr()),
        .prefix_lse = prefix_lse.const_data_ptr<float>(),
        .suffix_output = static_cast<const T*>(suffix_output.const_data_ptr()),
        .suffix_lse = suffix_lse.const_data_ptr<float>(),
        .output_token_stride = output.stride(0),
        .output_head_stride = output.stride(1),
        .output_lse_head_stride = output_lse ? output_lse->stride(0) : 0,
        .output_lse_token_stride = output_lse ? output_lse->stride(1) : 0,
        .prefix_token_stride = prefix_output.stride(0),
        .prefix_head_stride = prefix_output.stride(1),
        .prefix_lse_head_stride = prefix_lse.stride(0),
        .prefix_lse_token_stride = prefix_lse.stride(1),
        .suffix_token_stride = suffix_output.stride(0),
        .suffix_head_stride = suffix_output.stride(1),
        .suffix_lse_head_stride = suffix_lse.stride(0),
        .suffix_lse_token_stride = suffix_lse.stride(1),
        .num_tokens = sizes["num_tokens"],
        .num_heads = sizes["num_heads"],
        .head_size = sizes["head_size"],
    };
    cpu::merge_attn_states(params, kTorchRunner);
  });
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("merge_attn_states", PAGED_KV_BOX(&merge_attn_states)); }

}  // namespace paged_kv
