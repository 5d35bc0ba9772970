// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/uniform_type_spec.h"

#include "paged_kv/check.h"

#include <algorithm>

namespace paged_kv {
namespace {

bool need_the_same_slots(const KVCacheSpec& a, const KVCacheSpec& b) {
  if (a.kind() != b.kind() || a.block_size() != b.block_size()) return false;
  if (a.kind() == KVCacheSpecKind::kSlidingWindow) {
    return a.sliding_window_of_group() == b.sliding_window_of_group();
  }
  if (a.kind() == KVCacheSpecKind::kChunkedLocalAttention) {
    const auto chunk = [](const KVCacheSpec& spec) {
      return dynamic_cast<const ChunkedLocalAttentionSpec&>(spec).attention_chunk_size();
    };
    return chunk(a) == chunk(b);
  }
  return true;
}

}  // namespace

UniformTypeKVCacheSpecs::UniformTypeKVCacheSpecs(LayerSpecs layers) : layers_(std::move(layers)) {
  for (const auto& [name, spec] : layers_) page_size_bytes_ += spec->page_size_bytes();
}

std::shared_ptr<const UniformTypeKVCacheSpecs> UniformTypeKVCacheSpecs::from_specs(
    const LayerSpecs& layers) {
  const bool is_uniform = !layers.empty() && std::ranges::all_of(layers, [&](const auto& layer) {
    return need_the_same_slots(*layer.second, *layers.front().second);
  });
  if (!is_uniform) return nullptr;
  return std::shared_ptr<const UniformTypeKVCacheSpecs>(new UniformTypeKVCacheSpecs(layers));
}

std::int64_t UniformTypeKVCacheSpecs::max_num_blocks_per_request(
    const RequestLimits& limits) const {
  std::int64_t num_blocks = 0;
  for (const auto& [name, spec] : layers_) {
    num_blocks = std::max(num_blocks, spec->max_num_blocks_per_request(limits));
  }
  return num_blocks;
}

KVCacheSpecPtr UniformTypeKVCacheSpecs::copy_with_new_block_size(std::int64_t block_size) const {
  LayerSpecs layers;
  for (const auto& [name, spec] : layers_) {
    layers.emplace_back(name, spec->copy_with_new_block_size(block_size));
  }
  return from_specs(layers);
}

KVCacheSpecPtr UniformTypeKVCacheSpecs::copy_with_padded_page_size(std::int64_t /*bytes*/) const {
  PAGED_KV_CHECK(false, "pad the pages of the layers, not of a group of layers that differ");
}

bool UniformTypeKVCacheSpecs::equals(const KVCacheSpec& other) const noexcept {
  const auto* specs = dynamic_cast<const UniformTypeKVCacheSpecs*>(&other);
  return specs != nullptr &&
         std::ranges::equal(layers_, specs->layers_, [](const auto& a, const auto& b) {
           return a.first == b.first && a.second->equals(*b.second);
         });
}

KVCacheSpecPtr get_layer_spec(const KVCacheSpecPtr& group_spec, const std::string& layer_name) {
  const auto* specs = dynamic_cast<const UniformTypeKVCacheSpecs*>(group_spec.get());
  if (specs == nullptr) return group_spec;
  const auto& layers = specs->layers();
  const auto layer = std::ranges::find(layers, layer_name, [](const auto& l) { return l.first; });
  PAGED_KV_CHECK(layer != layers.end(), "layer ", layer_name, " is not in its group's spec");
  return layer->second;
}

}  // namespace paged_kv
