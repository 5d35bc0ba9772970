// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/sha256.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv {
namespace {

struct Vector {
  std::size_t num_bytes;
  const char* digest;
};

// From Python's hashlib, of messages with byte i = (7 * i + num_bytes) % 256. The lengths lie
// around the places where padding needs another chunk.
constexpr Vector kVectors[] = {
    {0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {1, "4bf5122f344554c53bde2ebb8cd2b7e3d1600ad631c385a5d7cce23c7785459a"},
    {3, "6ab0dba1f4f1dfbb37b4f9eeb092c09fca4900ad32bdcd147d8dde35d6c87c35"},
    {55, "81afe5b788dc2ce138ff83d9b20164db75a94d75d2b2432eea4a0ef605088c72"},
    {56, "2aba54f0ac632420a2b502431408866e40e1d5e430df4cd822642c78ab2eb9c1"},
    {63, "733d3d4ee79ee67145bf73da13588f6f235d37414fc64b14a2f00f1762792f5e"},
    {64, "79322907b3e9d013d7dc2c2f256674dbf733045cde01df3539271c6f5605feb8"},
    {65, "d85c007c6eb440f085afa2b84f6f2bce4658b240e9f62cb1364bf0485a57e720"},
    {119, "6c87eedf096b345de205b702e5223b73b447a3207791ded3ea007ba15ed6736e"},
    {120, "42500cf6a1e3936d6b9e0bcfe296d654b63255e525487d3634d0b15fde591c4d"},
    {127, "68f6ff710276900c0ffbbc57426f67e00c2e01f0750c7edc25ac06b8ce7a8095"},
    {128, "489d55fea9a73af36b6dd0be7b4117d8e5683386d39544e8a44c99a87f368707"},
    {1000, "6b0df76627243d095b0c4400cb658b7e804dd03461cc03aee8fc8fe0bcada168"},
};

std::vector<std::uint8_t> message_of(std::size_t num_bytes) {
  std::vector<std::uint8_t> message(num_bytes);
  for (std::size_t i = 0; i < num_bytes; ++i) {
    message[i] = static_cast<std::uint8_t>(7 * i + num_bytes);
  }
  return message;
}

std::string hex(const Sha256Digest& digest) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

TEST(Sha256, PortablePathGivesTheDigestsOfHashlib) {
  for (const Vector& vector : kVectors) {
    EXPECT_EQ(hex(sha256(message_of(vector.num_bytes), Sha256Backend::kPortable)), vector.digest)
        << vector.num_bytes << " bytes";
  }
}

// On a CPU without SHA instructions the default is the portable path, and this repeats it.
TEST(Sha256, FastestPathGivesTheDigestsOfHashlib) {
  for (const Vector& vector : kVectors) {
    EXPECT_EQ(hex(sha256(message_of(vector.num_bytes))), vector.digest)
        << vector.num_bytes << " bytes";
  }
}

TEST(Sha256, BothPathsAgreeOnAllLengths) {
  for (std::size_t num_bytes = 0; num_bytes < 300; ++num_bytes) {
    const auto message = message_of(num_bytes);
    const Sha256Digest portable = sha256(message, Sha256Backend::kPortable);
    EXPECT_EQ(portable, sha256(message)) << num_bytes << " bytes";
    std::vector<std::uint8_t> spoilt(message.begin(), message.end());
    EXPECT_EQ(portable, sha256_in_place(spoilt)) << num_bytes << " bytes";
    if (is_supported(Sha256Backend::kShaNi)) {
      EXPECT_EQ(portable, sha256(message, Sha256Backend::kShaNi)) << num_bytes << " bytes";
    }
  }
}

TEST(Sha256, DefaultIsASupportedBackend) {
  EXPECT_TRUE(is_supported(default_sha256_backend()));
  EXPECT_TRUE(is_supported(Sha256Backend::kPortable));
}

}  // namespace
}  // namespace paged_kv
