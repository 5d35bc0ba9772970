// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/xxh3.h"

#include "paged_kv/big_endian.h"

#include <bit>
#include <cstring>

namespace paged_kv {
namespace {

using Bytes = const std::uint8_t*;

constexpr std::uint32_t kPrime32_1 = 0x9e3779b1;
constexpr std::uint32_t kPrime32_2 = 0x85ebca77;
constexpr std::uint32_t kPrime32_3 = 0xc2b2ae3d;
constexpr std::uint64_t kPrime64_1 = 0x9e3779b185ebca87;
constexpr std::uint64_t kPrime64_2 = 0xc2b2ae3d27d4eb4f;
constexpr std::uint64_t kPrime64_3 = 0x165667b19e3779f9;
constexpr std::uint64_t kPrime64_4 = 0x85ebca77c2b2ae63;
constexpr std::uint64_t kPrime64_5 = 0x27d4eb2f165667c5;
constexpr std::uint64_t kPrimeMx1 = 0x165667919e3779f9;
constexpr std::uint64_t kPrimeMx2 = 0x9fb21c651e98df25;

constexpr std::size_t kSecretBytes = 192;
constexpr std::uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Hash128 {
  std::uint64_t low;
  std::uint64_t high;
};

std::uint64_t swap64(std::uint64_t value) noexcept { return __builtin_bswap64(value); }
std::uint32_t swap32(std::uint32_t value) noexcept { return __builtin_bswap32(value); }

// Little-endian.
std::uint64_t read64(Bytes bytes) noexcept {
  std::uint64_t value;
  std::memcpy(&value, bytes, sizeof value);
  return std::endian::native == std::endian::little ? value : swap64(value);
}
std::uint32_t read32(Bytes bytes) noexcept {
  std::uint32_t value;
  std::memcpy(&value, bytes, sizeof value);
  return std::endian::native == std::endian::little ? value : swap32(value);
}

Hash128 multiply(std::uint64_t a, std::uint64_t b) noexcept {
  __extension__ using Uint128 = unsigned __int128;
  const Uint128 product = static_cast<Uint128>(a) * b;
  return {static_cast<std::uint64_t>(product), static_cast<std::uint64_t>(product >> 64)};
}

std::uint64_t multiply_and_fold(std::uint64_t a, std::uint64_t b) noexcept {
  const Hash128 product = multiply(a, b);
  return product.low ^ product.high;
}

std::uint64_t avalanche(std::uint64_t hash) noexcept {
  hash ^= hash >> 37;
  hash *= kPrimeMx1;
  return hash ^ (hash >> 32);
}

// That of the older XXH64.
std::uint64_t avalanche64(std::uint64_t hash) noexcept {
  hash ^= hash >> 33;
  hash *= kPrime64_2;
  hash ^= hash >> 29;
  hash *= kPrime64_3;
  return hash ^ (hash >> 32);
}

Hash128 hash_nothing() noexcept {
  return {avalanche64(read64(kSecret + 64) ^ read64(kSecret + 72)),
          avalanche64(read64(kSecret + 80) ^ read64(kSecret + 88))};
}

Hash128 hash_1_to_3(Bytes in, std::size_t size) noexcept {
  const std::uint32_t low = static_cast<std::uint32_t>(in[0]) << 16 |
                            static_cast<std::uint32_t>(in[size >> 1]) << 24 | in[size - 1] |
                            static_cast<std::uint32_t>(size) << 8;
  const std::uint32_t high = std::rotl(swap32(low), 13);
  return {
      avalanche64(low ^ static_cast<std::uint64_t>(read32(kSecret) ^ read32(kSecret + 4))),
      avalanche64(high ^ static_cast<std::uint64_t>(read32(kSecret + 8) ^ read32(kSecret + 12)))};
}

Hash128 hash_4_to_8(Bytes in, std::size_t size) noexcept {
  const std::uint64_t input = read32(in) | static_cast<std::uint64_t>(read32(in + size - 4)) << 32;
  const std::uint64_t keyed = input ^ read64(kSecret + 16) ^ read64(kSecret + 24);
  Hash128 hash = multiply(keyed, kPrime64_1 + (size << 2));
  hash.high += hash.low << 1;
  hash.low ^= hash.high >> 3;
  hash.low ^= hash.low >> 35;
  hash.low *= kPrimeMx2;
  hash.low ^= hash.low >> 28;
  hash.high = avalanche(hash.high);
  return hash;
}

Hash128 hash_9_to_16(Bytes in, std::size_t size) noexcept {
  const std::uint64_t low = read64(in);
  std::uint64_t high = read64(in + size - 8);
  Hash128 mixed = multiply(low ^ high ^ read64(kSecret + 32) ^ read64(kSecret + 40), kPrime64_1);
  mixed.low += static_cast<std::uint64_t>(size - 1) << 54;
  high ^= read64(kSecret + 48) ^ read64(kSecret + 56);
  mixed.high += high + (high & 0xffffffff) * (kPrime32_2 - 1);
  mixed.low ^= swap64(mixed.high);
  Hash128 hash = multiply(mixed.low, kPrime64_2);
  hash.high += mixed.high * kPrime64_2;
  return {avalanche(hash.low), avalanche(hash.high)};
}

std::uint64_t mix_16(Bytes in, Bytes secret) noexcept {
  return multiply_and_fold(read64(in) ^ read64(secret), read64(in + 8) ^ read64(secret + 8));
}

void mix_32(Hash128& acc, Bytes first, Bytes second, Bytes secret) noexcept {
  acc.low += mix_16(first, secret);
  acc.low ^= read64(second) + read64(second + 8);
  acc.high += mix_16(second, secret + 16);
  acc.high ^= read64(first) + read64(first + 8);
}

Hash128 finish_medium(const Hash128& acc, std::size_t size) noexcept {
  const std::uint64_t high = acc.low * kPrime64_1 + acc.high * kPrime64_4 + size * kPrime64_2;
  return {avalanche(acc.low + acc.high), 0 - avalanche(high)};
}

// From both ends to the middle.
Hash128 hash_17_to_128(Bytes in, std::size_t size) noexcept {
  Hash128 acc{size * kPrime64_1, 0};
  for (std::size_t pair = (size - 1) / 32 + 1; pair-- > 0;) {
    mix_32(acc, in + 16 * pair, in + size - 16 * (pair + 1), kSecret + 32 * pair);
  }
  return finish_medium(acc, size);
}

Hash128 hash_129_to_240(Bytes in, std::size_t size) noexcept {
  constexpr std::size_t kFirstPairs = 4;
  Hash128 acc{size * kPrime64_1, 0};
  for (std::size_t pair = 0; pair < kFirstPairs; ++pair) {
    mix_32(acc, in + 32 * pair, in + 32 * pair + 16, kSecret + 32 * pair);
  }
  acc = {avalanche(acc.low), avalanche(acc.high)};
  for (std::size_t pair = kFirstPairs; pair < size / 32; ++pair) {
    mix_32(acc, in + 32 * pair, in + 32 * pair + 16, kSecret + 3 + 32 * (pair - kFirstPairs));
  }
  mix_32(acc, in + size - 16, in + size - 32, kSecret + 103);
  return finish_medium(acc, size);
}

// Longer messages go through eight lanes, a stripe of 64 bytes at a time; after a block of stripes,
// when the secret is used up, the lanes are scrambled.
constexpr std::size_t kStripeBytes = 64;
constexpr std::size_t kSecretStep = 8;
constexpr std::size_t kStripesPerBlock = (kSecretBytes - kStripeBytes) / kSecretStep;
constexpr std::size_t kBlockBytes = kStripesPerBlock * kStripeBytes;
using Lanes = std::array<std::uint64_t, 8>;

void accumulate_stripe(Lanes& lanes, Bytes in, Bytes secret) noexcept {
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    const std::uint64_t data = read64(in + 8 * i);
    const std::uint64_t keyed = data ^ read64(secret + 8 * i);
    lanes[i ^ 1] += data;
    lanes[i] += (keyed & 0xffffffff) * (keyed >> 32);
  }
}

void accumulate(Lanes& lanes, Bytes in, std::size_t num_stripes) noexcept {
  for (std::size_t i = 0; i < num_stripes; ++i) {
    accumulate_stripe(lanes, in + i * kStripeBytes, kSecret + i * kSecretStep);
  }
}

void scramble(Lanes& lanes) noexcept {
  Bytes secret = kSecret + kSecretBytes - kStripeBytes;
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    lanes[i] ^= lanes[i] >> 47;
    lanes[i] ^= read64(secret + 8 * i);
    lanes[i] *= kPrime32_1;
  }
}

std::uint64_t merge(const Lanes& lanes, Bytes secret, std::uint64_t start) noexcept {
  std::uint64_t hash = start;
  for (std::size_t i = 0; i < lanes.size(); i += 2) {
    hash += multiply_and_fold(lanes[i] ^ read64(secret + 8 * i),
                              lanes[i + 1] ^ read64(secret + 8 * i + 8));
  }
  return avalanche(hash);
}

Hash128 hash_long(Bytes in, std::size_t size) noexcept {
  constexpr std::size_t kMergeSecret = 11;
  constexpr std::size_t kLastStripeSecret = kSecretBytes - kStripeBytes - 7;
  Lanes lanes = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                 kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  const std::size_t num_blocks = (size - 1) / kBlockBytes;
  for (std::size_t block = 0; block < num_blocks; ++block) {
    accumulate(lanes, in + block * kBlockBytes, kStripesPerBlock);
    scramble(lanes);
  }
  const std::size_t num_left = size - 1 - num_blocks * kBlockBytes;
  accumulate(lanes, in + num_blocks * kBlockBytes, num_left / kStripeBytes);
  accumulate_stripe(lanes, in + size - kStripeBytes, kSecret + kLastStripeSecret);
  return {merge(lanes, kSecret + kMergeSecret, size * kPrime64_1),
          merge(lanes, kSecret + kSecretBytes - kStripeBytes - kMergeSecret, ~(size * kPrime64_2))};
}

Hash128 hash(Bytes in, std::size_t size) noexcept {
  if (size > 240) return hash_long(in, size);
  if (size > 128) return hash_129_to_240(in, size);
  if (size > 16) return hash_17_to_128(in, size);
  if (size > 8) return hash_9_to_16(in, size);
  if (size > 3) return hash_4_to_8(in, size);
  if (size > 0) return hash_1_to_3(in, size);
  return hash_nothing();
}

}  // namespace

Xxh3Digest xxh3_128(std::span<const std::uint8_t> message) noexcept {
  const Hash128 value = hash(message.data(), message.size());
  Xxh3Digest digest;
  store_big_endian(value.high, digest.data());
  store_big_endian(value.low, digest.data() + 8);
  return digest;
}

}  // namespace paged_kv
