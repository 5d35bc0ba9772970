// SPDX-License-Identifier: Apache-2.0
//
// Writer for the part of CBOR (RFC 8949) that block hashes need, in canonical form: every length
// and integer in its shortest encoding.
#pragma once

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
    // A negative n is stored as -1 - n, which is ~n in two's complement.
    if (value >= 0) {
      write_head(MajorType::kUnsigned, static_cast<std::uint64_t>(value));
    } else {
      write_head(MajorType::kNegative, static_cast<std::uint64_t>(~value));
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

  void write_head(MajorType type, std::uint64_t value) {
    const auto type_bits = static_cast<unsigned>(type) << 5;
    if (value < 24) {
      out_.push_back(static_cast<std::uint8_t>(type_bits | value));
      return;
    }
    // 24, 25, 26, 27: the value follows in 1, 2, 4, 8 bytes.
    const unsigned log2_bytes = value <= 0xff ? 0 : value <= 0xffff ? 1 : value >> 32 == 0 ? 2 : 3;
    out_.push_back(static_cast<std::uint8_t>(type_bits | (24 + log2_bytes)));
    for (int shift = 8 * ((1 << log2_bytes) - 1); shift >= 0; shift -= 8) {
      out_.push_back(static_cast<std::uint8_t>(value >> shift));
    }
  }

  std::vector<std::uint8_t>& out_;
};

}  // namespace paged_kv
