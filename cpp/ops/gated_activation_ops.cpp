// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/gated_activation.h"
#include "ops/cpu/isa/select.h"
#include "ops/element_types.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"

namespace paged_kv {
namespace {

// `rows`: the activation's kernels, one a float type.
void apply(const cpu::GatedActivationKernels::Row* rows, const Tensor& out, const Tensor& input) {
  NamedSizes sizes;
  check(input, "input", sizes)
      .shape({"num_rows", "2 * size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16})
      .dense(-1);
  check(out, "out", sizes)
      .shape({"num_rows", "size"})
      .dtype(input.scalar_type())
      .dense(-1)
      .writable();
  PAGED_KV_CHECK(sizes["2 * size"] == 2 * sizes["size"], "out: expected half the width of input, ",
                 sizes["2 * size"], " / 2, got ", sizes["size"]);

  const cpu::ElementType type = element_type(input);
  const cpu::GatedActivationParams params{
      .multiply_row = rows[static_cast<int>(type)],
      .out = out.mutable_data_ptr(),
      .input = input.const_data_ptr(),
      .type = type,
      .out_stride = out.stride(0),
      .input_stride = input.stride(0),
      .num_rows = sizes["num_rows"],
      .size = sizes["size"],
  };
  cpu::gated_activation(params, kTorchRunner);
}

void silu_and_mul(const Tensor& out, const Tensor& input) {
  apply(cpu::attention_kernels().gated_activations.silu, out, input);
}

void gelu_tanh_and_mul(const Tensor& out, const Tensor& input) {
  apply(cpu::attention_kernels().gated_activations.gelu_tanh, out, input);
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("silu_and_mul", PAGED_KV_BOX(&silu_and_mul));
  m.impl("gelu_tanh_and_mul", PAGED_KV_BOX(&gelu_tanh_and_mul));
}

}  // namespace paged_kv
