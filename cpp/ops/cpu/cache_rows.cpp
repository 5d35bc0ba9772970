// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/cache_rows.h"

#include "ops/params/cache_panels.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

namespace paged_kv::cpu {
namespace {

constexpr std::int64_t kTransposedTokens = 8;  // that transpose_rows takes at a time
static_assert(kTileKeys % kTransposedTokens == 0);
static_assert(kGroupTokens == kPanelTokens && kPanelFeatures == kPanelDims);

// Beyond so many queries, rows are copied rather than read where they lie.
constexpr std::int64_t kMaxQueriesInPlace = 16;

// Up to so many queries go over panels once, so that these are used in the order in which they are
// fetched.
constexpr std::int64_t kMaxQueriesOfOnePass = 6;
// Then, of a tile that fills the first-level cache, so much is fetched before its turn comes. All
// of it would push out what is in use: decode took 1.08 to 1.13 times as long.
constexpr std::int64_t kFirstBytes = 4 * 1024;
constexpr std::int64_t kMaxBytesAhead = 16 * 1024;
constexpr std::int64_t kAllBytes = std::numeric_limits<std::int64_t>::max();

// Products with values go over the groups of a tile for so many dims at a time.
constexpr std::int64_t kValueDimsAtOnce = 2 * kPanelDims;

}  // namespace

CacheRows::CacheRows(const PagedAttentionParams& params, const CacheSide& side,
                     ScratchCutter& scratch)
    : params_(params),
      side_(side),
      type_(static_cast<int>(params.cache_type)),
      padded_size_(params.padded_head_size()),
      access_(access()),
      tokens_(scratch.take<const void*>(kTileKeys)),
      next_tokens_(scratch.take<const void*>(kTileKeys)),
      converted_(scratch.take<const void*>(kTileKeys)),
      copy_(scratch.take<float>(kTileKeys * padded_size_)),
      dense_row_(scratch.take<std::byte>(params.head_size * element_size(params.cache_type))) {}

CacheRows::Access CacheRows::access() const noexcept {
  const std::int64_t element = element_size(params_.cache_type);
  if (side_.in_panels()) return Access::kPanels;
  if (side_.dim_stride == element) {
    if (side_.chunk_size != params_.head_size) return Access::kChunked;
    return params_.head_size == padded_size_ ? Access::kWholeVectors : Access::kDense;
  }
  const bool has_eights = params_.batch.block_size % kTransposedTokens == 0;
  const bool is_transposed =
      side_.token_stride == element && side_.chunk_size == params_.head_size && has_eights;
  return is_transposed ? Access::kTransposed : Access::kStrided;
}

void CacheRows::begin(std::int64_t seq, std::int64_t num_queries) {
  seq_ = seq;
  next_tile_begin_ = kNoTile;
  // For many queries one copy is cheaper than a conversion in each use; and rows that lie far apart
  // push each other out of the cache's sets.
  const bool is_compact = params_.cache_type == ElementType::kFloat &&
                          side_.token_stride == params_.head_size * std::int64_t{sizeof(float)};
  const bool is_direct =
      access_ == Access::kWholeVectors && (num_queries <= kMaxQueriesInPlace || is_compact);
  const AttentionKernels& kernels = *params_.kernels;
  in_place_ = in_panels() ? kernels.token_panels.multiply_keys[type_] != nullptr
                          : is_direct && kernels.multiply_keys[type_] != nullptr;
  const bool as_half = (is_direct || in_panels()) && kernels.convert_to_half[type_] != nullptr;
  const bool is_large = kTileKeys / kGroupTokens * side_.group_stride > kMaxBytesAhead;
  const bool is_used_in_order = in_place_ && num_queries <= kMaxQueriesOfOnePass;
  is_fetched_in_parts_ = in_panels() && is_large && is_used_in_order;
  form_ = in_place_ ? params_.cache_type : as_half ? ElementType::kHalf : ElementType::kFloat;
  for (std::int64_t k = 0; k < kTileKeys; ++k) {
    const std::int64_t row = in_panels() ? k / kGroupTokens * kGroupTokens : k;
    converted_[k] = reinterpret_cast<std::byte*>(copy_) + row * padded_size_ * element_size(form_);
  }
}

void CacheRows::turn_to(std::int64_t tile_begin, KeyRange columns) {
  if (tile_begin != next_tile_begin_) return locate(seq_, tile_begin, columns, tokens_);
  std::swap(tokens_, next_tokens_);
  next_tile_begin_ = kNoTile;
}

TokenRows CacheRows::rows(KeyRange columns, std::int64_t kv_head) {
  const std::int64_t offset_bytes = kv_head * side_.head_stride;
  if (in_place_) return {tokens_, columns.begin, columns.end, padded_size_, offset_bytes};
  convert(columns, offset_bytes);
  return {converted_, columns.begin, columns.end, padded_size_};
}

void CacheRows::add_first_lines(KeyRange columns, std::int64_t kv_head, std::int64_t num_heads,
                                MemoryRuns& runs) const {
  add_first_lines(tokens_, columns, kv_head, num_heads, runs);
}

void CacheRows::add_other_lines(KeyRange columns, std::int64_t kv_head, MemoryRuns& runs) const {
  if (!is_fetched_in_parts_) return;
  add_lines_of_panels(tokens_, columns, kv_head, kFirstBytes, kAllBytes, runs);
}

void CacheRows::locate_next(std::int64_t seq, std::int64_t tile_begin, KeyRange columns) {
  locate(seq, tile_begin, columns, next_tokens_);
  next_tile_begin_ = tile_begin;
}

void CacheRows::add_first_lines_of_next(KeyRange columns, std::int64_t kv_head,
                                        std::int64_t num_heads, MemoryRuns& runs) const {
  add_first_lines(next_tokens_, columns, kv_head, num_heads, runs);
}

void CacheRows::add_first_lines(const void* const* tokens, KeyRange columns, std::int64_t kv_head,
                                std::int64_t num_heads, MemoryRuns& runs) const {
  if (!in_panels()) return add_lines_of_rows(tokens, columns, kv_head, num_heads, runs);
  if (is_fetched_in_parts_) {
    return add_lines_of_panels(tokens, columns, kv_head, 0, kFirstBytes, runs);
  }
  const std::int64_t first = columns.begin / kGroupTokens * kGroupTokens;
  for (std::int64_t k = first; k < columns.end; k += kGroupTokens) {
    runs.add(static_cast<const std::byte*>(tokens[k]) + kv_head * side_.head_stride,
             side_.group_stride);
  }
}

void CacheRows::add_lines_of_rows(const void* const* tokens, KeyRange columns, std::int64_t kv_head,
                                  std::int64_t num_heads, MemoryRuns& runs) const {
  if (access_ == Access::kStrided) return;
  const bool is_interleaved = access_ == Access::kChunked || access_ == Access::kTransposed;
  const std::int64_t token_bytes = params_.head_size * element_size(params_.cache_type);
  const std::int64_t num_bytes = is_interleaved ? params_.batch.block_size * token_bytes
                                                : (num_heads - 1) * side_.head_stride + token_bytes;
  const std::int64_t offset = kv_head * side_.head_stride;
  const std::byte* previous = nullptr;
  for (std::int64_t k = columns.begin; k < columns.end; ++k) {
    const auto* token = static_cast<const std::byte*>(tokens[k]);
    // A block that the columns begin within is taken to end behind its end, which does no harm.
    const bool is_in_last =
        is_interleaved && k > columns.begin && token == previous + side_.token_stride;
    if (!is_in_last) runs.add(token + offset, num_bytes);
    previous = token;
  }
}

void CacheRows::add_lines_of_panels(const void* const* tokens, KeyRange columns,
                                    std::int64_t kv_head, std::int64_t begin, std::int64_t end,
                                    MemoryRuns& runs) const {
  const std::int64_t first = columns.begin / kGroupTokens * kGroupTokens;
  const std::int64_t head_offset = kv_head * side_.head_stride;
  const std::int64_t group_bytes = side_.group_stride;
  // What is read of a group before the next one's turn.
  const bool is_value = &side_ == &params_.value;
  const std::int64_t piece_bytes =
      is_value ? group_bytes / params_.head_size * kValueDimsAtOnce : group_bytes;
  std::int64_t piece_begin = 0;
  for (std::int64_t offset = 0; offset < group_bytes && piece_begin < end; offset += piece_bytes) {
    const std::int64_t num_bytes = std::min(piece_bytes, group_bytes - offset);
    for (std::int64_t k = first; k < columns.end; k += kGroupTokens, piece_begin += num_bytes) {
      const std::int64_t from = std::max(begin, piece_begin);
      const std::int64_t to = std::min(end, piece_begin + num_bytes);
      if (from >= to) continue;
      const std::byte* piece = static_cast<const std::byte*>(tokens[k]) + head_offset + offset;
      runs.add(piece + (from - piece_begin), to - from);
    }
  }
}

void CacheRows::locate(std::int64_t seq, std::int64_t tile_begin, KeyRange columns,
                       const void** tokens) const {
  if (in_panels()) return locate_groups(seq, tile_begin, columns, tokens);
  const std::int64_t block_size = params_.batch.block_size;
  std::int64_t block_idx = (tile_begin + columns.begin) / block_size;
  std::int64_t offset = (tile_begin + columns.begin) % block_size;
  for (std::int64_t k = columns.begin; k < columns.end; ++block_idx, offset = 0) {
    const std::int64_t block = params_.batch.block_tables(seq, block_idx);
    const std::int64_t end = std::min(columns.end, k + block_size - offset);
    const std::byte* token = side_.data + block * side_.block_stride + offset * side_.token_stride;
    for (; k < end; ++k, token += side_.token_stride) tokens[k] = token;
  }
}

void CacheRows::locate_groups(std::int64_t seq, std::int64_t tile_begin, KeyRange columns,
                              const void** tokens) const {
  const std::int64_t groups_per_block = params_.batch.block_size / kGroupTokens;
  const std::int64_t first = columns.begin / kGroupTokens * kGroupTokens;
  // A tile begins with a group, not always with a block.
  const std::int64_t first_group = (tile_begin + first) / kGroupTokens;
  std::int64_t block_idx = first_group / groups_per_block;
  std::int64_t group = first_group % groups_per_block;
  const std::byte* block = nullptr;
  for (std::int64_t k = first; k < columns.end; k += kGroupTokens) {
    if (block == nullptr) {
      block = side_.data + params_.batch.block_tables(seq, block_idx++) * side_.block_stride;
    }
    tokens[k] = block + group * side_.group_stride;
    if (++group < groups_per_block) continue;
    group = 0;
    block = nullptr;
  }
}

void CacheRows::convert(KeyRange columns, std::int64_t offset_bytes) {
  if (in_panels()) return convert_groups(columns, offset_bytes);
  const AttentionKernels& kernels = *params_.kernels;
  if (form_ == ElementType::kHalf) {
    kernels.convert_to_half[type_](
        {tokens_, columns.begin, columns.end, padded_size_, offset_bytes},
        reinterpret_cast<std::uint16_t*>(copy_));
    return;
  }
  const std::int64_t size = params_.head_size;
  const std::int64_t tokens_at_once = access_ == Access::kTransposed ? kTransposedTokens : 1;
  for (std::int64_t k = columns.begin; k < columns.end;) {
    const std::byte* source = static_cast<const std::byte*>(tokens_[k]) + offset_bytes;
    float* target = copy_ + k * padded_size_;
    switch (access_) {
      case Access::kWholeVectors:
      case Access::kDense:
        kernels.convert_row[type_](source, size, target);
        break;
      case Access::kChunked:
        kernels.convert_chunked_row[type_](source, side_.chunk_stride, size, target);
        break;
      case Access::kTransposed: {
        // All eight tokens, though the columns may begin within: they are in the
        // block.
        const std::int64_t before = k % kTransposedTokens;
        const auto* eight = source - before * element_size(params_.cache_type);
        kernels.transpose_rows[type_](eight, side_.dim_stride, size, target - before * padded_size_,
                                      padded_size_);
        k -= before;
        break;
      }
      case Access::kPanels:  // not reached: convert_groups()
        break;
      case Access::kStrided:
        convert_strided(source, target);
        break;
    }
    k += tokens_at_once;
  }
}

// To binary16, the only form that groups are converted to: element by element, in the order in
// which they lie.
void CacheRows::convert_groups(KeyRange columns, std::int64_t offset_bytes) {
  constexpr std::int64_t kGroups = kTileKeys / kGroupTokens;
  std::array<const void*, kGroups> groups;
  const std::int64_t begin = columns.begin / kGroupTokens;
  const std::int64_t end = ceil_div(columns.end, kGroupTokens);
  for (std::int64_t g = begin; g < end; ++g) {
    groups[static_cast<std::size_t>(g)] = tokens_[g * kGroupTokens];
  }
  params_.kernels->convert_to_half[type_](
      {groups.data(), begin, end, kGroupTokens * params_.head_size, offset_bytes},
      reinterpret_cast<std::uint16_t*>(copy_));
}

void CacheRows::convert_strided(const void* source, float* target) {
  const std::int64_t element = element_size(params_.cache_type);
  for (std::int64_t d = 0; d < params_.head_size; ++d) {
    const auto* from = static_cast<const std::byte*>(source) +
                       d / side_.chunk_size * side_.chunk_stride +
                       d % side_.chunk_size * side_.dim_stride;
    std::memcpy(dense_row_ + d * element, from, static_cast<std::size_t>(element));
  }
  params_.kernels->convert_row[type_](dense_row_, params_.head_size, target);
}

}  // namespace paged_kv::cpu
