// SPDX-License-Identifier: Apache-2.0
#include "cuda/src/attention/paged_attention_launch.cuh"
#include "paged_kv/check.h"
#include "paged_kv/cuda/dispatch.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/paged_attention.h"
#include "paged_kv/cuda/paged_attention_config.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace paged_kv::cuda {
namespace {

constexpr std::int64_t kMaxGridSize = 65535;  // of y and z

std::int64_t max_shared_bytes_of_device() {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "current device");
  int num_bytes = 0;
  check_cuda(cudaDeviceGetAttribute(&num_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             "shared memory of the device");
  return num_bytes;
}

// With max_seq_len cut at what the tables, int32 and `capacity` hold.
PagedAttentionParams bounded(const PagedAttentionParams& params, std::int64_t capacity) {
  constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
  const std::int64_t num_blocks = std::min(params.block_tables.num_cols, kMaxTokens);
  PagedAttentionParams result = params;
  result.max_seq_len =
      std::min({params.max_seq_len, capacity, num_blocks * params.block_size, kMaxTokens});
  return result;
}

template <Element T>
void launch_for_cache(const PagedAttentionParams& params, const Partitions& partitions,
                      cudaStream_t stream) {
  switch (params.kv_cache_dtype) {
    case KvCacheDtype::kAuto:
      return launch_paged_attention<T, T>(params, partitions, stream);
    case KvCacheDtype::kFloat8E4M3:
      return launch_paged_attention<T, Float8E4M3>(params, partitions, stream);
    case KvCacheDtype::kFloat8E5M2:
      return launch_paged_attention<T, Float8E5M2>(params, partitions, stream);
    case KvCacheDtype::kInt8:
      throw std::invalid_argument("kv_cache_dtype: int8 caches are for the CPU");
  }
}

void launch_partitions(const PagedAttentionParams& params, const Partitions& partitions,
                       cudaStream_t stream) {
  PAGED_KV_CHECK(partitions.num_partitions <= kMaxGridSize, "max_seq_len: expected at most ",
                 kMaxGridSize, " partitions of ", kPartitionSize, " tokens, got ",
                 partitions.num_partitions);
  dispatch_float_dtype(params.dtype,
                       [&]<class T>() { launch_for_cache<T>(params, partitions, stream); });
}

void check_num_seqs(std::int64_t num_seqs) {
  PAGED_KV_CHECK(num_seqs <= kMaxGridSize, "seq_lens: expected at most ", kMaxGridSize,
                 " sequences, got ", num_seqs);
}

}  // namespace

void paged_attention_v1(const PagedAttentionParams& params, cudaStream_t stream) {
  if (params.seq_lens.size == 0) return;
  check_num_seqs(params.seq_lens.size);
  const auto p = bounded(params, std::numeric_limits<std::int64_t>::max());
  const std::int64_t max_shared_bytes = max_shared_bytes_of_device();
  const std::int64_t limit = max_v1_seq_len(p.head_size, max_shared_bytes);
  PAGED_KV_CHECK(p.max_seq_len <= limit, "max_seq_len: paged_attention_v1 keeps a sequence's ",
                 "logits in shared memory, ", max_shared_bytes, " bytes on this device: expected ",
                 "at most ", limit, " tokens with head_size ", p.head_size, ", got ", p.max_seq_len,
                 "; paged_attention_v2 has no such limit");
  launch_partitions(p, {1, static_cast<std::int32_t>(p.max_seq_len), {}}, stream);
}

void paged_attention_v2(const PagedAttentionParams& params, const PartitionBuffers<void>& buffers,
                        std::int64_t max_partitions, cudaStream_t stream) {
  if (params.seq_lens.size == 0) return;
  check_num_seqs(params.seq_lens.size);
  const auto p = bounded(params, max_partitions * kPartitionSize);
  const auto num_used = static_cast<std::int32_t>(ceil_div(p.max_seq_len, kPartitionSize));
  const Partitions partitions{num_used, static_cast<std::int32_t>(kPartitionSize), buffers};
  if (num_used > 0) launch_partitions(p, partitions, stream);
  launch_paged_attention_reduce(p, partitions, stream);
}

}  // namespace paged_kv::cuda
