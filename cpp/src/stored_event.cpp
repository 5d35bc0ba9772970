// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/stored_event.h"

#include <algorithm>
#include <utility>

namespace paged_kv {

BlockStored make_block_stored_event(const Request& request, const StoredBlocks& stored,
                                    std::span<const std::uint8_t> is_left_out) {
  const CoarseBlockHashes hashes(request.block_hashes(), stored.hash_block_size, stored.block_size);
  BlockStored event;
  std::int64_t mm_idx = 0;
  for (std::int64_t i = stored.start_block; i < stored.end_block; ++i) {
    const auto position = static_cast<std::size_t>(i - stored.start_block);
    if (!is_left_out.empty() && is_left_out[position] != 0) continue;
    const std::int64_t start = i * stored.block_size;
    BlockExtraKeys extra =
        generate_block_hash_extra_keys(request.keys(), start, start + stored.block_size, mm_idx);
    mm_idx = extra.next_mm_idx;
    event.block_hashes.push_back(hashes[i]);
    event.extra_keys.push_back(std::move(extra.keys));
  }
  if (stored.start_block > 0) event.parent_block_hash = hashes[stored.start_block - 1];

  const auto num_tokens = static_cast<std::size_t>(request.num_tokens());
  const auto begin =
      std::min(static_cast<std::size_t>(stored.start_block * stored.block_size), num_tokens);
  const auto end =
      std::min(static_cast<std::size_t>(stored.end_block * stored.block_size), num_tokens);
  const auto tokens = request.all_token_ids().subspan(begin, end - begin);
  event.token_ids.assign(tokens.begin(), tokens.end());
  event.block_size = stored.block_size;
  event.lora_id = request.options().lora_id;
  if (request.keys().lora) event.lora_name = request.keys().lora->name;
  event.group_idx = stored.kv_cache_group_id;
  event.session_id = request.options().session_id;
  return event;
}

BlockStored make_partial_block_stored_event(const Request& request, std::int64_t hash_block_size,
                                            std::int64_t num_tokens, GroupId kv_cache_group_id) {
  const std::int64_t end_block = num_tokens / hash_block_size;
  return make_block_stored_event(request,
                                 {.hash_block_size = hash_block_size,
                                  .block_size = hash_block_size,
                                  .start_block = end_block - 1,
                                  .end_block = end_block,
                                  .kv_cache_group_id = kv_cache_group_id},
                                 {});
}

}  // namespace paged_kv
