// SPDX-License-Identifier: Apache-2.0
//
// Which sequence of a ragged batch a row belongs to.
#pragma once

#include "paged_kv/cuda/reduce.cuh"
#include "paged_kv/strided_view.h"

#include <cstdint>

#include <cuda_runtime.h>

namespace paged_kv::cuda {

inline constexpr std::int64_t kNoSeq = -1;

// The sequence whose rows include `row`, or kNoSeq; starts: [num_seqs + 1]. All lanes of the warp
// call it, with one row; each round leaves 1/32 of the sequences. Starts that decrease give any
// sequence or none.
[[nodiscard]] __device__ inline std::int64_t find_seq(VectorView<const std::int32_t> starts,
                                                      std::int64_t row, int lane) {
  constexpr int kWarpSize = 32;
  std::int64_t begin = 0;  // the last sequence that starts at or before row is in [begin, end)
  std::int64_t end = starts.size - 1;
  while (end - begin > 1) {
    const std::int64_t step = (end - begin + kWarpSize - 1) / kWarpSize;
    const std::int64_t probe = begin + lane * step;
    const bool starts_before = probe < end && starts[probe] <= row;
    const int count = __popc(__ballot_sync(kFullWarp, starts_before));
    if (count == 0) return kNoSeq;
    begin += (count - 1) * step;
    end = min(begin + step, end);
  }
  const bool is_found = begin < end && starts[begin] <= row && row < starts[begin + 1];
  return is_found ? begin : kNoSeq;
}

}  // namespace paged_kv::cuda
