// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/gather_cache.h"

#include "ops/cpu/panel_tokens.h"
#include "ops/cpu/token_move.h"
#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstddef>

namespace paged_kv::cpu {
namespace {

std::int64_t seq_start(const GatherCacheParams& p, std::int64_t seq) {
  return p.seq_starts.data == nullptr ? 0 : p.seq_starts[seq];
}

void check_lengths(const GatherCacheParams& p) {
  const std::int64_t num_seqs = p.cu_seq_lens.size - 1;
  PAGED_KV_CHECK(p.cu_seq_lens[0] == 0, "cu_seq_lens: expected to start at 0, got ",
                 p.cu_seq_lens[0]);
  for (std::int64_t seq = 0; seq < num_seqs; ++seq) {
    PAGED_KV_CHECK(p.cu_seq_lens[seq] <= p.cu_seq_lens[seq + 1],
                   "cu_seq_lens: expected not to decrease, got ", p.cu_seq_lens[seq], " then ",
                   p.cu_seq_lens[seq + 1], " at ", seq + 1);
    PAGED_KV_CHECK(seq_start(p, seq) >= 0, "seq_starts[", seq,
                   "]: expected not to be negative, got ", seq_start(p, seq));
  }
  PAGED_KV_CHECK(p.cu_seq_lens[num_seqs] <= p.num_out_tokens,
                 "out: expected at least cu_seq_lens[-1] = ", p.cu_seq_lens[num_seqs],
                 " tokens, got ", p.num_out_tokens);
}

// Checks that the table has, and names existing blocks for, every token that is read.
void check_blocks(const GatherCacheParams& p, std::int64_t seq) {
  const std::int64_t start = seq_start(p, seq);
  const std::int64_t end = start + p.cu_seq_lens[seq + 1] - p.cu_seq_lens[seq];
  if (start == end) {
    return;
  }
  PAGED_KV_CHECK(ceil_div(end, p.block_size) <= p.block_tables.num_cols, "block_tables[", seq,
                 "]: expected blocks for ", end, " tokens, got ", p.block_tables.num_cols, " of ",
                 p.block_size, " tokens");
  for (std::int64_t i = start / p.block_size; i <= (end - 1) / p.block_size; ++i) {
    const std::int64_t block = p.block_tables(seq, i);
    PAGED_KV_CHECK(block >= 0 && block < p.num_blocks, "block_tables[", seq, ", ", i,
                   "]: expected to be in [0, ", p.num_blocks, "), got ", block);
  }
}

// move(block, offset, row of out) takes a token there.
template <class Move>
void gather_range(const GatherCacheParams& p, const ElementConversion& conversion, Move&& move,
                  std::int64_t begin, std::int64_t end) {
  const auto* cache = static_cast<const std::byte*>(p.cache);
  auto* out = static_cast<std::byte*>(p.out);
  // The sequence that holds token `begin`: the last one that starts at or before it.
  std::int64_t seq = 0;
  for (std::int64_t high = p.cu_seq_lens.size - 1; high - seq > 1;) {
    const std::int64_t middle = seq + (high - seq) / 2;
    (p.cu_seq_lens[middle] <= begin ? seq : high) = middle;
  }
  for (std::int64_t token = begin; token < end; ++token) {
    while (token >= p.cu_seq_lens[seq + 1]) {
      ++seq;
    }
    const std::int64_t position = seq_start(p, seq) + token - p.cu_seq_lens[seq];
    const std::int64_t block = p.block_tables(seq, position / p.block_size);
    move(cache + block * p.block_stride * conversion.src_element_size, position % p.block_size,
         out + token * p.out_token_stride * conversion.dst_element_size);
  }
}

}  // namespace

void gather_cache(const GatherCacheParams& p, const ThreadRunner& runner) {
  PAGED_KV_CHECK(p.block_size > 0, "cache: expected block_size of at least 1, got 0");
  check_lengths(p);
  const std::int64_t num_seqs = p.cu_seq_lens.size - 1;
  for (std::int64_t seq = 0; seq < num_seqs; ++seq) {
    check_blocks(p, seq);
  }
  const ElementConversion conversion =
      conversion_from_cache(p.kv_cache_dtype, p.scale, p.dtype, p.element_size);
  const std::int64_t bytes_per_token =
      p.num_kv_heads * p.head_size * std::max(conversion.src_element_size, p.element_size);
  const auto gather = [&](auto&& move) {
    parallel_for(runner, p.cu_seq_lens[num_seqs], copies_per_task(bytes_per_token),
                 [&](std::int64_t begin, std::int64_t end) {
                   gather_range(p, conversion, move, begin, end);
                 });
  };
  if (p.panels != CachePanels::kNone) {
    return gather(PanelTokenMover(p.panels, panel_x(p.dtype, p.kv_cache_dtype), conversion,
                                  p.num_kv_heads, p.head_size, p.cache_strides.head,
                                  p.out_strides));
  }
  const TokenMover move(conversion, p.num_kv_heads, p.head_size, p.cache_strides, p.out_strides);
  const std::int64_t offset_stride = p.offset_stride * conversion.src_element_size;
  gather([&](const std::byte* block, std::int64_t offset, std::byte* row) {
    move(block + offset * offset_stride, row);
  });
}

}  // namespace paged_kv::cpu
