// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_tile.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace paged_kv::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Columns that all kv heads go over before the next ones have their turn. Heads of a token that lie
// side by side share pages: a few tokens of all heads are memory in order, many tokens of one head
// visit each page once a head. So many that a strip and the next one, which is fetched meanwhile,
// stay in the second-level cache, but enough to be worth a call. 0: head by head.
[[nodiscard]] std::int64_t choose_strip_keys(const PagedAttentionParams& p) noexcept {
  constexpr std::int64_t kStripBytes = 64 * 1024;
  const std::int64_t element = element_size(p.cache_type);
  const auto has_heads_side_by_side = [&](const CacheSide& side) {
    return side.head_stride == p.head_size * element && side.head_stride < side.token_stride;
  };
  if (p.key.in_panels()) return 0;
  if (!has_heads_side_by_side(p.key) || !has_heads_side_by_side(p.value)) return 0;
  const std::uint64_t fitting =
      static_cast<std::uint64_t>(kStripBytes / (p.num_kv_heads * p.head_size * element));
  const std::int64_t least = element == sizeof(float) ? 8 : 16;
  return std::clamp(static_cast<std::int64_t>(std::bit_floor(fitting)), least, kTileKeys);
}

// Positions as columns of the tile that begins at `tile_begin`; may be empty.
[[nodiscard]] KeyRange columns_of(KeyRange positions, std::int64_t tile_begin) noexcept {
  return {std::clamp<std::int64_t>(positions.begin - tile_begin, 0, kTileKeys),
          std::clamp<std::int64_t>(positions.end - tile_begin, 0, kTileKeys)};
}

[[nodiscard]] KeyRange common(KeyRange a, KeyRange b) noexcept {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

[[nodiscard]] bool equal(KeyRange a, KeyRange b) { return a.begin == b.begin && a.end == b.end; }

}  // namespace

void join_rows(const PagedAttentionParams& params, AttentionRow& row, const AttentionRow& other) {
  if (!other.has_keys()) return;
  if (!row.has_keys()) {
    std::copy_n(other.output, params.padded_head_size(), row.output);
    row.state = other.state;
    return;
  }
  params.kernels->merge(row.state, row.output, other.state, other.output,
                        params.padded_head_size());
}

AttentionTile::AttentionTile(const PagedAttentionParams& params, ScratchCutter& scratch)
    : params_(params),
      kernels_(*params.kernels),
      group_size_(params.group_size()),
      padded_size_(params.padded_head_size()),
      strip_keys_(choose_strip_keys(params)),
      keys_(params, params.key, scratch),
      values_(params, params.value, scratch) {
  const std::int64_t max_rows = max_tile_rows(group_size_);
  queries_ = scratch.take<Query>(max_rows);
  rows_ = scratch.take<AttentionRow>(max_rows);
  split_rows_ = scratch.take<AttentionRow>(max_rows);
  float* output = scratch.take<float>(max_rows * padded_size_);
  float* split_output = scratch.take<float>(max_rows * padded_size_);
  query_ = scratch.take<float>(max_rows * padded_size_);
  logits_ = scratch.take<float>(max_rows * kTileKeys);
  ahead_ = scratch.take<MemoryRun>(kTileKeys);
  if (output == nullptr) return;
  for (std::int64_t r = 0; r < max_rows; ++r) {
    rows_[r].output = output + r * padded_size_;
    split_rows_[r].output = split_output + r * padded_size_;
  }
}

void AttentionTile::run(const AttentionWork& work) {
  const QueryTile& tile = work.tile;
  begin_queries(tile, work.keys);
  keys_.begin(tile.seq, tile.num_queries * group_size_);
  values_.begin(tile.seq, tile.num_queries * group_size_);
  clear(rows_);
  for (std::int64_t begin = seen_.begin; begin < seen_.end;) {
    const std::int64_t end = std::min(seen_.end, (begin / kSplitKeys + 1) * kSplitKeys);
    if (begin == seen_.begin) {
      run_split({begin, end}, rows_);
    } else {
      clear(split_rows_);
      run_split({begin, end}, split_rows_);
      for (std::int64_t r = 0; r < num_rows_; ++r) join_rows(params_, rows_[r], split_rows_[r]);
    }
    begin = end;
  }
}

void AttentionTile::begin_queries(const QueryTile& tile, KeyRange keys) {
  const auto& p = params_;
  tile_ = tile;
  num_rows_ = tile.num_rows(group_size_);
  seen_ = {keys.end, keys.begin};
  const std::int64_t element = element_size(p.query_type);
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    Query& q = queries_[r];
    const std::int64_t query = tile.query_of(r, group_size_);
    q.head = tile.head_of(r, group_size_);
    q.query_pos = p.batch.first_query_pos(tile.seq) + query;
    q.visible = p.mask.visible(q.query_pos, p.batch.seq_lens[tile.seq]);
    q.visible = {std::max(q.visible.begin, keys.begin), std::min(q.visible.end, keys.end)};
    q.sparse_offset = p.sparsity.enabled() ? p.sparsity.offset(q.head, p.num_heads,
                                                               q.head / group_size_, p.num_kv_heads)
                                           : 0;
    if (!q.visible.empty()) {
      seen_ = {std::min(seen_.begin, q.visible.begin), std::max(seen_.end, q.visible.end)};
    }
    const std::int64_t offset = (p.batch.query_begin(tile.seq) + query) * p.query_token_stride +
                                q.head * p.query_head_stride;
    kernels_.convert_row[static_cast<int>(p.query_type)](
        static_cast<const std::byte*>(p.query) + offset * element, p.head_size,
        query_ + r * padded_size_);
  }
}

void AttentionTile::clear(AttentionRow* rows) const noexcept {
  for (std::int64_t r = 0; r < num_rows_; ++r) rows[r].state = {-kInfinity, 0.0f};
  std::fill_n(rows[0].output, num_rows_ * padded_size_, 0.0f);
}

void AttentionTile::run_split(KeyRange split, AttentionRow* rows) {
  std::int64_t tile_begin = split.begin / kTileKeys * kTileKeys;
  for (; tile_begin < split.end; tile_begin += kTileKeys) {
    set_columns(tile_begin);
    run_tile(tile_begin, rows);
  }
}

void AttentionTile::run_tile(std::int64_t tile_begin, AttentionRow* rows) {
  const KeyRange columns = columns_of(seen_, tile_begin);
  keys_.turn_to(tile_begin, columns);
  values_.turn_to(tile_begin, columns);
  multiply_strips(columns);
  const float unit = kernels_.unit[static_cast<int>(params_.cache_type)];
  for (std::int64_t head = 0; head < tile_.num_kv_heads; ++head) {
    const float scale = params_.scale * params_.key.scale_of(tile_.kv_head_begin + head) * unit;
    softmax(tile_begin, scale, first_row(head), first_row(head + 1), rows);
  }
  add_strips(tile_begin, columns, rows);
}

void AttentionTile::add_first_lines(const CacheRows& side, const Strip& strip,
                                    MemoryRuns& runs) const {
  side.add_first_lines(strip.columns, tile_.kv_head_begin + strip.head_begin, strip.num_heads(),
                       runs);
}

void AttentionTile::add_other_lines(const CacheRows& side, const Strip& strip,
                                    MemoryRuns& runs) const {
  side.add_other_lines(strip.columns, tile_.kv_head_begin + strip.head_begin, runs);
}

void AttentionTile::add_first_lines_after(std::int64_t tile_begin, MemoryRuns& runs) {
  const std::int64_t next_begin = tile_begin + kTileKeys;
  const KeyRange columns = columns_of(seen_, next_begin);
  if (!columns.empty()) return add_first_lines_of(tile_, next_begin, columns, runs);

  const AttentionWork next = next_work_.get(next_work_.context);
  if (next.keys.empty()) return;
  const KeyRange visible = visible_keys(params_.batch, params_.mask, next.tile.seq,
                                        next.tile.query_begin, next.tile.num_queries);
  const KeyRange keys = common(next.keys, visible);
  if (keys.empty()) return;
  const std::int64_t first_begin = keys.begin / kTileKeys * kTileKeys;
  add_first_lines_of(next.tile, first_begin, columns_of(keys, first_begin), runs);
}

void AttentionTile::add_first_lines_of(const QueryTile& tile, std::int64_t tile_begin,
                                       KeyRange columns, MemoryRuns& runs) {
  keys_.locate_next(tile.seq, tile_begin, columns);
  const Strip strip = first_strip(columns, tile.num_kv_heads);
  keys_.add_first_lines_of_next(strip.columns, tile.kv_head_begin + strip.head_begin,
                                strip.num_heads(), runs);
}

void AttentionTile::multiply_strips(KeyRange columns) {
  const Strip first = first_strip(columns, tile_.num_kv_heads);
  for (Strip strip = first; !strip.columns.empty();) {
    const Strip next = strip_after(strip, columns);
    MemoryRuns runs(ahead_);
    add_other_lines(keys_, strip, runs);
    if (next.columns.empty()) {
      add_first_lines(values_, first, runs);
    } else {
      add_first_lines(keys_, next, runs);
    }
    LinesAhead ahead = LinesAhead::of(ahead_, runs.finish(), strip.num_heads());
    for (std::int64_t head = strip.head_begin; head < strip.head_end; ++head) {
      TokenRows keys = keys_.rows(strip.columns, tile_.kv_head_begin + head);
      keys.ahead = &ahead;
      multiply_keys(keys, first_row(head), first_row(head + 1));
    }
    strip = next;
  }
}

void AttentionTile::add_strips(std::int64_t tile_begin, KeyRange columns, AttentionRow* rows) {
  for (Strip strip = first_strip(columns, tile_.num_kv_heads); !strip.columns.empty();) {
    const Strip next = strip_after(strip, columns);
    MemoryRuns runs(ahead_);
    add_other_lines(values_, strip, runs);
    if (next.columns.empty()) {
      add_first_lines_after(tile_begin, runs);
    } else {
      add_first_lines(values_, next, runs);
    }
    LinesAhead ahead = LinesAhead::of(ahead_, runs.finish(), strip.num_heads());
    for (std::int64_t head = strip.head_begin; head < strip.head_end; ++head) {
      TokenRows values = values_.rows(strip.columns, tile_.kv_head_begin + head);
      values.ahead = &ahead;
      add_values(values, tile_begin, first_row(head), first_row(head + 1), rows);
    }
    strip = next;
  }
}

AttentionTile::Strip AttentionTile::first_strip(KeyRange columns,
                                                std::int64_t num_kv_heads) const noexcept {
  if (strip_keys_ == 0 || num_kv_heads == 1) return {columns, 0, 1};
  const std::int64_t end = (columns.begin / strip_keys_ + 1) * strip_keys_;
  return {{columns.begin, std::min(end, columns.end)}, 0, num_kv_heads};
}

AttentionTile::Strip AttentionTile::strip_after(const Strip& strip,
                                                KeyRange columns) const noexcept {
  if (strip.head_end < tile_.num_kv_heads) {
    return {strip.columns, strip.head_end, strip.head_end + 1};
  }
  return first_strip({strip.columns.end, columns.end}, tile_.num_kv_heads);
}

void AttentionTile::set_columns(std::int64_t tile_begin) noexcept {
  for (std::int64_t r = 0; r < num_rows_; ++r) {
    queries_[r].columns = columns_of(queries_[r].visible, tile_begin);
  }
}

KeyRange AttentionTile::common_columns(std::int64_t first, std::int64_t last) const noexcept {
  KeyRange range{0, kTileKeys};
  for (std::int64_t r = first; r < last; ++r) {
    range = common(range, queries_[r].columns);
  }
  return range;
}

// All rows at once if they see the same keys, else by halves, each with its own.
void AttentionTile::multiply_keys(TokenRows keys, std::int64_t first, std::int64_t last) {
  constexpr std::int64_t kMinRows = 8;
  const KeyRange strip{keys.begin, keys.end};
  KeyRange all{kTileKeys, 0};
  for (std::int64_t r = first; r < last; ++r) {
    const KeyRange columns = queries_[r].columns;
    all = {std::min(all.begin, columns.begin), std::max(all.end, columns.end)};
  }
  all = common(all, strip);
  if (all.empty()) return;
  if (equal(all, common(strip, common_columns(first, last))) || last - first <= kMinRows) {
    keys.begin = all.begin;
    keys.end = all.end;
    const auto multiply = keys_.in_panels() ? kernels_.token_panels.multiply_keys[keys_.type()]
                                            : kernels_.multiply_keys[keys_.type()];
    multiply({query_ + first * padded_size_, padded_size_, last - first}, keys, logits(first));
    return;
  }
  const std::int64_t middle = first + round_up((last - first) / 2, kMinRows);
  multiply_keys(keys, first, middle);
  multiply_keys(keys, middle, last);
}

// Turns logits into unnormalised weights, and rescales sums and outputs where the maximum rose.
void AttentionTile::softmax(std::int64_t tile_begin, float scale, std::int64_t first,
                            std::int64_t last, AttentionRow* rows) {
  const auto& p = params_;
  for (std::int64_t r = first; r < last; ++r) {
    Query& q = queries_[r];
    if (q.columns.empty()) continue;
    const LogitTransform transform{
        .scale = scale,
        .softcap = p.softcap,
        .alibi_slope = p.alibi_slopes != nullptr ? p.alibi_slopes[q.head * p.alibi_stride] : 0.0f,
        .distance = static_cast<float>(tile_begin - q.query_pos),
        .begin = q.columns.begin,
        .end = q.columns.end,
    };
    q.max = kernels_.transform_logits(transform, logits(r));
    if (p.sparsity.enabled()) q.max = mask_sparse(q, tile_begin, logits(r));
  }
  // In a loop of its own, so that one row's maximum is not waited for.
  for (std::int64_t r = first; r < last; ++r) {
    Query& q = queries_[r];
    if (q.columns.empty()) continue;
    if (!kernels_.softmax(logits(r), q.max, rows[r].state, rows[r].output, padded_size_)) {
      q.columns = {0, 0};
    }
  }
}

float AttentionTile::mask_sparse(const Query& query, std::int64_t tile_begin, float* logits) const {
  for (std::int64_t k = query.columns.begin; k < query.columns.end; ++k) {
    if (!params_.sparsity.visible(tile_begin + k, query.query_pos, query.sparse_offset)) {
      logits[k] = -kInfinity;
    }
  }
  return kernels_.transform_logits({}, logits);
}

// A column that a row does not see is left out rather than given weight 0: 0 * NaN is NaN.
void AttentionTile::add_values(const TokenRows& values, std::int64_t tile_begin, std::int64_t first,
                               std::int64_t last, AttentionRow* rows) {
  constexpr std::int64_t kFewRows = 4;
  const KeyRange strip{values.begin, values.end};
  while (first < last) {
    if (params_.sparsity.enabled()) {
      add_to_sparse_row(values, tile_begin, first++, rows);
      continue;
    }
    const KeyRange columns = common(strip, queries_[first].columns);
    std::int64_t end = first + 1;
    while (end < last && equal(common(strip, queries_[end].columns), columns)) ++end;
    if (end - first + 1 >= kFewRows || end == last) {
      add_to_rows(values, columns, first, end, rows);
    } else {
      end = std::min(first + kFewRows, last);
      add_to_few_rows(values, first, end, rows);
    }
    first = end;
  }
}

void AttentionTile::add_to_rows(TokenRows values, KeyRange columns, std::int64_t first,
                                std::int64_t last, AttentionRow* rows) {
  const KeyRange added = common({values.begin, values.end}, columns);
  if (added.empty()) return;
  values.begin = added.begin;
  values.end = added.end;
  const auto add = values_.in_panels() ? kernels_.token_panels.add_values[values_.type()]
                                       : kernels_.add_values[values_.type()];
  add(logits(first), values, {rows[first].output, padded_size_, last - first});
}

// Rows of a diagonal, whose columns differ a little: those that all see together, the others alone.
// Each row's columns still come in order.
void AttentionTile::add_to_few_rows(const TokenRows& values, std::int64_t first, std::int64_t last,
                                    AttentionRow* rows) {
  const KeyRange shared = common_columns(first, last);
  if (shared.empty()) {
    for (std::int64_t r = first; r < last; ++r) {
      add_to_rows(values, queries_[r].columns, r, r + 1, rows);
    }
    return;
  }
  for (std::int64_t r = first; r < last; ++r) {
    add_to_rows(values, {queries_[r].columns.begin, shared.begin}, r, r + 1, rows);
  }
  add_to_rows(values, shared, first, last, rows);
  for (std::int64_t r = first; r < last; ++r) {
    add_to_rows(values, {shared.end, queries_[r].columns.end}, r, r + 1, rows);
  }
}

void AttentionTile::add_to_sparse_row(const TokenRows& values, std::int64_t tile_begin,
                                      std::int64_t r, AttentionRow* rows) {
  const Query& q = queries_[r];
  const KeyRange columns = common({values.begin, values.end}, q.columns);
  for (std::int64_t k = columns.begin; k < columns.end; ++k) {
    if (!params_.sparsity.visible(tile_begin + k, q.query_pos, q.sparse_offset)) continue;
    add_to_rows(values, {k, k + 1}, r, r + 1, rows);
  }
}

}  // namespace paged_kv::cpu
