// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/isa/select.h"
#include "ops/cpu/linear.h"
#include "ops/element_types.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"
#include "paged_kv/math.h"

#include <cstdint>
#include <optional>

namespace paged_kv {
namespace {

// After in_features and out_features were bound.
void check_panels(const Tensor& panels, NamedSizes& sizes) {
  const std::int64_t in_features = sizes["in_features"];
  PAGED_KV_CHECK(in_features > 0 && in_features % cpu::kPanelInputsUnit == 0,
                 "x: expected in_features to be a positive multiple of ", cpu::kPanelInputsUnit,
                 ", got ", in_features);
  sizes.bind("num_panels", ceil_div(sizes["out_features"], cpu::kPanelFeatures), "out");
  sizes.bind("panel_features", cpu::kPanelFeatures, "the layout");
  const TensorCheck checked = check(panels, "panels", sizes);
  checked.dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
  if (panels.scalar_type() == ScalarType::BFloat16) {
    sizes.bind("in_features / 2", in_features / 2, "x");
    sizes.bind("pair", 2, "the layout");
    checked.shape({"num_panels", "in_features / 2", "panel_features", "pair"});
  } else {
    checked.shape({"num_panels", "in_features", "panel_features"});
  }
  checked.contiguous();
}

void linear(const Tensor& out, const Tensor& x, const Tensor& panels,
            const std::optional<Tensor>& bias) {
  NamedSizes sizes;
  const auto check_floats = [&](const Tensor& tensor, const char* name) {
    return check(tensor, name, sizes)
        .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16})
        .dense(-1);
  };
  check_floats(x, "x").shape({"num_rows", "in_features"});
  check_floats(out, "out").shape({"num_rows", "out_features"}).writable();
  check_panels(panels, sizes);
  if (bias) check_floats(*bias, "bias").shape({"out_features"});

  const cpu::LinearParams params{
      .kernels = &cpu::attention_kernels(),
      .x = x.const_data_ptr(),
      .weight = panels.const_data_ptr(),
      .bias = bias ? bias->const_data_ptr() : nullptr,
      .out = out.mutable_data_ptr(),
      .x_type = element_type(x),
      .weight_type = element_type(panels),
      .bias_type = bias ? element_type(*bias) : cpu::ElementType::kFloat,
      .out_type = element_type(out),
      .x_stride = x.stride(0),
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
