// SPDX-License-Identifier: Apache-2.0
//
// From what a row has gathered to what an op returns.
#pragma once

#include "ops/cpu/attention_tile.h"

#include <cstdint>

namespace paged_kv::cpu {

// Writes the weighted mean of the values, head_size elements of the query's type; zeros without
// visible keys. With `use_sinks`, the head's sink takes its share of the weight.
void write_output(const PagedAttentionParams& params, const AttentionRow& row, std::int64_t head,
                  bool use_sinks, void* out);

// Writes out and lse of a (query, head): `token` is the query's row of the batch.
void write_result(const PagedAttentionParams& params, const AttentionRow& row, std::int64_t token,
                  std::int64_t head);

}  // namespace paged_kv::cpu
