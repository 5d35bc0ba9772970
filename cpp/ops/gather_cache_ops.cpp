// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/gather_cache.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"
#include "ops/torch_thread_runner.h"

#include <cstdint>
#include <optional>
#include <string>

namespace paged_kv {
namespace {

void gather_cache(const Tensor& cache, const Tensor& out, const Tensor& block_tables,
                  const Tensor& cu_seq_lens, const std::optional<Tensor>& seq_starts,
                  const std::string& kv_cache_dtype, const std::optional<Tensor>& scale) {
  check_kv_cache_dtype_is_auto(kv_cache_dtype);
  NamedSizes sizes;
  check(cache, "cache", sizes)
      .shape({"num_blocks", "block_size", "num_kv_heads", "head_size"})
      .dtype_in({ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
  check(out, "out", sizes)
      .shape({"num_out_tokens", "num_kv_heads", "head_size"})
      .dtype(cache.scalar_type())
      .writable();
  check(block_tables, "block_tables", sizes)
      .shape({"num_seqs", "max_blocks"})
      .dtype(ScalarType::Int);
  check(cu_seq_lens, "cu_seq_lens", sizes).shape({"num_seqs + 1"}).dtype(ScalarType::Int);
  PAGED_KV_CHECK(sizes["num_seqs + 1"] == sizes["num_seqs"] + 1, "cu_seq_lens: expected ",
                 sizes["num_seqs"] + 1, " entries, one more than block_tables has rows, got ",
                 sizes["num_seqs + 1"]);
  if (seq_starts) {
    check(*seq_starts, "seq_starts", sizes).shape({"num_seqs"}).dtype(ScalarType::Int);
  }
  if (scale) check_scale(*scale, "scale", sizes);

  cpu::gather_cache({.cache = cache.const_data_ptr(),
                     .out = out.mutable_data_ptr(),
                     .block_tables = matrix_view<const std::int32_t>(block_tables),
                     .cu_seq_lens = vector_view<const std::int32_t>(cu_seq_lens),
                     .seq_starts = vector_view<const std::int32_t>(seq_starts),
                     .num_blocks = sizes["num_blocks"],
                     .block_size = sizes["block_size"],
                     .num_kv_heads = sizes["num_kv_heads"],
                     .head_size = sizes["head_size"],
                     .block_stride = cache.stride(0),
                     .offset_stride = cache.stride(1),
                     .cache_strides = {.head = cache.stride(2), .dim = cache.stride(3)},
                     .num_out_tokens = sizes["num_out_tokens"],
                     .out_token_stride = out.stride(0),
                     .out_strides = {.head = out.stride(1), .dim = out.stride(2)},
                     .element_size = static_cast<std::int64_t>(cache.element_size())},
                    kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) { m.impl("gather_cache", PAGED_KV_BOX(&gather_cache)); }

}  // namespace paged_kv
