// SPDX-License-Identifier: Apache-2.0
//
// BlockStored events from what a manager knows of a request.
//
// Source: vLLM 0.32 v1/core/block_pool.py::BlockPool._build_block_stored_event.
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/kv_events.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <span>

namespace paged_kv {

// Which blocks of a request were stored.
struct StoredBlocks {
  std::int64_t hash_block_size = 0;  // tokens per hash of the request
  std::int64_t block_size = 0;       // tokens per block
  std::int64_t start_block = 0;
  std::int64_t end_block = 0;
  GroupId kv_cache_group_id;
};

// The event of blocks [start_block, end_block). Block i has a hash in it if is_left_out[i -
// start_block] is 0; an empty span leaves none out. The tokens are those of the whole range.
[[nodiscard]] BlockStored make_block_stored_event(const Request& request,
                                                  const StoredBlocks& stored,
                                                  std::span<const std::uint8_t> is_left_out);

// The event of the last hash before `num_tokens`, a part of a block.
[[nodiscard]] BlockStored make_partial_block_stored_event(const Request& request,
                                                          std::int64_t hash_block_size,
                                                          std::int64_t num_tokens,
                                                          GroupId kv_cache_group_id);

}  // namespace paged_kv
