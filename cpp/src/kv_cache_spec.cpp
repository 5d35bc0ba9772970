// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/kv_cache_spec.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

namespace paged_kv {
namespace {

constexpr std::int64_t kMaxSize = std::int64_t{1} << 31;

void check_positive(std::int64_t value, const char* name) {
  PAGED_KV_CHECK(value > 0 && value <= kMaxSize, name, " must be in [1, 2**31], got ", value);
}

std::int64_t multiply(std::int64_t a, std::int64_t b) {
  PAGED_KV_CHECK(a <= std::numeric_limits<std::int64_t>::max() / b, "a block of ", a, " times ", b,
                 " bytes is too large");
  return a * b;
}

std::int64_t contents_bytes(const AttentionFormat& format) {
  check_positive(format.block_size, "block_size");
  check_positive(format.num_kv_heads, "num_kv_heads");
  check_positive(format.head_size, "head_size");
  check_positive(format.head_size_v, "head_size_v");
  const std::int64_t token_bytes =
      multiply(multiply(format.head_size + format.head_size_v, get_dtype_size(format.dtype)),
               format.num_kv_heads);
  return multiply(token_bytes, format.block_size);
}

AttentionFormat with_block_size(AttentionFormat format, std::int64_t block_size) {
  format.block_size = block_size;
  return format;
}

AttentionFormat with_padded_page_size(AttentionFormat format, std::int64_t bytes) {
  format.page_size_padded = bytes;
  return format;
}

// `other` as the same class as `spec`, or null.
template <class Spec>
const Spec* same_class(const Spec& /*spec*/, const KVCacheSpec& other) noexcept {
  return dynamic_cast<const Spec*>(&other);
}

}  // namespace

std::string_view to_string(KVCacheSpecKind kind) noexcept {
  switch (kind) {
    case KVCacheSpecKind::kFullAttention:
      return "full_attention";
    case KVCacheSpecKind::kSlidingWindow:
      return "sliding_window";
    case KVCacheSpecKind::kChunkedLocalAttention:
      return "chunked_local_attention";
  }
  return "unknown";
}

std::int64_t get_dtype_size(std::string_view dtype) {
  struct Entry {
    std::string_view name;
    std::int64_t size;
  };
  static constexpr std::array kSizes = {
      Entry{"float32", 4}, Entry{"float16", 2}, Entry{"bfloat16", 2},      Entry{"float64", 8},
      Entry{"int8", 1},    Entry{"uint8", 1},   Entry{"float8_e4m3fn", 1}, Entry{"float8_e5m2", 1},
  };
  const auto* entry = std::ranges::find(kSizes, dtype, &Entry::name);
  PAGED_KV_CHECK(entry != kSizes.end(), "dtype must be a floating or 8-bit type, got ", dtype);
  return entry->size;
}

AttentionSpec::AttentionSpec(AttentionFormat format)
    : format_(std::move(format)),
      unpadded_page_size_bytes_(contents_bytes(format_)),
      page_size_bytes_(format_.page_size_padded.value_or(unpadded_page_size_bytes_)) {
  PAGED_KV_CHECK(page_size_bytes_ >= unpadded_page_size_bytes_,
                 "page_size_padded must be at least ", unpadded_page_size_bytes_, ", got ",
                 page_size_bytes_);
}

FullAttentionSpec::FullAttentionSpec(AttentionFormat format, const Attended& attended)
    : AttentionSpec(std::move(format)), attended_(attended) {
  PAGED_KV_CHECK(!attended.sliding_window || !attended.attention_chunk_size,
                 "a layer cannot have both a sliding window and chunked local attention");
}

std::int64_t FullAttentionSpec::max_num_blocks_per_request(const RequestLimits& limits) const {
  return ceil_div(limits.max_model_len, block_size());
}

KVCacheSpecPtr FullAttentionSpec::copy_with_new_block_size(std::int64_t block_size) const {
  return std::make_shared<FullAttentionSpec>(with_block_size(format(), block_size), attended_);
}

KVCacheSpecPtr FullAttentionSpec::copy_with_padded_page_size(std::int64_t bytes) const {
  return std::make_shared<FullAttentionSpec>(with_padded_page_size(format(), bytes), attended_);
}

bool FullAttentionSpec::equals(const KVCacheSpec& other) const noexcept {
  const auto* spec = same_class(*this, other);
  return spec != nullptr && spec->format() == format() && spec->attended_ == attended_;
}

SlidingWindowSpec::SlidingWindowSpec(AttentionFormat format, std::int64_t sliding_window,
                                     std::int64_t extra_retained_tokens)
    : AttentionSpec(std::move(format)),
      sliding_window_(sliding_window),
      extra_retained_tokens_(extra_retained_tokens) {
  check_positive(sliding_window, "sliding_window");
  PAGED_KV_CHECK(extra_retained_tokens >= 0 && extra_retained_tokens <= kMaxSize,
                 "extra_retained_tokens must be in [0, 2**31], got ", extra_retained_tokens);
}

std::int64_t SlidingWindowSpec::max_num_blocks_per_request(const RequestLimits& limits) const {
  const std::int64_t num_tokens =
      std::min(sliding_window_ - 1 + extra_retained_tokens_ + limits.max_in_flight_tokens,
               limits.max_model_len);
  // One more, as the window need not begin where a block begins.
  return ceil_div(num_tokens, block_size()) + 1;
}

KVCacheSpecPtr SlidingWindowSpec::copy_with_new_block_size(std::int64_t block_size) const {
  return std::make_shared<SlidingWindowSpec>(with_block_size(format(), block_size), sliding_window_,
                                             extra_retained_tokens_);
}

KVCacheSpecPtr SlidingWindowSpec::copy_with_padded_page_size(std::int64_t bytes) const {
  return std::make_shared<SlidingWindowSpec>(with_padded_page_size(format(), bytes),
                                             sliding_window_, extra_retained_tokens_);
}

bool SlidingWindowSpec::equals(const KVCacheSpec& other) const noexcept {
  const auto* spec = same_class(*this, other);
  return spec != nullptr && spec->format() == format() &&
         spec->sliding_window_ == sliding_window_ &&
         spec->extra_retained_tokens_ == extra_retained_tokens_;
}

ChunkedLocalAttentionSpec::ChunkedLocalAttentionSpec(AttentionFormat format,
                                                     std::int64_t attention_chunk_size)
    : AttentionSpec(std::move(format)), attention_chunk_size_(attention_chunk_size) {
  check_positive(attention_chunk_size, "attention_chunk_size");
}

std::int64_t ChunkedLocalAttentionSpec::max_num_blocks_per_request(
    const RequestLimits& limits) const {
  const std::int64_t num_tokens =
      std::min(attention_chunk_size_ + limits.max_in_flight_tokens, limits.max_model_len);
  return ceil_div(num_tokens, block_size());
}

KVCacheSpecPtr ChunkedLocalAttentionSpec::copy_with_new_block_size(std::int64_t block_size) const {
  return std::make_shared<ChunkedLocalAttentionSpec>(with_block_size(format(), block_size),
                                                     attention_chunk_size_);
}

KVCacheSpecPtr ChunkedLocalAttentionSpec::copy_with_padded_page_size(std::int64_t bytes) const {
  return std::make_shared<ChunkedLocalAttentionSpec>(with_padded_page_size(format(), bytes),
                                                     attention_chunk_size_);
}

bool ChunkedLocalAttentionSpec::equals(const KVCacheSpec& other) const noexcept {
  const auto* spec = same_class(*this, other);
  return spec != nullptr && spec->format() == format() &&
         spec->attention_chunk_size_ == attention_chunk_size_;
}

}  // namespace paged_kv
