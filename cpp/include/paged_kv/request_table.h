// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/request.h"

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace paged_kv {

// Gives each request that holds blocks a row: a small number by which the managers find what they
// know of it. A request remembers its row, so that only its first lookup hashes its id.
//
// Invariants, checked by check_integrity():
//   RT1  size() rows are in use, each with another id, and every id leads to its row;
//   RT2  the other rows are unused, each listed once.
//
// Cost: O(1) per call; find() by id hashes the id.
// Thread rule: one owner thread.
class RequestTable {
 public:
  RequestTable();
  RequestTable(const RequestTable&) = delete;
  RequestTable& operator=(const RequestTable&) = delete;

  // The row, or an invalid one if the request has none. Requests with one id have one row.
  [[nodiscard]] RequestIdx find(const Request& request) const {
    const RequestHandle& handle = request.handle_;
    const bool is_remembered = handle.table_id == table_id_ &&
                               rows_[handle.request_idx.index()].generation == handle.generation;
    return is_remembered ? handle.request_idx : find_by_id(request);
  }
  [[nodiscard]] RequestIdx find(std::string_view request_id) const;

  // Changes nothing if memory is wanting.
  [[nodiscard]] RequestIdx find_or_add(const Request& request);

  // Ends the use of a row that is in use.
  void remove(RequestIdx request_idx) noexcept;

  [[nodiscard]] std::size_t size() const noexcept { return idx_by_id_.size(); }
  // Rows in use and unused.
  [[nodiscard]] std::size_t num_rows() const noexcept { return rows_.size(); }

  // Throws InvariantError if RT1 or RT2 does not hold. O(num_rows()).
  void check_integrity() const;

 private:
  struct Row {
    std::string request_id;
    std::uint32_t generation = 0;  // raised when the row is given up: old handles no longer fit
    bool in_use = false;
  };
  struct StringHash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const noexcept {
      return std::hash<std::string_view>{}(text);
    }
  };

  [[nodiscard]] RequestIdx find_by_id(const Request& request) const;
  void remember(const Request& request, RequestIdx request_idx) const;

  std::uint64_t table_id_;  // no other table of the process has it
  std::vector<Row> rows_;
  std::vector<RequestIdx> unused_rows_;
  std::unordered_map<std::string, RequestIdx, StringHash, std::equal_to<>> idx_by_id_;
};

}  // namespace paged_kv
