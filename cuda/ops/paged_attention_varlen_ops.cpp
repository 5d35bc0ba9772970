// SPDX-License-Identifier: Apache-2.0
#include "cuda/ops/current_stream.h"
#include "cuda/ops/vector_checks.h"
#include "ops/boxed.h"
#include "ops/paged_attention_varlen_checks.h"
#include "ops/registration.h"
#include "ops/tensor_views.h"
#include "paged_kv/check.h"
#include "paged_kv/cuda/paged_attention_varlen.h"
#include "paged_kv/math.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

void check_kernel_exists(const VarlenArguments& args, const NamedSizes& sizes) {
  PAGED_KV_CHECK(args.key_cache.dim() == 4, "key_cache: expected shape [num_blocks, block_size, ",
                 "num_kv_heads, head_size] on CUDA, got ", shape_string(args.key_cache));
  PAGED_KV_CHECK(sizes["head_size"] % kVarlenChunk == 0, "query: expected a head_size that is a ",
                 "multiple of ", kVarlenChunk, " on CUDA, got ", sizes["head_size"]);
  static_assert(cpu::kMaxHeadSize <= kMaxVarlenHeadSize);
  const auto num_bytes = varlen_alignment(static_cast<std::int64_t>(args.key_cache.element_size()));
  check_vectors(args.key_cache, "key_cache", num_bytes);
  check_vectors(args.value_cache, "value_cache", num_bytes);
}

VarlenCacheSide cache_side(const Tensor& cache, KvScale scale) {
  return {.data = cache.const_data_ptr(),
          .block_stride = cache.stride(0),
          .token_stride = cache.stride(1),
          .head_stride = cache.stride(2),
          .scale = scale};
}

PagedAttentionVarlenParams checked_params(const VarlenArguments& args) {
  NamedSizes sizes(kOpDevice);
  const KvCacheDtype kv_cache_dtype = parse_kv_cache_dtype(args.kv_cache_dtype, OpDevice::kCuda);
  const VarlenInputs inputs = check_varlen(args, kv_cache_dtype, sizes);
  check_kernel_exists(args, sizes);
  const std::int64_t num_heads = sizes["num_heads"];
  return {
      .dtype = float_dtype(args.query),
      .kv_cache_dtype = kv_cache_dtype,
      .out = args.out.mutable_data_ptr(),
      .query = args.query.const_data_ptr(),
      .out_token_stride = args.out.stride(0),
      .out_head_stride = args.out.stride(1),
      .query_token_stride = args.query.stride(0),
      .query_head_stride = args.query.stride(1),
      .lse = args.lse ? matrix_view<float>(*args.lse) : MatrixView<float>{},
      .key = cache_side(args.key_cache, inputs.scales.key),
      .value = cache_side(args.value_cache, inputs.scales.value),
      .query_start_loc = inputs.batch.query_start_loc,
      .seq_lens = inputs.batch.seq_lens,
      .block_tables = inputs.batch.block_tables,
      .alibi_slopes = {inputs.slopes.data, num_heads, inputs.slopes.stride},
      .sinks = {inputs.sinks.data, num_heads, inputs.sinks.stride},
      .num_tokens = sizes["num_tokens"],
      .num_blocks = sizes["num_blocks"],
      .block_size = narrow<std::int32_t>(sizes["block_size"], "block_size"),
      .num_heads = narrow<std::int32_t>(num_heads, "num_heads"),
      .num_kv_heads = narrow<std::int32_t>(sizes["num_kv_heads"], "num_kv_heads"),
      .head_size = static_cast<std::int32_t>(sizes["head_size"]),
      .max_seq_len = args.max_seq_len,
      .sliding_window = args.sliding_window,
      .causal = args.causal,
      .scale = static_cast<float>(args.scale),
      .softcap = static_cast<float>(args.softcap),
  };
}

void run_varlen(const VarlenArguments& args) {
  const PagedAttentionVarlenParams params = checked_params(args);
  const CurrentStream current(args.out);
  paged_attention_varlen(params, current.stream());
}

}  // namespace

PAGED_KV_CUDA_OPS(m) {
  m.impl("paged_attention_varlen", PAGED_KV_BOX(&paged_attention_varlen_op<&run_varlen>));
}

}  // namespace paged_kv::cuda
