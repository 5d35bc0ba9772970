// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/kv_cache_spec.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace paged_kv {

// The layers of a model, or of one worker, in order.
using LayerSpecs = std::vector<std::pair<std::string, KVCacheSpecPtr>>;

// Layers of one kind that need the same slots, but differ in the bytes of a token: they share a
// block table all the same. A block of the group is a block of each layer.
//
// Source: vLLM 0.32 v1/kv_cache_interface.py::UniformTypeKVCacheSpecs.
class UniformTypeKVCacheSpecs final : public KVCacheSpec {
 public:
  // Null unless all layers have one block size, kind, and window or chunk.
  [[nodiscard]] static std::shared_ptr<const UniformTypeKVCacheSpecs> from_specs(
      const LayerSpecs& layers);

  [[nodiscard]] const LayerSpecs& layers() const noexcept { return layers_; }
  [[nodiscard]] const KVCacheSpecPtr& first_spec() const noexcept { return layers_.front().second; }

  [[nodiscard]] KVCacheSpecKind kind() const noexcept override { return first_spec()->kind(); }
  [[nodiscard]] std::int64_t block_size() const noexcept override {
    return first_spec()->block_size();
  }
  // Of all layers together.
  [[nodiscard]] std::int64_t page_size_bytes() const noexcept override { return page_size_bytes_; }
  [[nodiscard]] std::int64_t max_num_blocks_per_request(const RequestLimits& limits) const override;
  [[nodiscard]] bool recycles_blocks() const noexcept override {
    return first_spec()->recycles_blocks();
  }
  [[nodiscard]] std::optional<std::int64_t> sliding_window_of_group() const noexcept override {
    return first_spec()->sliding_window_of_group();
  }
  [[nodiscard]] KVCacheSpecPtr copy_with_new_block_size(std::int64_t block_size) const override;
  // Throws std::invalid_argument: the padding of several layers is not one number.
  [[nodiscard]] KVCacheSpecPtr copy_with_padded_page_size(std::int64_t bytes) const override;
  [[nodiscard]] bool equals(const KVCacheSpec& other) const noexcept override;

 private:
  explicit UniformTypeKVCacheSpecs(LayerSpecs layers);

  LayerSpecs layers_;
  std::int64_t page_size_bytes_ = 0;
};

// The spec of one layer of a group.
[[nodiscard]] KVCacheSpecPtr get_layer_spec(const KVCacheSpecPtr& group_spec,
                                            const std::string& layer_name);

}  // namespace paged_kv
