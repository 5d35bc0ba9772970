// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/block_tables.h"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/reduce.cuh"
#include "paged_kv/math.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 128;

// The lanes whose write, first + lane, is to `row`. All lanes of the warp call it.
__device__ unsigned writes_to(const ApplyBlockTableWritesParams& p, std::int64_t row,
                              std::int64_t first, std::int64_t end, int lane) {
  const std::int64_t write = first + lane;
  return __ballot_sync(kFullWarp, write < end && p.rows[write] == row);
}

// A thread writes the columns that are its own number modulo kNumThreads: all calls give a column
// to the same thread, so the order of calls is the order of writes, without a barrier.
__device__ void apply_write(const ApplyBlockTableWritesParams& p, std::int64_t row,
                            std::int64_t write, int thread) {
  const std::int64_t first_content = write == 0 ? 0 : max(p.cu_lens[write - 1], 0);
  const std::int64_t start = p.starts[write];
  const std::int64_t length = min(std::int64_t{p.cu_lens[write]}, p.contents.size) - first_content;
  if (start < 0) return;
  const std::int64_t end = min(start + length, p.table.num_cols);
  static_assert((kNumThreads & (kNumThreads - 1)) == 0);
  const std::int64_t first = start + ((thread - start) & (kNumThreads - 1));
  for (std::int64_t col = first; col < end; col += kNumThreads) {
    p.table(row, col) = p.contents[first_content + col - start];
  }
}

// Grid: (num_writes).
__global__ void __launch_bounds__(kNumThreads)
    apply_block_table_writes_kernel(const __grid_constant__ ApplyBlockTableWritesParams p) {
  const std::int64_t first_write = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % warpSize;
  const std::int64_t row = p.rows[first_write];
  if (row < 0 || row >= p.table.num_rows) return;
  for (std::int64_t i = 0; i < first_write; i += warpSize) {
    if (writes_to(p, row, i, first_write, lane) != 0) return;  // an earlier block's row
  }
  for (std::int64_t i = first_write; i < p.rows.size; i += warpSize) {
    unsigned writes = writes_to(p, row, i, p.rows.size, lane);
    for (; writes != 0; writes &= writes - 1) {
      apply_write(p, row, i + __ffs(static_cast<int>(writes)) - 1, thread);
    }
  }
}

}  // namespace

void apply_block_table_writes(const ApplyBlockTableWritesParams& params, cudaStream_t stream) {
  if (params.rows.size == 0) return;
  const dim3 grid(static_cast<unsigned>(narrow<std::int32_t>(params.rows.size, "rows: size")));
  launch(&apply_block_table_writes_kernel, grid, kNumThreads, 0, stream, params);
}

}  // namespace paged_kv::cuda
