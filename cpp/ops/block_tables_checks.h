// SPDX-License-Identifier: Apache-2.0
//
// Checks of the block table ops' tensors, and the Params that follow from them: the same for each
// device. Values (rows, lengths, ids) are checked by the CPU's kernels, which can read them.
#pragma once

#include "ops/params/block_tables.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"
#include "paged_kv/slot_mapping.h"

#include <cstdint>
#include <optional>

namespace paged_kv {

inline void check_int32_vector(const Tensor& tensor, const char* name, const char* dim,
                               NamedSizes& sizes) {
  check(tensor, name, sizes).shape({dim}).dtype(ScalarType::Int);
}

[[nodiscard]] inline SlotMappingParams checked_slot_mapping_params(
    OpDevice device, const Tensor& query_start_loc, const Tensor& positions,
    const Tensor& block_tables, const Tensor& slot_mapping, std::int64_t block_size,
    const std::optional<Tensor>& idx_mapping) {
  NamedSizes sizes(device);
  check_int32_vector(query_start_loc, "query_start_loc", "num_seqs + 1", sizes);
  PAGED_KV_CHECK(sizes["num_seqs + 1"] >= 1, "query_start_loc: expected [num_seqs + 1], got [0]");
  check(positions, "positions", sizes).shape({"num_positions"}).dtype(ScalarType::Long);
  check(block_tables, "block_tables", sizes)
      .shape({"num_rows", "max_blocks"})
      .dtype(ScalarType::Int);
  check(slot_mapping, "slot_mapping", sizes)
      .shape({"max_num_tokens"})
      .dtype(ScalarType::Long)
      .writable();
  const std::int64_t num_seqs = sizes["num_seqs + 1"] - 1;
  if (idx_mapping) {
    check_int32_vector(*idx_mapping, "idx_mapping", "num_seqs", sizes);
    PAGED_KV_CHECK(sizes["num_seqs"] == num_seqs, "idx_mapping: expected ", num_seqs,
                   " entries, one less than query_start_loc has, got ", sizes["num_seqs"]);
  } else {
    PAGED_KV_CHECK(num_seqs <= sizes["num_rows"], "block_tables: expected at least ", num_seqs,
                   " rows, one a sequence, got ", sizes["num_rows"]);
  }
  PAGED_KV_CHECK(block_size > 0 && block_size <= kMaxBlockSize,
                 "block_size: expected to be in [1, ", kMaxBlockSize, "], got ", block_size);
  return {.query_start_loc = vector_view<const std::int32_t>(query_start_loc),
          .positions = vector_view<const std::int64_t>(positions),
          .block_tables = matrix_view<const std::int32_t>(block_tables),
          .idx_mapping = vector_view<const std::int32_t>(idx_mapping),
          .slot_mapping = vector_view<std::int64_t>(slot_mapping),
          .block_size = block_size};
}

[[nodiscard]] inline ApplyBlockTableWritesParams checked_block_table_writes(
    OpDevice device, const Tensor& table, const Tensor& rows, const Tensor& starts,
    const Tensor& cu_lens, const Tensor& contents) {
  NamedSizes sizes(device);
  check(table, "table", sizes)
      .shape({"max_num_reqs", "max_blocks"})
      .dtype(ScalarType::Int)
      .writable();
  check_int32_vector(rows, "rows", "num_writes", sizes);
  check_int32_vector(starts, "starts", "num_writes", sizes);
  check_int32_vector(cu_lens, "cu_lens", "num_writes", sizes);
  check_int32_vector(contents, "contents", "num_contents", sizes);
  return {.table = matrix_view<std::int32_t>(table),
          .rows = vector_view<const std::int32_t>(rows),
          .starts = vector_view<const std::int32_t>(starts),
          .cu_lens = vector_view<const std::int32_t>(cu_lens),
          .contents = vector_view<const std::int32_t>(contents)};
}

[[nodiscard]] inline GatherBlockTablesParams checked_gather_block_tables(OpDevice device,
                                                                         const Tensor& table,
                                                                         const Tensor& idx_mapping,
                                                                         const Tensor& num_blocks,
                                                                         const Tensor& out) {
  NamedSizes sizes(device);
  check(table, "table", sizes).shape({"max_num_reqs", "max_blocks"}).dtype(ScalarType::Int);
  check_int32_vector(idx_mapping, "idx_mapping", "num_reqs", sizes);
  check_int32_vector(num_blocks, "num_blocks", "max_num_reqs", sizes);
  check(out, "out", sizes)
      .shape({"num_out_rows", "num_out_columns"})
      .dtype(ScalarType::Int)
      .writable();
  PAGED_KV_CHECK(sizes["num_out_rows"] >= sizes["num_reqs"], "out: expected at least ",
                 sizes["num_reqs"], " rows, one an entry of idx_mapping, got ",
                 sizes["num_out_rows"]);
  return {.table = matrix_view<const std::int32_t>(table),
          .idx_mapping = vector_view<const std::int32_t>(idx_mapping),
          .num_blocks = vector_view<const std::int32_t>(num_blocks),
          .out = matrix_view<std::int32_t>(out)};
}

}  // namespace paged_kv
