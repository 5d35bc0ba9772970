// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/new_token_rows.h"

#include "ops/cpu/strided_row.h"

namespace paged_kv::cpu {

DenseRows NewTokenRows::rows(std::int64_t first_token, std::int64_t num_tokens, std::int64_t head,
                             std::int64_t dim, std::int64_t num_dims,
                             std::byte* tile) const noexcept {
  const auto [convert, scale, src_size, dst_size] = conversion_;
  const std::byte* src =
      data_ + first_token * token_stride_ + head * head_stride_ + dim * dim_stride_;
  const bool is_dense = dim_stride_ == src_size;
  if (is_dense && convert == nullptr) return {src, token_stride_};
  const std::int64_t row_bytes = num_dims * dst_size;
  for (std::int64_t i = 0; i < num_tokens; ++i, src += token_stride_) {
    std::byte* row = tile + i * row_bytes;
    if (is_dense) {
      convert(src, scale[head], num_dims, row);
    } else if (convert == nullptr) {
      copy_strided(src, dim_stride_, row, src_size, num_dims, src_size);
    } else {
      std::byte dense[kTileDims * sizeof(float)];
      copy_strided(src, dim_stride_, dense, src_size, num_dims, src_size);
      convert(dense, scale[head], num_dims, row);
    }
  }
  return {tile, row_bytes};
}

}  // namespace paged_kv::cpu
