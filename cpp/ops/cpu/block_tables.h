// SPDX-License-Identifier: Apache-2.0
//
// Block table ops on the CPU. Every index is checked before the first write: std::invalid_argument,
// nothing changed.
#pragma once

#include "ops/params/block_tables.h"

namespace paged_kv::cpu {

// Cost: O(ids written).
void apply_block_table_writes(const ApplyBlockTableWritesParams& params);

// Cost: O(ids gathered + width * padding rows).
void gather_block_tables(const GatherBlockTablesParams& params);

}  // namespace paged_kv::cpu
