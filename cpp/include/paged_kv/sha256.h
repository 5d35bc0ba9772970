// SPDX-License-Identifier: Apache-2.0
//
// SHA-256 (FIPS 180-4) of a whole message. Uses the CPU's SHA instructions where it has them,
// chosen once at run time; both paths give the same digest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace paged_kv {

inline constexpr std::size_t kSha256DigestBytes = 32;
using Sha256Digest = std::array<std::uint8_t, kSha256DigestBytes>;

enum class Sha256Backend { kPortable, kShaNi };

// As users read it: "portable", "sha-ni".
[[nodiscard]] std::string_view name_of(Sha256Backend backend) noexcept;

// True if this CPU can run `backend`.
[[nodiscard]] bool is_supported(Sha256Backend backend) noexcept;

// The fastest supported backend; the portable one if the environment variable
// PAGED_KV_PORTABLE_SHA256 is 1, which is read once.
[[nodiscard]] Sha256Backend default_sha256_backend() noexcept;

// Digest of `message`. Cost: one compression per started 64 bytes (plus 9 bytes of padding), no
// allocation. The overload with a backend needs is_supported(backend).
[[nodiscard]] Sha256Digest sha256(std::span<const std::uint8_t> message) noexcept;
[[nodiscard]] Sha256Digest sha256(std::span<const std::uint8_t> message,
                                  Sha256Backend backend) noexcept;

// The same of a message in a buffer that may be spoilt: it is padded where it lies, which saves a
// copy of its last bytes. The buffer grows by up to 72 bytes.
[[nodiscard]] Sha256Digest sha256_in_place(std::vector<std::uint8_t>& message);

}  // namespace paged_kv
