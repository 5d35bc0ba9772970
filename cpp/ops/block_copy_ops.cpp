// SPDX-License-Identifier: Apache-2.0
#include "ops/boxed.h"
#include "ops/cpu/block_copy.h"
#include "ops/registration.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"
#include "ops/torch_thread_runner.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace paged_kv {
namespace {

cpu::BlockMapping checked_mapping(const Tensor& block_mapping) {
  NamedSizes sizes;
  check(block_mapping, "block_mapping", sizes).shape({"num_pairs", "2"}).dtype(ScalarType::Long);
  PAGED_KV_CHECK(sizes["2"] == 2, "block_mapping: expected shape [num_pairs, 2], got ",
                 shape_string(block_mapping));
  return matrix_view<const std::int64_t>(block_mapping);
}

// The layout of dimensions first_dim and on.
cpu::BlockShape shape_from(const Tensor& tensor, std::size_t first_dim) {
  const auto num_dims = static_cast<std::size_t>(tensor.dim());
  const std::span sizes(tensor.sizes().data(), num_dims);
  const std::span strides(tensor.strides().data(), num_dims);
  return {sizes.subspan(first_dim), strides.subspan(first_dim),
          static_cast<std::int64_t>(tensor.element_size())};
}

void append_caches(const std::vector<Tensor>& tensors, const char* list_name,
                   std::vector<cpu::BlockedCache>& caches) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const std::string name = concat(list_name, "[", i, "]");
    NamedSizes sizes;
    check(tensor, name.c_str(), sizes).writable();
    PAGED_KV_CHECK(tensor.dim() >= 1, name, ": expected shape [num_blocks, ...], got ",
                   shape_string(tensor));
    caches.push_back(
        {.data = static_cast<std::byte*>(tensor.mutable_data_ptr()),
         .num_blocks = tensor.size(0),
         .block_stride_bytes = tensor.stride(0) * static_cast<std::int64_t>(tensor.element_size()),
         .shape = shape_from(tensor, 1)});
  }
}

void copy_blocks(const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
                 const Tensor& block_mapping) {
  PAGED_KV_CHECK(key_caches.size() == value_caches.size(), "value_caches: expected ",
                 key_caches.size(), " tensors, as in key_caches, got ", value_caches.size());
  std::vector<cpu::BlockedCache> caches;
  append_caches(key_caches, "key_caches", caches);
  append_caches(value_caches, "value_caches", caches);
  cpu::copy_blocks(caches, checked_mapping(block_mapping), kTorchRunner);
}

// The number of blocks of block_size_bytes in `tensor`, which must be dense.
std::int64_t checked_num_blocks(const Tensor& tensor, const char* name,
                                std::int64_t block_size_bytes) {
  PAGED_KV_CHECK(shape_from(tensor, 0).num_runs() == 1, name,
                 ": expected one dense piece of memory, got strides with gaps");
  const std::int64_t num_bytes = tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
  PAGED_KV_CHECK(num_bytes % block_size_bytes == 0, name, ": expected a multiple of ",
                 block_size_bytes, " (block_size_in_bytes) bytes, got ", num_bytes);
  return num_bytes / block_size_bytes;
}

void swap_blocks(const Tensor& src, const Tensor& dst, std::int64_t block_size_in_bytes,
                 const Tensor& block_mapping) {
  NamedSizes sizes;
  (void)check(src, "src", sizes);  // a CPU tensor
  check(dst, "dst", sizes).dtype(src.scalar_type()).writable();
  PAGED_KV_CHECK(block_size_in_bytes > 0, "block_size_in_bytes: expected more than 0, got ",
                 block_size_in_bytes);
  const cpu::BlockPoolBytes<const std::byte> from{
      data_of<const std::byte>(src), checked_num_blocks(src, "src", block_size_in_bytes)};
  const cpu::BlockPoolBytes<std::byte> to{data_of<std::byte>(dst),
                                          checked_num_blocks(dst, "dst", block_size_in_bytes)};
  const bool disjoint = from.data + from.num_blocks * block_size_in_bytes <= to.data ||
                        to.data + to.num_blocks * block_size_in_bytes <= from.data;
  PAGED_KV_CHECK(disjoint || from.num_blocks == 0 || to.num_blocks == 0,
                 "dst: expected memory of its own, got memory of src (copy_blocks copies inside "
                 "one cache)");
  cpu::swap_blocks(from, to, block_size_in_bytes, checked_mapping(block_mapping), kTorchRunner);
}

}  // namespace

PAGED_KV_CPU_OPS(m) {
  m.impl("copy_blocks", PAGED_KV_BOX(&copy_blocks));
  m.impl("swap_blocks", PAGED_KV_BOX(&swap_blocks));
}

}  // namespace paged_kv
