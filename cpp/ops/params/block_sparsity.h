// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace paged_kv {

// The block-sparse pattern of vLLM's paged_attention_v1/v2: a head sees the last `local_blocks`
// blocks and, from a start that slides from head to head, every vert_stride-th one.
struct BlockSparsity {
  std::int64_t local_blocks;
  std::int64_t vert_stride;        // <= 1: every key is seen
  std::int64_t block_size;         // tokens; of the pattern, a multiple of the cache's
  std::int64_t head_sliding_step;  // negative: heads of one kv head share their pattern
  std::int64_t tp_rank;            // shard of the heads that this process has

  [[nodiscard]] constexpr bool enabled() const noexcept { return vert_stride > 1; }

  // Where the pattern of a head starts, in blocks. num_heads and num_kv_heads are this shard's.
  [[nodiscard]] constexpr std::int64_t offset(std::int64_t head, std::int64_t num_heads,
                                              std::int64_t kv_head,
                                              std::int64_t num_kv_heads) const noexcept {
    return head_sliding_step >= 0 ? (tp_rank * num_heads + head) * head_sliding_step + 1
                                  : (tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1;
  }

  [[nodiscard]] constexpr bool visible(std::int64_t key_pos, std::int64_t query_pos,
                                       std::int64_t head_offset) const noexcept {
    const std::int64_t key_block = key_pos / block_size;
    return (key_block + head_offset) % vert_stride == 0 ||
           key_block > query_pos / block_size - local_blocks;
  }
};

}  // namespace paged_kv
