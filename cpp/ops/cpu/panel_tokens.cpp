// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/panel_tokens.h"

#include "ops/cpu/strided_row.h"

#include <algorithm>

namespace paged_kv::cpu {
namespace {

// Dims that are read at a time: whole panels.
constexpr std::int64_t kPieceDims = 128;
static_assert(kPieceDims % kPanelDims == 0);

}  // namespace

PanelTokenMover::PanelTokenMover(CachePanels side, std::int64_t x,
                                 const ElementConversion& conversion, std::int64_t num_heads,
                                 std::int64_t head_size, std::int64_t cache_head_stride,
                                 TokenStrides dst)
    : side_(side),
      x_(x),
      conversion_(conversion),
      num_heads_(num_heads),
      head_size_(head_size),
      cache_head_stride_(cache_head_stride * conversion.src_element_size),
      dst_{.head = dst.head * conversion.dst_element_size,
           .dim = dst.dim * conversion.dst_element_size} {}

void PanelTokenMover::operator()(const std::byte* block, std::int64_t offset,
                                 std::byte* dst) const noexcept {
  const auto [convert, scale, src_size, dst_size] = conversion_;
  for (std::int64_t head = 0; head < num_heads_; ++head) {
    for (std::int64_t dim = 0; dim < head_size_; dim += kPieceDims) {
      const std::int64_t num_dims = std::min(kPieceDims, head_size_ - dim);
      std::byte row[kPieceDims * sizeof(float)];
      std::byte converted[kPieceDims * sizeof(float)];
      read_row(block + head * cache_head_stride_, offset, dim, num_dims, row);
      if (convert != nullptr) convert(row, scale[head], num_dims, converted);
      copy_strided(convert == nullptr ? row : converted, dst_size,
                   dst + head * dst_.head + dim * dst_.dim, dst_.dim, num_dims, dst_size);
    }
  }
}

// Dims dim .. dim + num_dims - 1 of a token's row in a block of one head, side by side.
void PanelTokenMover::read_row(const std::byte* head, std::int64_t offset, std::int64_t dim,
                               std::int64_t num_dims, std::byte* row) const noexcept {
  const std::int64_t element_size = conversion_.src_element_size;
  if (side_ == CachePanels::kKeys) {
    const std::int64_t unit_size = x_ * element_size;
    copy_strided(head + key_panel_element(offset, dim, head_size_, x_) * element_size,
                 kPanelTokens * unit_size, row, unit_size, num_dims / x_, unit_size);
    return;
  }
  for (std::int64_t i = 0; i < num_dims; i += kPanelDims) {
    copy_strided(head + value_panel_element(offset, dim + i, head_size_, x_) * element_size,
                 x_ * element_size, row + i * element_size, element_size, kPanelDims, element_size);
  }
}

}  // namespace paged_kv::cpu
