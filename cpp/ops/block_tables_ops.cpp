// SPDX-License-Identifier: Apache-2.0
#include "ops/block_tables_checks.h"
#include "ops/boxed.h"
#include "ops/cpu/block_tables.h"
#include "ops/registration.h"

#include <cstdint>
#include <optional>

namespace paged_kv {
namespace {

void compute_slot_mapping_op(const Tensor& query_start_loc, const Tensor& positions,
                             const Tensor& block_tables, const Tensor& slot_mapping,
                             std::int64_t block_size, const std::optional<Tensor>& idx_mapping) {
  compute_slot_mapping(checked_slot_mapping_params(OpDevice::kCpu, query_start_loc, positions,
                                                   block_tables, slot_mapping, block_size,
                                                   idx_mapping));
}

void apply_block_table_writes(const Tensor& table, const Tensor& rows, const Tensor& starts,
                              const Tensor& cu_lens, const Tensor& contents) {
  cpu::apply_block_table_writes(
      checked_block_table_writes(OpDevice::kCpu, table, rows, starts, cu_lens, contents));
}

void gather_block_tables(const Tensor& table, const Tensor& idx_mapping, const Tensor& num_blocks,
                         const Tensor& out) {
  cpu::gather_block_tables(
      checked_gather_block_tables(OpDevice::kCpu, table, idx_mapping, num_blocks, out));
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("compute_slot_mapping", PAGED_KV_BOX(&compute_slot_mapping_op));
  m.impl("apply_block_table_writes", PAGED_KV_BOX(&apply_block_table_writes));
  m.impl("gather_block_tables", PAGED_KV_BOX(&gather_block_tables));
}

}  // namespace paged_kv
