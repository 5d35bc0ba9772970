// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/request_batch.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace paged_kv {
namespace {

AllocateSlotsArgs args_of_request(std::int32_t num_new_tokens, const BatchAllocationArgs& args) {
  AllocateSlotsArgs result;
  result.num_new_tokens = num_new_tokens;
  result.num_lookahead_tokens = args.num_lookahead_tokens;
  result.reserved_blocks = args.reserved_blocks;
  return result;
}

// So that writing blocks to a row cannot fail.
void check_table(const BlockTable& table, std::size_t group, const KVCacheManager& manager) {
  const std::int64_t block_size = manager.coordinator().manager(group).block_size();
  PAGED_KV_CHECK(table.options().block_size == block_size, "block_tables[", group,
                 "] must have blocks of ", block_size, " tokens, got ", table.options().block_size);
  const std::int64_t num_blocks = ceil_div(manager.options().max_model_len, block_size);
  PAGED_KV_CHECK(table.options().max_num_blocks_per_req >= num_blocks, "block_tables[", group,
                 "] must have rows of at least ", num_blocks, " blocks, got ",
                 table.options().max_num_blocks_per_req);
  const std::int64_t max_num_blocks = kMaxInt32 / table.ratio();
  PAGED_KV_CHECK(manager.kv_cache_config().num_blocks <= max_num_blocks, "block_tables[", group,
                 "] takes ids of at most ", max_num_blocks, " blocks, the pool has ",
                 manager.kv_cache_config().num_blocks);
}

}  // namespace

RequestBatch::RequestBatch(KVCacheManager& manager, std::vector<BlockTable*> block_tables)
    : manager_(manager), block_tables_(std::move(block_tables)) {
  PAGED_KV_CHECK(!block_tables_.empty() && block_tables_.size() == manager.num_kv_cache_groups(),
                 "block_tables: expected one for each of the ", manager.num_kv_cache_groups(),
                 " cache groups, got ", block_tables_.size());
  std::int64_t num_rows = std::numeric_limits<std::int64_t>::max();
  for (std::size_t group = 0; group < block_tables_.size(); ++group) {
    const BlockTable* table = block_tables_[group];
    PAGED_KV_CHECK(std::ranges::count(block_tables_, table) == 1, "block_tables[", group,
                   "] is given twice");
    check_table(*table, group, manager);
    num_rows = std::min(num_rows, table->options().max_num_reqs);
  }
  rows_.resize(to_size(num_rows));
  written_.resize(rows_.size() * block_tables_.size());
}

void RequestBatch::check_row(std::int64_t row_idx) const {
  PAGED_KV_CHECK_AS(std::out_of_range, row_idx >= 0 && row_idx < max_num_reqs(),
                    "row must be in [0, ", max_num_reqs(), "), got ", row_idx);
}

// Each has a request, and none is named twice.
void RequestBatch::check_rows(std::span<const std::int32_t> rows) {
  const std::uint64_t call = ++num_calls_;
  for (const std::int32_t row_idx : rows) {
    check_row(row_idx);
    Row& row = rows_[to_size(row_idx)];
    PAGED_KV_CHECK(row.request != nullptr, "rows: row ", row_idx, " has no request");
    PAGED_KV_CHECK(std::exchange(row.last_call, call) != call, "rows: row ", row_idx,
                   " is named twice");
  }
}

void RequestBatch::add(Request& request, std::int64_t row_idx) {
  check_row(row_idx);
  PAGED_KV_CHECK(rows_[to_size(row_idx)].request == nullptr, "row ", row_idx, " has a request");
  PAGED_KV_CHECK(!request_ids_.contains(request.request_id()), "request ", request.request_id(),
                 " is in the batch already");
  for (std::size_t group = 0; group < block_tables_.size(); ++group) {
    PAGED_KV_CHECK(block_tables_[group]->num_blocks_per_row()[to_size(row_idx)] == 0,
                   "block_tables[", group, "]: row ", row_idx, " is not empty");
    block_tables_[group]->check_append_row(manager_.blocks(request, group), row_idx);
  }
  request_ids_.insert(request.request_id());
  rows_[to_size(row_idx)].request = &request;
  write_row(row_idx);
}

void RequestBatch::remove(std::int64_t row_idx) {
  check_row(row_idx);
  Row& row = rows_[to_size(row_idx)];
  PAGED_KV_CHECK(row.request != nullptr, "row ", row_idx, " has no request");
  for (std::size_t group = 0; group < block_tables_.size(); ++group) {
    block_tables_[group]->clear_row(row_idx);
    written(row_idx, group) = {};
  }
  manager_.forget_without_blocks(*row.request);
  request_ids_.erase(row.request->request_id());
  row.request = nullptr;
}

void RequestBatch::append_output_token_ids(std::span<const std::int32_t> rows,
                                           std::span<const std::int32_t> token_ids,
                                           std::span<const std::int32_t> num_tokens) {
  check_rows(rows);
  PAGED_KV_CHECK(num_tokens.empty() || num_tokens.size() == rows.size(),
                 "num_tokens: expected one for each of the ", rows.size(), " rows, got ",
                 num_tokens.size());
  std::int64_t num_all_tokens = num_tokens.empty() ? std::ssize(rows) : 0;
  for (const std::int32_t n : num_tokens) {
    PAGED_KV_CHECK(n >= 0, "num_tokens must not be negative, got ", n);
    num_all_tokens += n;
  }
  PAGED_KV_CHECK(std::ssize(token_ids) == num_all_tokens, "token_ids: expected ", num_all_tokens,
                 ", got ", token_ids.size());
  marks_.clear();
  marks_.reserve(rows.size());
  try {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const std::size_t n = num_tokens.empty() ? 1 : to_size(num_tokens[i]);
      Request& request = request_of(rows[i]);
      const RequestMark mark = request.mark();
      request.append_output_token_ids(token_ids.first(n));
      marks_.push_back(mark);
      token_ids = token_ids.subspan(n);
    }
  } catch (...) {
    for (std::size_t i = 0; i < marks_.size(); ++i) request_of(rows[i]).rewind(marks_[i]);
    throw;
  }
}

void RequestBatch::plan_allocation(std::span<const std::int32_t> rows,
                                   std::span<const std::int32_t> num_new_tokens,
                                   const BatchAllocationArgs& args) {
  PAGED_KV_CHECK(rows.size() == num_new_tokens.size(), "num_new_tokens: expected one for each of ",
                 "the ", rows.size(), " rows, got ", num_new_tokens.size());
  plans_.clear();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const Request& request = request_of(rows[i]);
    plans_.push_back(
        manager_.plan_allocate_slots(request, args_of_request(num_new_tokens[i], args)));
    for (std::size_t group = 0; group < block_tables_.size(); ++group) {
      PAGED_KV_CHECK(std::ssize(blocks(plans_.back().request_idx, group)) >=
                         written(rows[i], group).num_blocks,
                     "rows: the request of row ", rows[i],
                     " has given back its blocks, but is still in the batch");
    }
  }
}

void RequestBatch::allocate_slots(std::span<const std::int32_t> rows,
                                  std::span<const std::int32_t> num_new_tokens,
                                  const BatchAllocationArgs& args,
                                  std::vector<std::int32_t>& refused) {
  check_rows(rows);
  // Whatever may throw comes before the first change.
  plan_allocation(rows, num_new_tokens, args);
  refused.reserve(rows.size());
  refused.clear();
  for (std::size_t i = 0; i < rows.size(); ++i) {
    Request& request = request_of(rows[i]);
    if (manager_.try_allocate_slots(request, args_of_request(num_new_tokens[i], args), plans_[i])) {
      request.progress.num_computed_tokens += num_new_tokens[i];
    } else {
      refused.push_back(static_cast<std::int32_t>(i));
    }
    // Also of a refused request: blocks that left its window may be others' from now on.
    write_row(rows[i]);
    if (args.stop_at_refusal && !refused.empty()) return;
  }
}

void RequestBatch::free(std::span<const std::int32_t> rows) {
  check_rows(rows);
  for (const std::int32_t row_idx : rows) {
    manager_.free(request_of(row_idx));
    remove(row_idx);
  }
}

// Brings the rows of a request up to date with its blocks.
void RequestBatch::write_row(std::int64_t row_idx) {
  const RequestIdx request_idx = manager_.find(request_of(row_idx));
  for (std::size_t group = 0; group < block_tables_.size(); ++group) {
    const std::span<const BlockId> held = blocks(request_idx, group);
    Written& row = written(row_idx, group);
    if (std::ssize(held) > row.num_blocks) {
      block_tables_[group]->append_row(held.subspan(to_size(row.num_blocks)), row_idx);
      row.num_blocks = std::ssize(held);
    }
    // Blocks leave a window from the left.
    const std::int64_t num_skipped_blocks =
        manager_.coordinator().manager(group).num_skipped_blocks(request_idx);
    if (num_skipped_blocks <= row.num_skipped_blocks) continue;
    const auto left =
        held.first(to_size(num_skipped_blocks)).subspan(to_size(row.num_skipped_blocks));
    block_tables_[group]->replace_blocks(left, row_idx, row.num_skipped_blocks);
    row.num_skipped_blocks = num_skipped_blocks;
  }
}

void RequestBatch::check_integrity() const {
  for (std::int64_t row_idx = 0; row_idx < max_num_reqs(); ++row_idx) {
    const Request* request = rows_[to_size(row_idx)].request;
    for (std::size_t group = 0; group < block_tables_.size(); ++group) {
      const std::int64_t num_written = written(row_idx, group).num_blocks;
      PAGED_KV_CHECK_AS(InvariantError, request != nullptr || num_written == 0, "B2: row ", row_idx,
                        " of group ", group, " has no request, but ", num_written, " blocks");
      if (request == nullptr) continue;
      BlockTable& table = *block_tables_[group];
      const auto held = manager_.blocks(*request, group);
      const std::int64_t ratio = table.ratio();
      PAGED_KV_CHECK_AS(InvariantError,
                        num_written <= std::ssize(held) &&
                            table.num_blocks_per_row()[to_size(row_idx)] == num_written * ratio,
                        "B1: row ", row_idx, " of group ", group, " has ",
                        table.num_blocks_per_row()[to_size(row_idx)], " entries, the request ",
                        held.size(), " blocks, of which ", num_written, " were written");
      const auto entries = table.table().subspan(to_size(row_idx * table.width()));
      for (std::int64_t i = 0; i < num_written * ratio; ++i) {
        const std::int64_t block = held[to_size(i / ratio)].value();
        const std::int64_t expected = block * ratio + i % ratio;
        PAGED_KV_CHECK_AS(InvariantError, entries[to_size(i)] == expected, "B1: row ", row_idx,
                          " of group ", group, ", entry ", i, ": expected ", expected, ", got ",
                          entries[to_size(i)]);
      }
    }
  }
}

}  // namespace paged_kv
