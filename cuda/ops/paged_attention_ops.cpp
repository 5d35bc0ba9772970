// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"
#include "cuda/ops/vector_checks.h"
#include "ops/boxed.h"
#include "ops/paged_attention_checks.h"
#include "ops/registration.h"
#include "paged_kv/check.h"
#include "paged_kv/cuda/paged_attention.h"
#include "paged_kv/cuda/paged_attention_config.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstdint>
#include <limits>

namespace paged_kv::cuda {
namespace {

// As max_seq_len: sequences may be as long as the block tables allow.
constexpr std::int64_t kNoLimit = std::numeric_limits<std::int64_t>::max();

void check_kernel_exists(const DecodeArguments& args, const NamedSizes& sizes) {
  PAGED_KV_CHECK(args.key_cache.dim() == 5, "key_cache: expected shape [num_blocks, num_kv_heads, ",
                 "head_size/x, block_size, x] on CUDA, got ", shape_string(args.key_cache));
  const auto element_bytes = static_cast<std::int64_t>(args.key_cache.element_size());
  PAGED_KV_CHECK(is_supported_head_size(sizes["head_size"], element_bytes),
                 "query: expected a head_size of ", list_string(kHeadSizes),
                 " and a multiple of 16 bytes of the cache, got ", sizes["head_size"]);
  PAGED_KV_CHECK(is_supported_block_size(args.block_size) &&
                     args.block_size <= std::numeric_limits<std::int32_t>::max(),
                 "block_size: expected a multiple of ", kVectorTokens,
                 ", below 2^31, on CUDA, got ", args.block_size);
  check_vectors(args.key_cache, "key_cache", kChunkBytes);
  check_vectors(args.value_cache, "value_cache",
                std::min<std::int64_t>(kChunkBytes, kVectorTokens * element_bytes));
}

PagedAttentionParams checked_params(const DecodeArguments& args, NamedSizes& sizes) {
  const KvCacheDtype kv_cache_dtype = parse_kv_cache_dtype(args.kv_cache_dtype, OpDevice::kCuda);
  const DecodeInputs inputs = check_decode(args, kv_cache_dtype, sizes);
  check_kernel_exists(args, sizes);
  return {
      .dtype = float_dtype(args.query),
      .kv_cache_dtype = kv_cache_dtype,
      .out = args.out.mutable_data_ptr(),
      .out_seq_stride = args.out.stride(0),
      .out_head_stride = args.out.stride(1),
      .query = args.query.const_data_ptr(),
      .query_seq_stride = args.query.stride(0),
      .query_head_stride = args.query.stride(1),
      .key_cache = args.key_cache.const_data_ptr(),
      .key_block_stride = args.key_cache.stride(0),
      .key_head_stride = args.key_cache.stride(1),
      .key_chunk_stride = args.key_cache.stride(2),
      .key_token_stride = args.key_cache.stride(3),
      .value_cache = args.value_cache.const_data_ptr(),
      .value_block_stride = args.value_cache.stride(0),
      .value_head_stride = args.value_cache.stride(1),
      .value_dim_stride = args.value_cache.stride(2),
      .k_scale = inputs.k_scale,
      .v_scale = inputs.v_scale,
      .seq_lens = inputs.batch.seq_lens,
      .block_tables = inputs.batch.block_tables,
      .alibi_slopes = {inputs.slopes.data, sizes["num_heads"], inputs.slopes.stride},
      .sparsity = args.sparsity,
      .num_blocks = sizes["num_blocks"],
      .block_size = static_cast<std::int32_t>(args.block_size),
      .num_heads = narrow<std::int32_t>(sizes["num_heads"], "num_heads"),
      .num_kv_heads = narrow<std::int32_t>(args.num_kv_heads, "num_kv_heads"),
      .head_size = static_cast<std::int32_t>(sizes["head_size"]),
      .max_seq_len = args.max_seq_len < 0 ? kNoLimit : args.max_seq_len,
      .scale = static_cast<float>(args.scale),
  };
}

void run_v1(const DecodeArguments& args) {
  NamedSizes sizes(kOpDevice);
  const PagedAttentionParams params = checked_params(args, sizes);
  const CurrentStream current(args.out);
  paged_attention_v1(params, current.stream());
}

void run_v2(const DecodeArguments& args, const PartitionTensors& tensors) {
  NamedSizes sizes(kOpDevice);
  const PagedAttentionParams params = checked_params(args, sizes);
  const auto buffers = check_partition_buffers<void>(tensors, args.query.scalar_type(), sizes);
  const std::int64_t max_partitions = sizes["max_partitions"];
  const std::int64_t num_needed =
      args.max_seq_len < 0 ? 0 : ceil_div(args.max_seq_len, kPartitionSize);
  PAGED_KV_CHECK(num_needed <= max_partitions, "exp_sums: expected max_partitions >= ", num_needed,
                 " (max_seq_len = ", args.max_seq_len, ", ", kPartitionSize,
                 " tokens a partition), got ", max_partitions);
  const CurrentStream current(args.out);
  paged_attention_v2(params, buffers, max_partitions, current.stream());
}

}  // namespace

PAGED_KV_CUDA_OPS(m) {
  m.impl("paged_attention_v1", PAGED_KV_BOX(&paged_attention_v1_op<&run_v1>));
  m.impl("paged_attention_v2", PAGED_KV_BOX(&paged_attention_v2_op<&run_v2>));
}

}  // namespace paged_kv::cuda
