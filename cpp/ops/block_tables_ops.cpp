// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/block_tables.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"
#include "paged_kv/slot_mapping.h"

#include <cstdint>
#include <optional>

namespace paged_kv {
namespace {

void check_int32(const Tensor& tensor, const char* name, const char* dim, NamedSizes& sizes) {
  check(tensor, name, sizes).shape({dim}).dtype(ScalarType::Int);
}

void compute_slot_mapping_op(const Tensor& query_start_loc, const Tensor& positions,
                             const Tensor& block_tables, const Tensor& slot_mapping,
                             std::int64_t block_size, const std::optional<Tensor>& idx_mapping) {
  NamedSizes sizes;
  check_int32(query_start_loc, "query_start_loc", "num_seqs + 1", sizes);
  check(positions, "positions", sizes).shape({"num_positions"}).dtype(ScalarType::Long);
  check(block_tables, "block_tables", sizes)
      .shape({"num_rows", "max_blocks"})
      .dtype(ScalarType::Int);
  check(slot_mapping, "slot_mapping", sizes)
      .shape({"max_num_tokens"})
      .dtype(ScalarType::Long)
      .writable();
  if (idx_mapping) {
    check_int32(*idx_mapping, "idx_mapping", "num_seqs", sizes);
    PAGED_KV_CHECK(sizes["num_seqs"] + 1 == sizes["num_seqs + 1"], "idx_mapping: expected ",
                   sizes["num_seqs + 1"] - 1, " entries, one less than query_start_loc has, got ",
                   sizes["num_seqs"]);
  }
  compute_slot_mapping({.query_start_loc = vector_view<const std::int32_t>(query_start_loc),
                        .positions = vector_view<const std::int64_t>(positions),
                        .block_tables = matrix_view<const std::int32_t>(block_tables),
                        .idx_mapping = vector_view<const std::int32_t>(idx_mapping),
                        .slot_mapping = vector_view<std::int64_t>(slot_mapping),
                        .block_size = block_size});
}

void apply_block_table_writes(const Tensor& table, const Tensor& rows, const Tensor& starts,
                              const Tensor& cu_lens, const Tensor& contents) {
  NamedSizes sizes;
  check(table, "table", sizes)
      .shape({"max_num_reqs", "max_blocks"})
      .dtype(ScalarType::Int)
      .writable();
  check_int32(rows, "rows", "num_writes", sizes);
  check_int32(starts, "starts", "num_writes", sizes);
  check_int32(cu_lens, "cu_lens", "num_writes", sizes);
  check_int32(contents, "contents", "num_contents", sizes);
  cpu::apply_block_table_writes({.table = matrix_view<std::int32_t>(table),
                                 .rows = vector_view<const std::int32_t>(rows),
                                 .starts = vector_view<const std::int32_t>(starts),
                                 .cu_lens = vector_view<const std::int32_t>(cu_lens),
                                 .contents = vector_view<const std::int32_t>(contents)});
}

void gather_block_tables(const Tensor& table, const Tensor& idx_mapping, const Tensor& num_blocks,
                         const Tensor& out) {
  NamedSizes sizes;
  check(table, "table", sizes).shape({"max_num_reqs", "max_blocks"}).dtype(ScalarType::Int);
  check_int32(idx_mapping, "idx_mapping", "num_reqs", sizes);
  check_int32(num_blocks, "num_blocks", "max_num_reqs", sizes);
  check(out, "out", sizes)
      .shape({"num_out_rows", "num_out_columns"})
      .dtype(ScalarType::Int)
      .writable();
  cpu::gather_block_tables({.table = matrix_view<const std::int32_t>(table),
                            .idx_mapping = vector_view<const std::int32_t>(idx_mapping),
                            .num_blocks = vector_view<const std::int32_t>(num_blocks),
                            .out = matrix_view<std::int32_t>(out)});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_kv, CPU, m) {
  m.impl("compute_slot_mapping", PAGED_KV_BOX(&compute_slot_mapping_op));
  m.impl("apply_block_table_writes", PAGED_KV_BOX(&apply_block_table_writes));
  m.impl("gather_block_tables", PAGED_KV_BOX(&gather_block_tables));
}

}  // namespace paged_kv
