// SPDX-License-Identifier: Apache-2.0
//
// Reads tokens of a cache in panels (ops/params/cache_panels.h) as they lie everywhere else.
#pragma once

#include "ops/cpu/token_move.h"
#include "ops/params/cache_panels.h"
#include "ops/params/token_strides.h"

#include <cstddef>
#include <cstdint>

namespace paged_kv::cpu {

// What TokenMover is for the other layouts. `side` is not kNone; head_size is a multiple of
// kPanelDims; strides are in elements.
class PanelTokenMover {
 public:
  PanelTokenMover(CachePanels side, std::int64_t x, const ElementConversion& conversion,
                  std::int64_t num_heads, std::int64_t head_size, std::int64_t cache_head_stride,
                  TokenStrides dst);

  // `block`: its first head.
  void operator()(const std::byte* block, std::int64_t offset, std::byte* dst) const noexcept;

 private:
  void read_row(const std::byte* head, std::int64_t offset, std::int64_t dim, std::int64_t num_dims,
                std::byte* row) const noexcept;

  CachePanels side_;
  std::int64_t x_;
  ElementConversion conversion_;
  std::int64_t num_heads_;
  std::int64_t head_size_;
  std::int64_t cache_head_stride_;  // in bytes, as those of dst_
  TokenStrides dst_;
};

}  // namespace paged_kv::cpu
