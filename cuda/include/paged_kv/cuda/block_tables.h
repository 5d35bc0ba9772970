// SPDX-License-Identifier: Apache-2.0
//
// Block tables and slots on the device. Contracts: paged_kv/slot_mapping.h, ops/params/
// block_tables.h; all pointers are device memory.
//
// The host cannot read values without waiting for the device, so they are not checked. An index out
// of range touches no memory outside the tensors: a slot becomes kPadSlot, a write is left out or
// cut at the table's end, a gathered row is padding or cut.
#pragma once

#include "ops/params/block_tables.h"
#include "paged_kv/slot_mapping.h"

#include <cuda_runtime.h>

namespace paged_kv::cuda {

// One block a sequence, and one for the padding.
void compute_slot_mapping(const SlotMappingParams& params, cudaStream_t stream);

// One block a write; the block of a row's first write applies all writes of that row, in order.
void apply_block_table_writes(const ApplyBlockTableWritesParams& params, cudaStream_t stream);

// One block a row of out and tile of columns.
void gather_block_tables(const GatherBlockTablesParams& params, cudaStream_t stream);

}  // namespace paged_kv::cuda
