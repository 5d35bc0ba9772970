// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdint.h>

namespace paged_kv::cpu {

// Float32 rows of the same length, `stride` elements apart.
struct FloatRows {
  float* data;
  int64_t stride;
  int64_t count;
};

}  // namespace paged_kv::cpu
