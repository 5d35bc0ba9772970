// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/gated_activation.h"

namespace paged_kv::cpu {

void gated_activation(const GatedActivationParams& p, const ThreadRunner& runner) {
  const std::int64_t bytes = element_size(p.type);
  const std::int64_t half_bytes = p.size * bytes;
  parallel_for(runner, p.num_rows, copies_per_task(2 * half_bytes),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   const char* gate =
                       static_cast<const char*>(p.input) + r * p.input_stride * bytes;
                   char* out = static_cast<char*>(p.out) + r * p.out_stride * bytes;
                   p.multiply_row(gate, gate + half_bytes, p.size, out);
                 }
               });
}

}  // namespace paged_kv::cpu
