// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/block_tables.h"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/math.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 256;
constexpr std::int64_t kMaxColumns = std::int64_t{65535} * kNumThreads;  // 65535: of a grid's y
constexpr std::int64_t kPaddingRow = -1;

__device__ std::int64_t row_of(const GatherBlockTablesParams& p, std::int64_t out_row) {
  if (out_row >= p.idx_mapping.size) return kPaddingRow;
  const std::int64_t row = p.idx_mapping[out_row];
  return row >= 0 && row < min(p.table.num_rows, p.num_blocks.size) ? row : kPaddingRow;
}

// Grid: (rows of out, tiles of kNumThreads columns).
__global__ void __launch_bounds__(kNumThreads)
    gather_block_tables_kernel(const __grid_constant__ GatherBlockTablesParams p) {
  const std::int64_t out_row = blockIdx.x;
  const std::int64_t col = std::int64_t{blockIdx.y} * kNumThreads + threadIdx.x;
  if (col >= p.out.num_cols) return;
  const std::int64_t row = row_of(p, out_row);
  if (row == kPaddingRow) {
    p.out(out_row, col) = 0;
  } else if (col < min(std::int64_t{p.num_blocks[row]}, p.table.num_cols)) {
    p.out(out_row, col) = p.table(row, col);
  }
}

}  // namespace

void gather_block_tables(const GatherBlockTablesParams& params, cudaStream_t stream) {
  if (params.out.num_rows == 0 || params.out.num_cols == 0) return;
  PAGED_KV_CHECK(params.out.num_cols <= kMaxColumns, "out: expected at most ", kMaxColumns,
                 " columns, got ", params.out.num_cols);
  const auto num_rows = narrow<std::int32_t>(params.out.num_rows, "out: number of rows");
  const dim3 grid(static_cast<unsigned>(num_rows),
                  static_cast<unsigned>(ceil_div(params.out.num_cols, std::int64_t{kNumThreads})));
  launch(&gather_block_tables_kernel, grid, kNumThreads, 0, stream, params);
}

}  // namespace paged_kv::cuda
