// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/linear.h"
#include "ops/element_types.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"

#include <optional>

namespace paged_kv {
namespace {

// Lanes of the widest instruction set: what one CPU takes, all do.
constexpr std::int64_t kInFeaturesUnit = 16;

void linear(const Tensor& out, const Tensor& x, const Tensor& weight,
            const std::optional<Tensor>& bias) {
  NamedSizes sizes;
  const auto check_floats = [&](const Tensor& tensor, const char* name) {
    return check(tensor, name, sizes)
        .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16})
        .dense(-1);
  };
  check_floats(x, "x").shape({"num_rows", "in_features"});
  check_floats(weight, "weight").shape({"out_features", "in_features"});
  if (bias) check_floats(*bias, "bias").shape({"out_features"});
  check_floats(out, "out").shape({"num_rows", "out_features"}).writable();
  PAGED_KV_CHECK(sizes["in_features"] > 0 && sizes["in_features"] % kInFeaturesUnit == 0,
                 "weight: expected in_features to be a positive multiple of ", kInFeaturesUnit,
                 ", got ", sizes["in_features"]);

  const cpu::LinearParams params{
      .kernels = &cpu::attention_kernels(),
      .x = x.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .x_type = element_type(x),
      .weight_type = element_type(weight),
      .bias_type = bias ? element_type(*bias) : cpu::ElementType::kFloat,
      .out_type = element_type(out),
      .x_stride = x.stride(0),
      .weight_stride = weight.stride(0),
      .out_stride = out.stride(0),
      .num_rows = sizes["num_rows"],
      .in_features = sizes["in_features"],
      .out_features = sizes["out_features"],
  };
  cpu::linear(params, kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("linear", PAGED_KV_BOX(&linear)); }

}  // namespace paged_kv
