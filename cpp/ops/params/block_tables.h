// SPDX-License-Identifier: Apache-2.0
//
// Device-side upkeep of block tables: staged diffs are applied, and the rows of a batch gathered.
//
// Source: vLLM 0.32 v1/worker/gpu/block_table.py::BlockTables and buffer_utils.py
// ::StagedWriteTensor (the contract).
#pragma once

#include "paged_kv/strided_view.h"

#include <cstdint>

namespace paged_kv {

// Write i puts contents[cu_lens[i - 1] .. cu_lens[i]) into row rows[i], from column starts[i] on.
// Writes are applied in order, so the later of two overlapping ones wins.
struct ApplyBlockTableWritesParams {
  MatrixView<std::int32_t> table;           // [max_num_reqs, max_blocks]
  VectorView<const std::int32_t> rows;      // [num_writes]
  VectorView<const std::int32_t> starts;    // [num_writes], first column written
  VectorView<const std::int32_t> cu_lens;   // [num_writes], inclusive running sum of lengths
  VectorView<const std::int32_t> contents;  // [>= cu_lens[-1]], block ids
};

// Row i of `out` gets the valid entries of row idx_mapping[i]; what follows them is left alone and
// may be stale. Padding rows, and rows from num_reqs on, are zeroed (the null block).
struct GatherBlockTablesParams {
  MatrixView<const std::int32_t> table;        // [max_num_reqs, max_blocks]
  VectorView<const std::int32_t> idx_mapping;  // [num_reqs], row of the table; -1 = padding
  VectorView<const std::int32_t> num_blocks;   // [max_num_reqs], valid entries of each table row
  MatrixView<std::int32_t> out;                // [>= num_reqs, >= widest row gathered]
};

}  // namespace paged_kv
