// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/sha256.h"

#include "paged_kv/big_endian.h"

#include <bit>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace paged_kv {
namespace {

constexpr std::size_t kChunkBytes = 64;
constexpr std::size_t kMinPaddingBytes = 9;  // 0x80 and the length
using State = std::array<std::uint32_t, 8>;

constexpr State kInitialState{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                              0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr std::array<std::uint32_t, 64> kRoundConstants{
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

std::uint32_t load_big_endian(const std::uint8_t* bytes) noexcept {
  return std::uint32_t{bytes[0]} << 24 | std::uint32_t{bytes[1]} << 16 |
         std::uint32_t{bytes[2]} << 8 | std::uint32_t{bytes[3]};
}

void compress_portable(State& state, const std::uint8_t* chunks, std::size_t num_chunks) noexcept {
  for (; num_chunks > 0; --num_chunks, chunks += kChunkBytes) {
    std::array<std::uint32_t, 64> w;
    for (std::size_t i = 0; i < 16; ++i) w[i] = load_big_endian(chunks + 4 * i);
    for (std::size_t i = 16; i < 64; ++i) {
      const std::uint32_t s0 =
          std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (std::size_t i = 0; i < 64; ++i) {
      const std::uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t choice = (e & f) ^ (~e & g);
      const std::uint32_t t1 = h + s1 + choice + kRoundConstants[i] + w[i];
      const std::uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t majority = (a & b) ^ (a & c) ^ (b & c);
      h = g;
      g = f;
      f = e;
      e = d + t1;
      d = c;
      c = b;
      b = a;
      a = t1 + s0 + majority;
    }
    const State add{a, b, c, d, e, f, g, h};
    for (std::size_t i = 0; i < 8; ++i) state[i] += add[i];
  }
}

#if defined(__x86_64__)

bool cpu_has_sha_ni() noexcept {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool has_ssse3 = (ecx & (1U << 9)) != 0;
  const bool has_sse41 = (ecx & (1U << 19)) != 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool has_sha = (ebx & (1U << 29)) != 0;
  return has_ssse3 && has_sse41 && has_sha;
}

// The instructions want the state as the word quadruples ABEF and CDGH, high word first.
__attribute__((target("sha,sse4.1,ssse3"))) void compress_sha_ni(State& state,
                                                                 const std::uint8_t* chunks,
                                                                 std::size_t num_chunks) noexcept {
  const __m128i byte_swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  auto* state_words = reinterpret_cast<__m128i*>(state.data());
  const auto* constants = reinterpret_cast<const __m128i*>(kRoundConstants.data());

  const __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128(state_words), 0xB1);
  const __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128(state_words + 1), 0x1B);
  __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
  __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);

  for (; num_chunks > 0; --num_chunks, chunks += kChunkBytes) {
    const __m128i abef_start = abef;
    const __m128i cdgh_start = cdgh;
    // w[i % 4] holds schedule words 4i .. 4i + 3; a quadruple is replaced once it has been used.
    __m128i w[4];
    for (int i = 0; i < 16; ++i) {
      __m128i& current = w[i % 4];
      if (i < 4) {
        const auto* words = reinterpret_cast<const __m128i*>(chunks) + i;
        current = _mm_shuffle_epi8(_mm_loadu_si128(words), byte_swap);
      } else {
        const __m128i minus_7 = _mm_alignr_epi8(w[(i + 3) % 4], w[(i + 2) % 4], 4);
        const __m128i partial = _mm_sha256msg1_epu32(current, w[(i + 1) % 4]);
        current = _mm_sha256msg2_epu32(_mm_add_epi32(partial, minus_7), w[(i + 3) % 4]);
      }
      const __m128i input = _mm_add_epi32(current, _mm_load_si128(constants + i));
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, input);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(input, 0x0E));
    }
    abef = _mm_add_epi32(abef, abef_start);
    cdgh = _mm_add_epi32(cdgh, cdgh_start);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1B);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xB1);
  _mm_storeu_si128(state_words, _mm_blend_epi16(feba, dchg, 0xF0));
  _mm_storeu_si128(state_words + 1, _mm_alignr_epi8(dchg, feba, 8));
}

#endif

void compress(State& state, const std::uint8_t* chunks, std::size_t num_chunks,
              Sha256Backend backend) noexcept {
#if defined(__x86_64__)
  if (backend == Sha256Backend::kShaNi) return compress_sha_ni(state, chunks, num_chunks);
#else
  static_cast<void>(backend);
#endif
  compress_portable(state, chunks, num_chunks);
}

Sha256Digest digest_of(const State& state) noexcept {
  Sha256Digest digest;
  for (std::size_t i = 0; i < state.size(); ++i) store_big_endian(state[i], digest.data() + 4 * i);
  return digest;
}

bool is_portable_forced() noexcept {
  const char* value = std::getenv("PAGED_KV_PORTABLE_SHA256");
  return value != nullptr && std::string_view(value) == "1";
}

}  // namespace

bool is_supported(Sha256Backend backend) noexcept {
#if defined(__x86_64__)
  static const bool has_sha_ni = cpu_has_sha_ni();
  if (backend == Sha256Backend::kShaNi) return has_sha_ni;
#endif
  return backend == Sha256Backend::kPortable;
}

std::string_view name_of(Sha256Backend backend) noexcept {
  return backend == Sha256Backend::kShaNi ? "sha-ni" : "portable";
}

Sha256Backend default_sha256_backend() noexcept {
  static const Sha256Backend backend = is_supported(Sha256Backend::kShaNi) && !is_portable_forced()
                                           ? Sha256Backend::kShaNi
                                           : Sha256Backend::kPortable;
  return backend;
}

Sha256Digest sha256(std::span<const std::uint8_t> message) noexcept {
  return sha256(message, default_sha256_backend());
}

Sha256Digest sha256(std::span<const std::uint8_t> message, Sha256Backend backend) noexcept {
  State state = kInitialState;
  const std::size_t num_whole_chunks = message.size() / kChunkBytes;
  compress(state, message.data(), num_whole_chunks, backend);

  // The rest of the message, 0x80, zeros, and the length in bits as 8 big-endian bytes.
  std::array<std::uint8_t, 2 * kChunkBytes> tail{};
  const std::span<const std::uint8_t> rest = message.subspan(num_whole_chunks * kChunkBytes);
  if (!rest.empty()) std::memcpy(tail.data(), rest.data(), rest.size());
  tail[rest.size()] = 0x80;
  const std::size_t num_tail_chunks = rest.size() + kMinPaddingBytes <= kChunkBytes ? 1 : 2;
  store_big_endian(std::uint64_t{message.size()} * 8,
                   tail.data() + num_tail_chunks * kChunkBytes - 8);
  compress(state, tail.data(), num_tail_chunks, backend);

  return digest_of(state);
}

Sha256Digest sha256_in_place(std::vector<std::uint8_t>& message) {
  const std::size_t size = message.size();
  const std::size_t num_chunks = (size + kMinPaddingBytes + kChunkBytes - 1) / kChunkBytes;
  message.resize(num_chunks * kChunkBytes);  // zeros
  message[size] = 0x80;
  store_big_endian(std::uint64_t{size} * 8, message.data() + message.size() - 8);
  State state = kInitialState;
  compress(state, message.data(), num_chunks, default_sha256_backend());
  return digest_of(state);
}

}  // namespace paged_kv
