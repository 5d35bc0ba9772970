// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_table.h"
#include "paged_kv/kv_cache_manager.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace paged_kv {

struct BatchAllocationArgs {
  std::int64_t num_lookahead_tokens = 0;  // slots for drafts to come, for each request
  std::int64_t reserved_blocks = 0;       // that stay free for others
  // Leave the requests after the first refused one alone. A scheduler that makes room and then goes
  // on from there takes the decisions that it would take request by request.
  bool stop_at_refusal = false;
};

// The requests that an engine runs, each with a row of the block tables, so that a step of all of
// them is one call.
//
// A request has its row from add() to remove() or free(), the same in the table of every cache
// group. Calls name requests by their rows, in the order in which they are served. Rows are those
// of a scheduler's batch: what is not in a call is left alone.
//
// While a request is in the batch, its blocks are given back through the batch only, and its rows
// are written by the batch only; slots may be allocated through the manager too, the rows follow in
// the next allocate_slots().
//
// A call that throws changes nothing, of no request, also if it is for want of memory or by a
// request's own block hasher.
//
// Invariants, checked by check_integrity():
//   B1  the row of a request holds its blocks in every table, null blocks where none is held any
//       more (as of the last call for that row);
//   B2  a row without a request is empty, in the batch's account.
//
// Cost: per request what KVCacheManager's method costs, and O(blocks new to the row or gone from
// it). Allocates no memory once the tables of the requests have their size.
// Thread rule: one owner thread.
class RequestBatch {
 public:
  // One table a cache group, in their order, each with the group's block size and rows for
  // max_model_len tokens. The batch has as many rows as the smallest table. Manager and tables must
  // outlive it.
  RequestBatch(KVCacheManager& manager, std::vector<BlockTable*> block_tables);
  RequestBatch(const RequestBatch&) = delete;
  RequestBatch& operator=(const RequestBatch&) = delete;

  [[nodiscard]] std::int64_t max_num_reqs() const noexcept { return std::ssize(rows_); }
  [[nodiscard]] std::int64_t num_reqs() const noexcept { return std::ssize(request_ids_); }

  // Gives a request, which must outlive its place, an empty row, and writes the blocks that it
  // holds there. Throws if the batch has a request of its id.
  void add(Request& request, std::int64_t row_idx);
  // Takes a request out and empties its row. It keeps its blocks.
  void remove(std::int64_t row_idx);

  // Appends to the request of rows[i] the next num_tokens[i] of `token_ids`; one if `num_tokens` is
  // empty.
  void append_output_token_ids(std::span<const std::int32_t> rows,
                               std::span<const std::int32_t> token_ids,
                               std::span<const std::int32_t> num_tokens = {});

  // Request after request: KVCacheManager::allocate_slots() of num_new_tokens[i] tokens, which
  // count as computed from then on, and its new blocks to its row. `refused` becomes the places i
  // of the requests that got none; those are as allocate_slots() leaves them, and the ones after
  // them are served all the same, unless args.stop_at_refusal.
  void allocate_slots(std::span<const std::int32_t> rows,
                      std::span<const std::int32_t> num_new_tokens, const BatchAllocationArgs& args,
                      std::vector<std::int32_t>& refused);

  // Request after request: KVCacheManager::free() and remove().
  void free(std::span<const std::int32_t> rows);

  // Throws InvariantError if B1 or B2 does not hold. O(blocks of the requests).
  void check_integrity() const;

 private:
  struct Row {
    Request* request = nullptr;
    std::uint64_t last_call = 0;  // that named the row
  };
  // What has been written to one row of one table: so many blocks, the first of them null.
  struct Written {
    std::int64_t num_blocks = 0;
    std::int64_t num_skipped_blocks = 0;
  };

  void check_row(std::int64_t row_idx) const;
  void check_rows(std::span<const std::int32_t> rows);
  // Checks all, and fills plans_.
  void plan_allocation(std::span<const std::int32_t> rows,
                       std::span<const std::int32_t> num_new_tokens,
                       const BatchAllocationArgs& args);
  [[nodiscard]] std::span<const BlockId> blocks(RequestIdx request_idx, std::size_t group) const {
    return manager_.coordinator().manager(group).blocks(request_idx);
  }
  [[nodiscard]] Request& request_of(std::int64_t row_idx) const noexcept {
    return *rows_[static_cast<std::size_t>(row_idx)].request;
  }
  [[nodiscard]] Written& written(std::int64_t row_idx, std::size_t group) noexcept {
    return written_[static_cast<std::size_t>(row_idx) * block_tables_.size() + group];
  }
  [[nodiscard]] const Written& written(std::int64_t row_idx, std::size_t group) const noexcept {
    return written_[static_cast<std::size_t>(row_idx) * block_tables_.size() + group];
  }
  void write_row(std::int64_t row_idx);

  KVCacheManager& manager_;
  std::vector<BlockTable*> block_tables_;
  std::vector<Row> rows_;
  std::vector<Written> written_;  // [row][group]
  std::unordered_set<std::string_view> request_ids_;
  std::uint64_t num_calls_ = 0;
  // Of the call under way.
  std::vector<AllocationPlan> plans_;
  std::vector<RequestMark> marks_;
};

}  // namespace paged_kv
