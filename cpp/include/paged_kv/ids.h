// SPDX-License-Identifier: Apache-2.0
//
// Strong integer ids: a BlockId cannot be passed where a group or a count is meant.
#pragma once

#include <compare>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <ostream>
#include <type_traits>

namespace paged_kv {

// An integer that only equals and orders with its own kind. Trivially copyable and as large as T,
// so arrays of ids have the layout of arrays of T. Default: -1, "no id".
template <class Tag, std::signed_integral T>
class StrongId {
 public:
  using value_type = T;

  constexpr StrongId() noexcept = default;
  explicit constexpr StrongId(T value) noexcept : value_(value) {}

  [[nodiscard]] constexpr T value() const noexcept { return value_; }
  // For indexing a std container; the caller has checked valid().
  [[nodiscard]] constexpr std::size_t index() const noexcept {
    return static_cast<std::size_t>(value_);
  }
  [[nodiscard]] constexpr bool valid() const noexcept { return value_ >= 0; }

  friend constexpr auto operator<=>(StrongId, StrongId) noexcept = default;
  friend std::ostream& operator<<(std::ostream& stream, StrongId id) { return stream << id.value_; }

 private:
  T value_{-1};
};

// A physical block of the KV cache: row of the cache tensors.
using BlockId = StrongId<struct BlockIdTag, std::int32_t>;
// A KV cache group: layers that share one block table.
using GroupId = StrongId<struct GroupIdTag, std::int32_t>;
// A request's row in the tables of a KVCacheManager. Rows are reused.
using RequestIdx = StrongId<struct RequestIdxTag, std::int32_t>;
// The content of a prefix, see prefix_contents.h.
using ContentId = StrongId<struct ContentIdTag, std::int64_t>;

// Block 0 of every pool: stands in tables where no block is held, and is never handed out.
inline constexpr BlockId kNullBlockId{0};

static_assert(sizeof(BlockId) == sizeof(std::int32_t));
static_assert(std::is_trivially_copyable_v<BlockId>);

}  // namespace paged_kv

template <class Tag, class T>
struct std::hash<paged_kv::StrongId<Tag, T>> {
  std::size_t operator()(paged_kv::StrongId<Tag, T> id) const noexcept {
    return std::hash<T>{}(id.value());
  }
};
