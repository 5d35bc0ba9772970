// SPDX-License-Identifier: Apache-2.0
//
// XXH3 with 128 bits, seed 0 and the default secret: fast, and not collision resistant. Who can
// choose what is hashed can make two messages with one digest (tests/xxh3_collisions.py does).
//
// Source: the XXH3 part of the xxHash specification, version 0.2 (doc/xxhash_spec.md).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace paged_kv {

inline constexpr std::size_t kXxh3DigestBytes = 16;
using Xxh3Digest = std::array<std::uint8_t, kXxh3DigestBytes>;

// The digest in its canonical form, the most significant byte first. O(bytes), does not allocate.
[[nodiscard]] Xxh3Digest xxh3_128(std::span<const std::uint8_t> message) noexcept;

}  // namespace paged_kv
