// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"
#include "ops/block_tables_checks.h"
#include "ops/boxed.h"
#include "ops/registration.h"
#include "paged_kv/cuda/block_tables.h"

#include <cstdint>
#include <optional>

namespace paged_kv::cuda {
namespace {

void compute_slot_mapping_op(const Tensor& query_start_loc, const Tensor& positions,
                             const Tensor& block_tables, const Tensor& slot_mapping,
                             std::int64_t block_size, const std::optional<Tensor>& idx_mapping) {
  const SlotMappingParams params = checked_slot_mapping_params(
      kOpDevice, query_start_loc, positions, block_tables, slot_mapping, block_size, idx_mapping);
  const CurrentStream current(slot_mapping);
  compute_slot_mapping(params, current.stream());
}

void apply_block_table_writes_op(const Tensor& table, const Tensor& rows, const Tensor& starts,
                                 const Tensor& cu_lens, const Tensor& contents) {
  const ApplyBlockTableWritesParams params =
      checked_block_table_writes(kOpDevice, table, rows, starts, cu_lens, contents);
  const CurrentStream current(table);
  apply_block_table_writes(params, current.stream());
}

void gather_block_tables_op(const Tensor& table, const Tensor& idx_mapping,
                            const Tensor& num_blocks, const Tensor& out) {
  const GatherBlockTablesParams params =
      checked_gather_block_tables(kOpDevice, table, idx_mapping, num_blocks, out);
  const CurrentStream current(out);
  gather_block_tables(params, current.stream());
}

}  // namespace

PAGED_KV_CUDA_OPS(m) {
  m.impl("compute_slot_mapping", PAGED_KV_BOX(&compute_slot_mapping_op));
  m.impl("apply_block_table_writes", PAGED_KV_BOX(&apply_block_table_writes_op));
  m.impl("gather_block_tables", PAGED_KV_BOX(&gather_block_tables_op));
}

}  // namespace paged_kv::cuda
