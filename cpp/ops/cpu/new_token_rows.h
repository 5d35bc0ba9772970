// SPDX-License-Identifier: Apache-2.0
//
// The rows that a cache will hold of a few new tokens, dense: in place where the tokens are so
// already, else converted or copied into a tile.
#pragma once

#include "ops/cpu/token_move.h"
#include "ops/params/reshape_and_cache.h"

#include <cstddef>
#include <cstdint>

namespace paged_kv::cpu {

// What a tile holds at most. Dims are whole 16-byte chunks of every element type.
inline constexpr std::int64_t kTileTokens = 16;
inline constexpr std::int64_t kTileDims = 128;

// Row i, of token i of a tile, begins at data + i * stride_bytes.
struct DenseRows {
  const std::byte* data;
  std::int64_t stride_bytes;
};

class NewTokenRows {
 public:
  NewTokenRows(const NewTokens& tokens, const ElementConversion& conversion)
      : data_(static_cast<const std::byte*>(tokens.data)),
        token_stride_(tokens.token_stride * conversion.src_element_size),
        head_stride_(tokens.strides.head * conversion.src_element_size),
        dim_stride_(tokens.strides.dim * conversion.src_element_size),
        conversion_(conversion) {}

  // Of num_tokens <= kTileTokens tokens, num_dims <= kTileDims dims from `dim` on. Valid as long as
  // `tile`, which has room for kTileTokens * kTileDims elements of 4 bytes.
  [[nodiscard]] DenseRows rows(std::int64_t first_token, std::int64_t num_tokens, std::int64_t head,
                               std::int64_t dim, std::int64_t num_dims,
                               std::byte* tile) const noexcept;

 private:
  const std::byte* data_;
  std::int64_t token_stride_;  // in bytes, as all strides here
  std::int64_t head_stride_;
  std::int64_t dim_stride_;
  ElementConversion conversion_;
};

}  // namespace paged_kv::cpu
