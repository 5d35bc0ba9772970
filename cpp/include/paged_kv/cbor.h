// SPDX-License-Identifier: Apache-2.0
//
// Writer for the part of CBOR (RFC 8949) that block hashes need, in canonical form: every length
// and integer in its shortest encoding.
#pragma once

#include "paged_kv/big_endian.h"

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace paged_kv {

// Appends items to `out`, which must outlive the writer.
class CborWriter {
 public:
  explicit CborWriter(std::vector<std::uint8_t>& out) noexcept : out_(out) {}

  // Starts an array; its `num_items` items follow.
  void begin_array(std::size_t num_items) { write_head(MajorType::kArray, num_items); }
  void write_null() { out_.push_back(0xf6); }

  void write_int(std::int64_t value) {
    std::array<std::uint8_t, kMaxHeadBytes> head;
    out_.insert(out_.end(), head.data(), put_int(head.data(), value));
  }

  // The same for each of `values`, without a look at the buffer in between: block hashes are made
  // of token ids.
  template <std::signed_integral Int>
  void write_ints(std::span<const Int> values) {
    constexpr std::size_t kIntsAtATime = 32;
    std::array<std::uint8_t, kIntsAtATime * kMaxHeadBytes> heads;
    while (!values.empty()) {
      const auto some = values.first(std::min(kIntsAtATime, values.size()));
      values = values.subspan(some.size());
      std::uint8_t* end = heads.data();
      for (const Int value : some) end = put_int(end, value);
      out_.insert(out_.end(), heads.data(), end);
    }
  }

  void write_bytes(std::span<const std::uint8_t> bytes) {
    write_head(MajorType::kBytes, bytes.size());
    out_.insert(out_.end(), bytes.begin(), bytes.end());
  }

  // `text` is UTF-8.
  void write_text(std::string_view text) {
    write_head(MajorType::kText, text.size());
    out_.insert(out_.end(), text.begin(), text.end());
  }

 private:
  enum class MajorType : std::uint8_t {
    kUnsigned = 0,
    kNegative = 1,
    kBytes = 2,
    kText = 3,
    kArray = 4
  };

  static constexpr std::size_t kMaxHeadBytes = 9;

  void write_head(MajorType type, std::uint64_t value) {
    const std::size_t size = out_.size();
    out_.resize(size + kMaxHeadBytes);
    const std::uint8_t* end = put_head(out_.data() + size, type, value);
    out_.resize(static_cast<std::size_t>(end - out_.data()));
  }

  static std::uint8_t* put_int(std::uint8_t* out, std::int64_t value) noexcept {
    // A negative n is stored as -1 - n, which is ~n in two's complement.
    const bool is_negative = value < 0;
    return put_head(out, is_negative ? MajorType::kNegative : MajorType::kUnsigned,
                    static_cast<std::uint64_t>(is_negative ? ~value : value));
  }

  // Returns where the head ends. May write to all of out[0 .. kMaxHeadBytes): without branches,
  // since token ids of one and of two bytes come in no order that a CPU could learn.
  static std::uint8_t* put_head(std::uint8_t* out, MajorType type, std::uint64_t value) noexcept {
    // A value below 24 is part of the first byte. Else that says 24, 25, 26 or 27, and the value
    // follows in 1, 2, 4 or 8 bytes.
    const unsigned length_class = unsigned{value > 23} + unsigned{value > 0xff} +
                                  unsigned{value > 0xffff} + unsigned{value > 0xffffffff};
    const unsigned num_bytes = (1U << length_class) >> 1;
    const std::uint64_t info = length_class == 0 ? value : 23 + length_class;
    out[0] = static_cast<std::uint8_t>(static_cast<unsigned>(type) << 5 | info);
    store_big_endian(value << ((64 - 8 * num_bytes) % 64), out + 1);
    return out + 1 + num_bytes;
  }

  std::vector<std::uint8_t>& out_;
};

}  // namespace paged_kv
