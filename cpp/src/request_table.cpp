// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/request_table.h"

#include "paged_kv/check.h"
#include "paged_kv/make_room.h"

#include <atomic>

namespace paged_kv {
namespace {

std::uint64_t next_table_id() noexcept {
  static std::atomic<std::uint64_t> last_id{0};
  return ++last_id;
}

}  // namespace

RequestTable::RequestTable() : table_id_(next_table_id()) {}

RequestIdx RequestTable::find_by_id(const Request& request) const {
  const RequestIdx request_idx = find(request.request_id());
  if (request_idx.valid()) remember(request, request_idx);
  return request_idx;
}

RequestIdx RequestTable::find(std::string_view request_id) const {
  const auto it = idx_by_id_.find(request_id);
  return it == idx_by_id_.end() ? RequestIdx() : it->second;
}

RequestIdx RequestTable::find_or_add(const Request& request) {
  RequestIdx request_idx = find(request);
  if (request_idx.valid()) return request_idx;
  if (unused_rows_.empty()) {
    make_room(unused_rows_, rows_.size() + 1);  // so that remove() does not allocate
    rows_.emplace_back();
    unused_rows_.emplace_back(static_cast<std::int32_t>(rows_.size()) - 1);
  }
  request_idx = unused_rows_.back();
  Row& row = rows_[request_idx.index()];
  row.request_id = request.request_id();
  idx_by_id_.emplace(request.request_id(), request_idx);
  unused_rows_.pop_back();
  row.in_use = true;
  remember(request, request_idx);
  return request_idx;
}

void RequestTable::remove(RequestIdx request_idx) noexcept {
  Row& row = rows_[request_idx.index()];
  idx_by_id_.erase(row.request_id);
  row.request_id.clear();
  row.in_use = false;
  ++row.generation;
  unused_rows_.push_back(request_idx);
}

void RequestTable::remember(const Request& request, RequestIdx request_idx) const {
  request.handle_ = {table_id_, request_idx, rows_[request_idx.index()].generation};
}

void RequestTable::check_integrity() const {
  std::size_t num_used = 0;
  for (std::size_t i = 0; i < rows_.size(); ++i) {
    if (!rows_[i].in_use) continue;
    ++num_used;
    PAGED_KV_CHECK_AS(InvariantError, find(rows_[i].request_id).index() == i, "RT1: id ",
                      rows_[i].request_id, " does not lead to row ", i);
  }
  PAGED_KV_CHECK_AS(InvariantError, num_used == idx_by_id_.size(), "RT1: ", num_used,
                    " rows are in use, there are ", idx_by_id_.size(), " ids");
  std::vector<bool> is_listed(rows_.size());
  for (const RequestIdx request_idx : unused_rows_) {
    PAGED_KV_CHECK_AS(InvariantError,
                      !rows_[request_idx.index()].in_use && !is_listed[request_idx.index()],
                      "RT2: row ", request_idx, " is listed as unused");
    is_listed[request_idx.index()] = true;
  }
  PAGED_KV_CHECK_AS(InvariantError, num_used + unused_rows_.size() == rows_.size(), "RT2: of ",
                    rows_.size(), " rows ", num_used, " are used and ", unused_rows_.size(),
                    " unused");
}

}  // namespace paged_kv
