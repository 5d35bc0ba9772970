// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/rms_norm.h"
#include "ops/dispatch.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/torch_thread_runner.h"

#include <cmath>

namespace paged_kv {
namespace {

void rms_norm(const Tensor& out, const Tensor& input, const Tensor& weight, double epsilon) {
  NamedSizes sizes;
  const ScalarType dtype = input.scalar_type();
  check(input, "input", sizes)
      .shape({"num_rows", "size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16})
      .dense(-1);
  check(weight, "weight", sizes).shape({"size"}).dtype_in({dtype, ScalarType::Float}).dense(-1);
  check(out, "out", sizes).shape({"num_rows", "size"}).dtype(dtype).dense(-1).writable();
  PAGED_KV_CHECK(epsilon >= 0 && std::isfinite(static_cast<float>(epsilon)),
                 "epsilon: expected a finite number >= 0, got ", epsilon);

  dispatch_float(dtype, "input", [&]<class T>() {
    const auto run = [&]<class W>(const W* weights) {
      const cpu::RmsNormParams<T, W> params{
          .out = static_cast<T*>(out.mutable_data_ptr()),
          .input = static_cast<const T*>(input.const_data_ptr()),
          .weight = weights,
          .out_stride = out.stride(0),
          .input_stride = input.stride(0),
          .num_rows = sizes["num_rows"],
          .size = sizes["size"],
          .epsilon = static_cast<float>(epsilon),
      };
      cpu::rms_norm(params, kTorchRunner);
    };
    if (weight.scalar_type() == dtype) {
      run(static_cast<const T*>(weight.const_data_ptr()));
    } else {
      run(weight.const_data_ptr<float>());
    }
  });
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("rms_norm", PAGED_KV_BOX(&rms_norm)); }

}  // namespace paged_kv
