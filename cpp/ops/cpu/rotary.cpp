// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/rotary.h"

namespace paged_kv::cpu {

void apply_rotary(const RotaryParams& p, const ThreadRunner& runner) {
  const std::int64_t bytes = element_size(p.type);
  parallel_for(runner, p.num_tokens, copies_per_task(p.num_heads * p.head_size * bytes),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t t = begin; t < end; ++t) {
                   char* heads = static_cast<char*>(p.x) + t * p.x_token_stride * bytes;
                   const char* cos = static_cast<const char*>(p.cos) + t * p.cos_stride * bytes;
                   const char* signed_sin =
                       static_cast<const char*>(p.signed_sin) + t * p.sin_stride * bytes;
                   for (std::int64_t h = 0; h < p.num_heads; ++h) {
                     p.rotate_head(heads + h * p.x_head_stride * bytes, cos, signed_sin,
                                   p.head_size / 2);
                   }
                 }
               });
}

}  // namespace paged_kv::cpu
