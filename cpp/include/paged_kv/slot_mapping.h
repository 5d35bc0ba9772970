// SPDX-License-Identifier: Apache-2.0
//
// Where each token of a batch lies in the cache: slot = block * block_size + offset in the block.
//
// Source: vLLM 0.32 v1/worker/gpu/block_table.py::BlockTables.compute_slot_mappings.
#pragma once

#include "paged_kv/strided_view.h"

#include <cstdint>
#include <limits>

namespace paged_kv {

// A slot that no writer writes.
inline constexpr std::int64_t kPadSlot = -1;
// Keeps block * block_size within 64 bits for every block id.
inline constexpr std::int64_t kMaxBlockSize = std::numeric_limits<std::int32_t>::max();

struct SlotMappingParams {
  VectorView<const std::int32_t> query_start_loc;  // [num_seqs + 1], starts at 0
  VectorView<const std::int64_t> positions;        // [>= num_tokens], position in the sequence
  MatrixView<const std::int32_t> block_tables;     // [num_rows, max_blocks]
  VectorView<const std::int32_t> idx_mapping;      // [num_seqs] rows, -1 = padding; null: row s
  VectorView<std::int64_t> slot_mapping;           // [>= num_tokens], written
  std::int64_t block_size;
};

// Writes all of slot_mapping: the slots of the num_tokens = query_start_loc[num_seqs] tokens, and
// kPadSlot for the tokens of padding rows and past the last token. Positions of padding rows and
// table entries that no token uses are not read.
// Throws std::invalid_argument, with nothing written, if the starts decrease, a vector is too
// short, a row or a used block id is out of range, or a position lies outside its row's blocks.
// Cost: O(slot_mapping.size).
void compute_slot_mapping(const SlotMappingParams& params);

}  // namespace paged_kv
