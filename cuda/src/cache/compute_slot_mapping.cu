// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/block_tables.h"
#include "paged_kv/cuda/division.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/math.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 256;
constexpr std::int64_t kPaddingRow = -1;

// kPaddingRow also for a row that the table does not have.
__device__ std::int64_t row_of(const SlotMappingParams& p, std::int64_t seq) {
  const std::int64_t row = p.idx_mapping.data == nullptr ? seq : p.idx_mapping[seq];
  return row >= 0 && row < p.block_tables.num_rows ? row : kPaddingRow;
}

__device__ std::int64_t slot_of(const SlotMappingParams& p, std::int64_t row,
                                std::int64_t position) {
  if (position < 0) return kPadSlot;
  const Division place = divide(position, p.block_size);
  if (place.quotient >= p.block_tables.num_cols) return kPadSlot;
  const std::int64_t block = p.block_tables(row, place.quotient);
  return block < 0 ? kPadSlot : block * p.block_size + place.remainder;
}

// Grid: (num_seqs + 1). Block s < num_seqs maps the tokens of sequence s, the last one the padding.
__global__ void __launch_bounds__(kNumThreads)
    compute_slot_mapping_kernel(const __grid_constant__ SlotMappingParams p) {
  const std::int64_t seq = blockIdx.x;
  const std::int64_t num_seqs = p.query_start_loc.size - 1;
  const std::int64_t num_mappable = min(p.positions.size, p.slot_mapping.size);
  const std::int64_t thread = threadIdx.x;
  if (seq == num_seqs) {
    const std::int64_t num_tokens = max(p.query_start_loc[num_seqs], 0);
    const std::int64_t first_unmapped = min(num_tokens, num_mappable);
    for (std::int64_t i = first_unmapped + thread; i < p.slot_mapping.size; i += kNumThreads) {
      p.slot_mapping[i] = kPadSlot;
    }
    return;
  }
  const std::int64_t row = row_of(p, seq);
  const std::int64_t first = max(p.query_start_loc[seq], 0);
  const std::int64_t end = min(std::int64_t{p.query_start_loc[seq + 1]}, num_mappable);
  for (std::int64_t token = first + thread; token < end; token += kNumThreads) {
    p.slot_mapping[token] = row == kPaddingRow ? kPadSlot : slot_of(p, row, p.positions[token]);
  }
}

}  // namespace

void compute_slot_mapping(const SlotMappingParams& params, cudaStream_t stream) {
  const auto num_blocks =
      narrow<std::int32_t>(params.query_start_loc.size, "query_start_loc: size");
  const dim3 grid(static_cast<unsigned>(num_blocks));
  launch(&compute_slot_mapping_kernel, grid, kNumThreads, 0, stream, params);
}

}  // namespace paged_kv::cuda
