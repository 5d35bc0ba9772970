// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_groups.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

namespace paged_kv {
namespace {

using Names = std::vector<std::string>;

// Layers whose specs can be merged.
struct Bucket {
  Names layer_names;
  std::vector<KVCacheSpecPtr> specs;  // the different ones
};

std::vector<KVCacheSpecPtr> specs_of(const LayerSpecs& layers) {
  std::vector<KVCacheSpecPtr> specs;
  for (const auto& [name, spec] : layers) specs.push_back(spec);
  return specs;
}

Names names_of(const LayerSpecs& layers) {
  Names names;
  for (const auto& [name, spec] : layers) names.push_back(name);
  return names;
}

void merge_value(std::optional<std::int64_t>& merged, const std::optional<std::int64_t>& value) {
  PAGED_KV_CHECK(!merged || !value || *merged == *value,
                 "all full-attention layers of a group must have the same window or chunk, got ",
                 *merged, " and ", *value);
  if (value) merged = value;
}

KVCacheSpecPtr merge_full_attention(const std::vector<KVCacheSpecPtr>& specs) {
  const auto& first = dynamic_cast<const FullAttentionSpec&>(*specs.front());
  FullAttentionSpec::Attended attended;
  for (const KVCacheSpecPtr& spec : specs) {
    const auto* full = dynamic_cast<const FullAttentionSpec*>(spec.get());
    if (full == nullptr) return nullptr;
    merge_value(attended.sliding_window, full->attended().sliding_window);
    merge_value(attended.attention_chunk_size, full->attended().attention_chunk_size);
  }
  for (const KVCacheSpecPtr& spec : specs) {
    const auto& full = dynamic_cast<const FullAttentionSpec&>(*spec);
    if (full.format() != first.format()) return nullptr;
  }
  if (attended.sliding_window && attended.attention_chunk_size) return nullptr;
  return std::make_shared<FullAttentionSpec>(first.format(), attended);
}

bool can_be_merged(const std::vector<KVCacheSpecPtr>& specs) {
  try {
    return merge_kv_cache_specs(specs) != nullptr;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

void add_to_bucket(std::vector<Bucket>& buckets, const Bucket& layers) {
  for (Bucket& bucket : buckets) {
    std::vector<KVCacheSpecPtr> specs = bucket.specs;
    specs.push_back(layers.specs.front());
    if (!can_be_merged(specs)) continue;
    bucket.specs = std::move(specs);
    bucket.layer_names.insert(bucket.layer_names.end(), layers.layer_names.begin(),
                              layers.layer_names.end());
    return;
  }
  buckets.push_back(layers);
}

// First by equal specs, then by specs that can be merged.
std::vector<Bucket> make_buckets(const LayerSpecs& layers) {
  std::vector<Bucket> equal;
  for (const auto& [name, spec] : layers) {
    auto same = std::ranges::find_if(equal, [&spec = spec](const Bucket& bucket) {
      return bucket.specs.front()->equals(*spec);
    });
    if (same == equal.end()) same = equal.insert(same, Bucket{{}, {spec}});
    same->layer_names.push_back(name);
  }
  std::vector<Bucket> buckets;
  for (const Bucket& bucket : equal) add_to_bucket(buckets, bucket);
  return buckets;
}

// Layers per group: as many as the smallest bucket has, unless the largest is hardly larger; then
// padding that bucket wastes less than splitting the other.
std::int64_t choose_group_size(const std::vector<Bucket>& buckets) {
  std::int64_t smallest = std::ssize(buckets.front().layer_names);
  std::int64_t largest = smallest;
  for (const Bucket& bucket : buckets) {
    smallest = std::min(smallest, std::ssize(bucket.layer_names));
    largest = std::max(largest, std::ssize(bucket.layer_names));
  }
  return 2 * largest < 3 * smallest ? largest : smallest;
}

// Every num_groups-th layer, so that each stage of a pipeline has layers of every group.
Names every_nth(const Names& names, std::int64_t first, std::int64_t step) {
  Names result;
  for (std::int64_t i = first; i < std::ssize(names); i += step) {
    result.push_back(names[static_cast<std::size_t>(i)]);
  }
  return result;
}

KVCacheGroupSpec make_group(const LayerSpecs& layers, Names names) {
  std::vector<KVCacheSpecPtr> specs;
  for (const auto& [name, spec] : layers) {
    if (std::ranges::find(names, name) != names.end()) specs.push_back(spec);
  }
  return {std::move(names), merge_kv_cache_specs(specs)};
}

std::vector<KVCacheGroupSpec> group_uniform_pages(const LayerSpecs& layers) {
  const std::vector<Bucket> buckets = make_buckets(layers);
  const std::int64_t group_size = choose_group_size(buckets);
  std::vector<KVCacheGroupSpec> groups;
  for (const Bucket& bucket : buckets) {
    const std::int64_t num_groups = ceil_div(std::ssize(bucket.layer_names), group_size);
    for (std::int64_t i = 0; i < num_groups; ++i) {
      groups.push_back(make_group(layers, every_nth(bucket.layer_names, i, num_groups)));
    }
  }
  return groups;
}

bool is_of_one_type(const LayerSpecs& layers) {
  return layers.empty() || merge_kv_cache_specs(specs_of(layers)) != nullptr ||
         UniformTypeKVCacheSpecs::from_specs(layers) != nullptr;
}

// The block size of the full-attention layers, if they have one.
std::optional<std::int64_t> full_attention_block_size(const LayerSpecs& layers) {
  std::optional<std::int64_t> block_size;
  for (const auto& [name, spec] : layers) {
    if (spec->kind() != KVCacheSpecKind::kFullAttention) continue;
    if (block_size && *block_size != spec->block_size()) return std::nullopt;
    block_size = spec->block_size();
  }
  return block_size;
}

KVCacheSpecPtr promote(const KVCacheSpec& spec, std::int64_t block_size) {
  const auto& attention = dynamic_cast<const AttentionSpec&>(spec);
  AttentionFormat format = attention.format();
  format.block_size = block_size;
  if (format.page_size_padded) {
    format.page_size_padded =
        std::max(*format.page_size_padded,
                 attention.unpadded_page_size_bytes() * block_size / spec.block_size());
  }
  FullAttentionSpec::Attended attended;
  if (const auto* window = dynamic_cast<const SlidingWindowSpec*>(&spec)) {
    attended.sliding_window = window->sliding_window();
  } else if (const auto* chunked = dynamic_cast<const ChunkedLocalAttentionSpec*>(&spec)) {
    attended.attention_chunk_size = chunked->attention_chunk_size();
  }
  return std::make_shared<FullAttentionSpec>(std::move(format), attended);
}

}  // namespace

KVCacheSpecPtr merge_kv_cache_specs(const std::vector<KVCacheSpecPtr>& specs) {
  PAGED_KV_CHECK(!specs.empty(), "there are no specs to merge");
  if (specs.front()->kind() == KVCacheSpecKind::kFullAttention &&
      dynamic_cast<const FullAttentionSpec*>(specs.front().get()) != nullptr) {
    return merge_full_attention(specs);
  }
  const bool are_equal = std::ranges::all_of(
      specs, [&](const KVCacheSpecPtr& spec) { return spec->equals(*specs.front()); });
  return are_equal ? specs.front() : nullptr;
}

LayerSpecs unify_kv_cache_spec_page_size(const LayerSpecs& layers) {
  std::int64_t max_page_size = 0;
  for (const auto& [name, spec] : layers) {
    max_page_size = std::max(max_page_size, spec->page_size_bytes());
  }
  LayerSpecs unified;
  for (const auto& [name, spec] : layers) {
    const std::int64_t page_size = spec->page_size_bytes();
    if (page_size == max_page_size) {
      unified.emplace_back(name, spec);
      continue;
    }
    const std::int64_t larger_block = spec->block_size() * (max_page_size / page_size);
    unified.emplace_back(name, max_page_size % page_size == 0
                                   ? spec->copy_with_new_block_size(larger_block)
                                   : spec->copy_with_padded_page_size(max_page_size));
    PAGED_KV_CHECK(unified.back().second->page_size_bytes() == max_page_size, "layer ", name,
                   ": a padded page of ", page_size, " bytes cannot become one of ", max_page_size);
  }
  return unified;
}

LayerSpecs unify_hybrid_kv_cache_specs(const LayerSpecs& layers) {
  if (is_of_one_type(layers)) return layers;
  const auto is_full = [](const auto& layer) {
    return layer.second->kind() == KVCacheSpecKind::kFullAttention;
  };
  LayerSpecs promoted = layers;
  if (std::ranges::any_of(layers, is_full)) {
    const auto block_size = full_attention_block_size(layers);
    for (auto& layer : promoted) {
      if (is_full(layer)) continue;
      layer.second = promote(*layer.second, block_size.value_or(layer.second->block_size()));
    }
  }
  PAGED_KV_CHECK(is_of_one_type(promoted),
                 "the layers cannot be made one type: without hybrid groups, all must be able to "
                 "keep every token in one way");
  return promoted;
}

std::vector<KVCacheGroupSpec> get_kv_cache_groups(LayerSpecs layers,
                                                  bool disable_hybrid_kv_cache_manager) {
  if (disable_hybrid_kv_cache_manager) layers = unify_hybrid_kv_cache_specs(layers);
  if (layers.empty()) return {};
  if (auto merged = merge_kv_cache_specs(specs_of(layers))) {
    return {KVCacheGroupSpec{names_of(layers), std::move(merged)}};
  }
  if (auto uniform = UniformTypeKVCacheSpecs::from_specs(layers)) {
    return {KVCacheGroupSpec{names_of(layers), std::move(uniform)}};
  }
  return group_uniform_pages(unify_kv_cache_spec_page_size(layers));
}

}  // namespace paged_kv
