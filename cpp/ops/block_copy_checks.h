// SPDX-License-Identifier: Apache-2.0
//
// Checks of the tensors of copy_blocks and swap_blocks, and what follows from them: the same for
// each device. Block ids are checked where the host can read them.
#pragma once

#include "ops/params/block_copy.h"
#include "ops/params/block_shape.h"
#include "ops/tensor_checks.h"
#include "ops/tensor_views.h"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace paged_kv {

[[nodiscard]] inline BlockMapping checked_mapping(const Tensor& block_mapping, NamedSizes& sizes) {
  check(block_mapping, "block_mapping", sizes).shape({"num_pairs", "2"}).dtype(ScalarType::Long);
  PAGED_KV_CHECK(sizes["2"] == 2, "block_mapping: expected shape [num_pairs, 2], got ",
                 shape_string(block_mapping));
  return matrix_view<const std::int64_t>(block_mapping);
}

// The layout of dimensions first_dim and on.
[[nodiscard]] inline BlockShape block_shape_from(const Tensor& tensor, std::size_t first_dim) {
  const auto num_dims = static_cast<std::size_t>(tensor.dim());
  const std::span sizes(tensor.sizes().data(), num_dims);
  const std::span strides(tensor.strides().data(), num_dims);
  return {sizes.subspan(first_dim), strides.subspan(first_dim),
          static_cast<std::int64_t>(tensor.element_size())};
}

inline void append_caches(const std::vector<Tensor>& tensors, const char* list_name,
                          NamedSizes& sizes, std::vector<BlockedCache>& caches) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    const std::string name = concat(list_name, "[", i, "]");
    check(tensor, name.c_str(), sizes).writable();
    PAGED_KV_CHECK(tensor.dim() >= 1, name, ": expected shape [num_blocks, ...], got ",
                   shape_string(tensor));
    caches.push_back(
        {.data = static_cast<std::byte*>(tensor.mutable_data_ptr()),
         .num_blocks = tensor.size(0),
         .block_stride_bytes = tensor.stride(0) * static_cast<std::int64_t>(tensor.element_size()),
         .shape = block_shape_from(tensor, 1)});
  }
}

struct CopyBlocksArguments {
  std::vector<BlockedCache> caches;  // of all layers: keys, then values
  BlockMapping block_mapping;
};

[[nodiscard]] inline CopyBlocksArguments checked_copy_blocks(
    OpDevice device, const std::vector<Tensor>& key_caches, const std::vector<Tensor>& value_caches,
    const Tensor& block_mapping) {
  PAGED_KV_CHECK(key_caches.size() == value_caches.size(), "value_caches: expected ",
                 key_caches.size(), " tensors, as in key_caches, got ", value_caches.size());
  NamedSizes sizes(device);
  CopyBlocksArguments args;
  append_caches(key_caches, "key_caches", sizes, args.caches);
  append_caches(value_caches, "value_caches", sizes, args.caches);
  args.block_mapping = checked_mapping(block_mapping, sizes);
  return args;
}

// The number of blocks of block_size_bytes in `tensor`, which must be dense.
[[nodiscard]] inline std::int64_t checked_num_blocks(const Tensor& tensor, const char* name,
                                                     std::int64_t block_size_bytes) {
  PAGED_KV_CHECK(block_shape_from(tensor, 0).num_runs() == 1, name,
                 ": expected one dense piece of memory, got strides with gaps");
  const std::int64_t num_bytes = tensor.numel() * static_cast<std::int64_t>(tensor.element_size());
  PAGED_KV_CHECK(num_bytes % block_size_bytes == 0, name, ": expected a multiple of ",
                 block_size_bytes, " (block_size_in_bytes) bytes, got ", num_bytes);
  return num_bytes / block_size_bytes;
}

struct SwapBlocksArguments {
  BlockPoolBytes<const std::byte> src;
  BlockPoolBytes<std::byte> dst;
  BlockMapping block_mapping;
};

// Where src and dst lie is checked by the caller; block_mapping is on the CPU.
[[nodiscard]] inline SwapBlocksArguments checked_swap_blocks(const Tensor& src, const Tensor& dst,
                                                             std::int64_t block_size_in_bytes,
                                                             const Tensor& block_mapping) {
  NamedSizes dst_sizes(dst.is_cpu() ? OpDevice::kCpu : OpDevice::kCuda);
  check(dst, "dst", dst_sizes).dtype(src.scalar_type()).writable();
  PAGED_KV_CHECK(block_mapping.is_cpu(), "block_mapping: expected a CPU tensor");
  PAGED_KV_CHECK(block_size_in_bytes > 0, "block_size_in_bytes: expected more than 0, got ",
                 block_size_in_bytes);
  const BlockPoolBytes<const std::byte> from{data_of<const std::byte>(src),
                                             checked_num_blocks(src, "src", block_size_in_bytes)};
  const BlockPoolBytes<std::byte> to{data_of<std::byte>(dst),
                                     checked_num_blocks(dst, "dst", block_size_in_bytes)};
  const bool disjoint = from.data + from.num_blocks * block_size_in_bytes <= to.data ||
                        to.data + to.num_blocks * block_size_in_bytes <= from.data;
  PAGED_KV_CHECK(disjoint || from.num_blocks == 0 || to.num_blocks == 0,
                 "dst: expected memory of its own, got memory of src (copy_blocks copies inside "
                 "one cache)");
  NamedSizes cpu_sizes;
  return {from, to, checked_mapping(block_mapping, cpu_sizes)};
}

}  // namespace paged_kv
