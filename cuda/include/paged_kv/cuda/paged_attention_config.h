// SPDX-License-Identifier: Apache-2.0
//
// What paged_attention_v1 and _v2 can take on the device, what shared memory they use, and which of
// the two to run: arithmetic on the host.
#pragma once

#include "ops/params/partitions.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace paged_kv::cuda {

inline constexpr std::array<std::int64_t, 9> kHeadSizes = {32, 64, 80, 96, 112, 120, 128, 192, 256};

// A key is read in chunks of this size: the x-packed layout's x, in bytes.
inline constexpr int kChunkBytes = 16;
// A warp handles this many tokens at a time, one a lane.
inline constexpr int kTileTokens = 32;
// A row of values is read in vectors of this many tokens.
inline constexpr int kVectorTokens = 8;
inline constexpr int kNumAttentionWarps = 4;

// Whole vectors of values: no vector has tokens of two blocks.
[[nodiscard]] constexpr bool is_supported_block_size(std::int64_t block_size) noexcept {
  return block_size > 0 && block_size % kVectorTokens == 0;
}

// In the list, and whole chunks of `cache_element_bytes`-byte elements.
[[nodiscard]] constexpr bool is_supported_head_size(std::int64_t head_size,
                                                    std::int64_t cache_element_bytes) noexcept {
  return std::find(kHeadSizes.begin(), kHeadSizes.end(), head_size) != kHeadSizes.end() &&
         head_size * cache_element_bytes % kChunkBytes == 0;
}

// Shared memory of a block of threads, in v1 and v2: the query, each warp's part of the output, two
// values of each warp. The logits follow, aligned.
[[nodiscard]] constexpr std::int64_t static_shared_bytes(std::int64_t head_size) noexcept {
  constexpr std::int64_t kAlignment = 128;
  const std::int64_t num_floats = (1 + kNumAttentionWarps) * head_size + 2 * kNumAttentionWarps;
  return round_up(static_cast<std::int64_t>(sizeof(float)) * num_floats, kAlignment);
}

// One float32 logit a token, of whole tiles. `num_tokens`: of a partition; in v1 of a sequence.
[[nodiscard]] constexpr std::int64_t logits_bytes(std::int64_t num_tokens) noexcept {
  return static_cast<std::int64_t>(sizeof(float)) * round_up<std::int64_t>(num_tokens, kTileTokens);
}

// The longest sequence whose logits fit, with what else v1 needs, into `max_shared_bytes` (of a
// block, with opt-in: 227 KiB on sm_90, 163 KiB on sm_80, 99 KiB on sm_86 and sm_89).
[[nodiscard]] constexpr std::int64_t max_v1_seq_len(std::int64_t head_size,
                                                    std::int64_t max_shared_bytes) noexcept {
  const std::int64_t available = max_shared_bytes - static_shared_bytes(head_size);
  return available < 0 ? 0 : available / logits_bytes(kTileTokens) * kTileTokens;
}

// Whether a decode step should run v1 rather than v2. v1 has no partitions to join; v2 has more
// blocks of threads and bounded shared memory. So v1 is for one partition, and for batches that
// fill the device without partitions, unless a single block would take too long.
//
// Source: vLLM 0.6 attention/ops/paged_attn.py PagedAttention.forward_decode.
[[nodiscard]] constexpr bool use_v1(std::int64_t max_seq_len, std::int64_t num_seqs,
                                    std::int64_t num_heads, std::int64_t head_size,
                                    std::int64_t max_shared_bytes) noexcept {
  constexpr std::int64_t kMaxSeqLen = 8192;
  constexpr std::int64_t kEnoughRows = 512;
  if (max_seq_len > kMaxSeqLen || max_seq_len > max_v1_seq_len(head_size, max_shared_bytes)) {
    return false;
  }
  return num_partitions(max_seq_len) == 1 || num_seqs * num_heads > kEnoughRows;
}

}  // namespace paged_kv::cuda
