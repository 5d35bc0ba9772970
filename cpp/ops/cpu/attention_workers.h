// SPDX-License-Identifier: Apache-2.0
//
// One AttentionTile a thread, and the items that they take turns at.
#pragma once

#include "ops/cpu/attention_tile.h"
#include "ops/cpu/scratch.h"

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace paged_kv::cpu {

// How many threads the batch is worth.
[[nodiscard]] inline std::int64_t max_useful_threads(const PagedAttentionParams& params) {
  double num_logits = 0;  // of one head, masked ones included; a double cannot overflow
  for (std::int64_t seq = 0; seq < params.batch.num_seqs(); ++seq) {
    num_logits += static_cast<double>(params.batch.query_len(seq)) * params.batch.seq_lens[seq];
  }
  const double products = num_logits * static_cast<double>(params.num_heads * params.head_size);
  const auto per_thread = static_cast<double>(params.min_products_per_thread);
  return 1 + static_cast<std::int64_t>(std::min(products / per_thread, 1e6));
}

[[nodiscard]] inline std::int64_t num_workers(const PagedAttentionParams& params,
                                              const ThreadRunner& runner) {
  return std::min(runner.num_threads(), max_useful_threads(params));
}

// f(attention_tile, item, next_item) for the items [0, num_items): each worker takes the next one
// when it is about to be done with its last, since their costs differ. It does so at the first call
// of next_item(), which returns its own next item, or num_items or more if there is none. Which
// worker takes which changes no result.
// The tiles' memory comes from `scratch`, which no other call may use meanwhile.
template <class F>
void for_each_item(const PagedAttentionParams& params, std::int64_t num_items,
                   std::int64_t num_workers, const ThreadRunner& runner, Scratch& scratch,
                   const F& f) {
  ScratchCutter sizes(nullptr);
  (void)AttentionTile(params, sizes);
  const std::int64_t tile_bytes = sizes.num_bytes();
  std::byte* memory = scratch.reserve(num_workers * tile_bytes);

  constexpr std::int64_t kNotTaken = -1;
  std::atomic<std::int64_t> first_free{0};
  parallel_for(
      runner, std::min(num_workers, num_items), 1, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t worker = begin; worker < end; ++worker) {
          ScratchCutter cutter(memory + worker * tile_bytes);
          AttentionTile tile(params, cutter);
          const auto take = [&] { return first_free.fetch_add(1, std::memory_order_relaxed); };
          for (std::int64_t item = take(); item < num_items;) {
            std::int64_t next = kNotTaken;
            const auto next_item = [&] { return next = next == kNotTaken ? take() : next; };
            f(tile, item, next_item);
            item = next_item();
          }
        }
      });
}

}  // namespace paged_kv::cpu
