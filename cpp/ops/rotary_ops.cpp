// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/rotary.h"
#include "ops/element_types.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"

namespace paged_kv {
namespace {

void apply_rotary(const Tensor& x, const Tensor& cos, const Tensor& signed_sin) {
  NamedSizes sizes;
  check(x, "x", sizes)
      .shape({"num_tokens", "num_heads", "head_size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16})
      .dense(-1)
      .writable();
  const auto check_factors = [&](const Tensor& factors, const char* name) {
    PAGED_KV_CHECK(factors.dim() == 3 && factors.size(1) == 1, name,
                   ": expected shape [num_tokens, 1, head_size], got ", shape_string(factors));
    check(factors, name, sizes)
        .shape({"num_tokens", "1", "head_size"})
        .dtype(x.scalar_type())
        .dense(-1);
  };
  check_factors(cos, "cos");
  check_factors(signed_sin, "signed_sin");
  PAGED_KV_CHECK(sizes["head_size"] % 2 == 0, "x: expected an even head_size, got ",
                 sizes["head_size"]);

  const cpu::ElementType type = element_type(x);
  const cpu::RotaryParams params{
      .rotate_head = cpu::attention_kernels().rotate_head[static_cast<int>(type)],
      .x = x.mutable_data_ptr(),
      .cos = cos.const_data_ptr(),
      .signed_sin = signed_sin.const_data_ptr(),
      .type = type,
      .x_token_stride = x.stride(0),
      .x_head_stride = x.stride(1),
      .cos_stride = cos.stride(0),
      .sin_stride = signed_sin.stride(0),
      .num_tokens = sizes["num_tokens"],
      .num_heads = sizes["num_heads"],
      .head_size = sizes["head_size"],
  };
  cpu::apply_rotary(params, kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("apply_rotary", PAGED_KV_BOX(&apply_rotary)); }

}  // namespace paged_kv
