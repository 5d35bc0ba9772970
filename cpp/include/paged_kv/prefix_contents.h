// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/ids.h"
#include "paged_kv/index_table.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace paged_kv {

// Numbers the contents of prefixes, so that equal numbers mean equal contents, whatever a hash
// says.
//
// A hash that is not collision resistant can name two prefixes alike, and then one request would
// read the KV of another. So each block that is hashed that way is looked up here by what it really
// is: its bytes (the tokens and extra keys of the block, encoded) and the number of the prefix
// before it. By induction, a number stands for every token and key from the first on. BlockHash
// carries it, and the prefix cache compares it together with the digest.
//
// A content is kept as long as it has holders: requests, cached blocks, and the contents that
// continue it. A number is never given twice.
//
// Invariants, checked by check_integrity():
//   P1  each content has a holder, and is found by its parent and bytes;
//   P2  the parent of each content is kept.
//
// Cost: O(bytes of the block) expected to acquire, O(1) else; releasing goes up the prefix as far
// as nobody else holds it. Memory: the bytes, and about 64 more a block. Thread rule: one owner
// thread, that of all pools and requests that use it.
class PrefixContents {
 public:
  PrefixContents() = default;
  PrefixContents(const PrefixContents&) = delete;
  PrefixContents& operator=(const PrefixContents&) = delete;

  // The number of the prefix that continues `parent` (invalid: nothing is before it) by `block`,
  // with one holder more. `digest_bits` are 32 bits of the hash: equal contents must have equal
  // ones. Throws std::invalid_argument if `parent` is not kept.
  [[nodiscard]] ContentId acquire(ContentId parent, std::span<const std::uint8_t> block,
                                  std::uint32_t digest_bits);

  [[nodiscard]] bool contains(ContentId content) const noexcept;
  // One holder more, one less, of a content that is kept.
  void retain(ContentId content) noexcept { ++at(content).num_holders; }
  void release(ContentId content) noexcept;

  // Contents that are kept.
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size() - unused_.size(); }

  // Throws InvariantError if P1 or P2 does not hold. O(bytes of all contents).
  void check_integrity() const;

 private:
  struct Entry {
    ContentId parent;
    std::vector<std::uint8_t> block;
    std::uint32_t hash = 0;
    std::int32_t num_holders = 0;
    std::int32_t generation = 0;  // raised when the entry is given up
  };

  [[nodiscard]] Entry& at(ContentId content) noexcept { return entries_[position_of(content)]; }
  [[nodiscard]] static std::size_t position_of(ContentId content) noexcept {
    return static_cast<std::size_t>(content.value() & 0xffffffff);
  }
  [[nodiscard]] ContentId id_of(std::int32_t position) const noexcept;
  [[nodiscard]] std::int32_t find(ContentId parent, std::span<const std::uint8_t> block,
                                  std::uint32_t hash) const;

  std::vector<Entry> entries_;
  std::vector<std::int32_t> unused_;  // positions; has room for all
  IndexTable index_;
};

// Holds one content, or none.
class ContentHolder {
 public:
  ContentHolder() = default;
  // Takes over a holder that acquire() or retain() has counted.
  ContentHolder(std::shared_ptr<PrefixContents> contents, ContentId content) noexcept
      : contents_(std::move(contents)), content_(content) {}
  ContentHolder(const ContentHolder& other) noexcept
      : contents_(other.contents_), content_(other.content_) {
    if (content_.valid()) contents_->retain(content_);
  }
  ContentHolder(ContentHolder&& other) noexcept
      : contents_(std::move(other.contents_)), content_(std::exchange(other.content_, {})) {}
  ContentHolder& operator=(ContentHolder other) noexcept {
    std::swap(contents_, other.contents_);
    std::swap(content_, other.content_);
    return *this;
  }
  ~ContentHolder() {
    if (content_.valid()) contents_->release(content_);
  }

  [[nodiscard]] ContentId content() const noexcept { return content_; }

 private:
  std::shared_ptr<PrefixContents> contents_;
  ContentId content_;
};

}  // namespace paged_kv
