// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paged_kv {

// Strides, in elements, of one token [num_heads, head_size] inside a tensor.
struct TokenStrides {
  std::int64_t head;
  std::int64_t dim;
};

}  // namespace paged_kv
