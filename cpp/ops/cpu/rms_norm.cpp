// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/rms_norm.h"

#include "ops/cpu/float16.h"

#include <cmath>

namespace paged_kv::cpu {
namespace {

template <class T>
float sum_of_squares(const T* row, std::int64_t size) {
  // So many sums at once fill the vector units of any CPU.
  constexpr std::int64_t kLanes = 16;
  float sums[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const float x = to_float(row[i + lane]);
      sums[lane] += x * x;
    }
  }
  for (; i < size; ++i) sums[0] += to_float(row[i]) * to_float(row[i]);
  for (std::int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::int64_t lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  }
  return sums[0];
}

}  // namespace

template <class T, class W>
void rms_norm(const RmsNormParams<T, W>& p, const ThreadRunner& runner) {
  const std::int64_t row_bytes = p.size * std::int64_t{sizeof(T)};
  parallel_for(runner, p.num_rows, copies_per_task(row_bytes),
               [&p](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   const T* row = p.input + r * p.input_stride;
                   T* out = p.out + r * p.out_stride;
                   const float mean = sum_of_squares(row, p.size) / static_cast<float>(p.size);
                   const float factor = 1.0f / std::sqrt(mean + p.epsilon);
                   for (std::int64_t i = 0; i < p.size; ++i) {
                     const float normed = to_float(to<W>(to_float(row[i]) * factor));
                     out[i] = to<T>(normed * to_float(p.weight[i]));
                   }
                 }
               });
}

template void rms_norm(const RmsNormParams<float, float>&, const ThreadRunner&);
template void rms_norm(const RmsNormParams<Half, Half>&, const ThreadRunner&);
template void rms_norm(const RmsNormParams<Half, float>&, const ThreadRunner&);
template void rms_norm(const RmsNormParams<BFloat16, BFloat16>&, const ThreadRunner&);
template void rms_norm(const RmsNormParams<BFloat16, float>&, const ThreadRunner&);

}  // namespace paged_kv::cpu
