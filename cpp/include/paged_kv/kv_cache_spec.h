// SPDX-License-Identifier: Apache-2.0
//
// What one layer keeps per token, and for how long: the format of its part of the KV cache.
//
// Specs are immutable and shared. A further kind is a further subclass here, and a manager for it
// in managers/.
//
// Source: vLLM 0.32 v1/kv_cache_interface.py.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace paged_kv {

enum class KVCacheSpecKind { kFullAttention, kSlidingWindow, kChunkedLocalAttention };

// "full_attention", "sliding_window", "chunked_local_attention".
[[nodiscard]] std::string_view to_string(KVCacheSpecKind kind) noexcept;

// Bytes of one element, e.g. 2 for "bfloat16". Throws std::invalid_argument for an unknown name.
[[nodiscard]] std::int64_t get_dtype_size(std::string_view dtype);

// What bounds the blocks that one request can need.
struct RequestLimits {
  std::int64_t max_model_len = 0;  // tokens
  // Tokens that are scheduled and whose output is not processed yet, at most.
  std::int64_t max_in_flight_tokens = 0;
};

class KVCacheSpec;
using KVCacheSpecPtr = std::shared_ptr<const KVCacheSpec>;

class KVCacheSpec {
 public:
  virtual ~KVCacheSpec() = default;

  [[nodiscard]] virtual KVCacheSpecKind kind() const noexcept = 0;
  // Tokens per block.
  [[nodiscard]] virtual std::int64_t block_size() const noexcept = 0;
  // Bytes of one block of one layer.
  [[nodiscard]] virtual std::int64_t page_size_bytes() const noexcept = 0;
  // Most blocks that one request holds at a time: what a pool must have for it.
  [[nodiscard]] virtual std::int64_t max_num_blocks_per_request(
      const RequestLimits& limits) const = 0;
  // True if a request gives back blocks before it ends, so that it may need fewer than its length.
  [[nodiscard]] virtual bool recycles_blocks() const noexcept = 0;
  // Tokens that a query sees, its own included; nullopt: all. For events.
  [[nodiscard]] virtual std::optional<std::int64_t> sliding_window_of_group() const noexcept = 0;

  [[nodiscard]] virtual KVCacheSpecPtr copy_with_new_block_size(std::int64_t block_size) const = 0;
  [[nodiscard]] virtual KVCacheSpecPtr copy_with_padded_page_size(std::int64_t bytes) const = 0;
  // Whether layers of both can share all bookkeeping, block size and page size included.
  [[nodiscard]] virtual bool equals(const KVCacheSpec& other) const noexcept = 0;

  // Bytes that one request needs in one layer, at most.
  [[nodiscard]] std::int64_t max_memory_usage_bytes(const RequestLimits& limits) const {
    return max_num_blocks_per_request(limits) * page_size_bytes();
  }
};

// Keys and values of every attention layer, whatever it attends to.
struct AttentionFormat {
  std::int64_t block_size = 0;  // tokens per block
  std::int64_t num_kv_heads = 0;
  std::int64_t head_size = 0;    // elements of a key
  std::int64_t head_size_v = 0;  // elements of a value
  std::string dtype;             // "bfloat16", ...
  // Bytes of a block, if it is larger than its contents.
  std::optional<std::int64_t> page_size_padded;

  friend bool operator==(const AttentionFormat&, const AttentionFormat&) = default;
};

class AttentionSpec : public KVCacheSpec {
 public:
  // Throws std::invalid_argument unless all sizes are positive and the padded size is large enough.
  explicit AttentionSpec(AttentionFormat format);

  [[nodiscard]] const AttentionFormat& format() const noexcept { return format_; }
  [[nodiscard]] std::int64_t block_size() const noexcept override { return format_.block_size; }
  [[nodiscard]] std::int64_t page_size_bytes() const noexcept override { return page_size_bytes_; }
  // Bytes of the contents of a block.
  [[nodiscard]] std::int64_t unpadded_page_size_bytes() const noexcept {
    return unpadded_page_size_bytes_;
  }

 private:
  AttentionFormat format_;
  std::int64_t unpadded_page_size_bytes_;
  std::int64_t page_size_bytes_;
};

// Every token is kept until the request ends.
class FullAttentionSpec final : public AttentionSpec {
 public:
  // The window or chunk, if the layer attends to less than it keeps. At most one of them.
  struct Attended {
    std::optional<std::int64_t> sliding_window;
    std::optional<std::int64_t> attention_chunk_size;
    friend bool operator==(const Attended&, const Attended&) = default;
  };

  explicit FullAttentionSpec(AttentionFormat format) : FullAttentionSpec(std::move(format), {}) {}
  FullAttentionSpec(AttentionFormat format, const Attended& attended);

  [[nodiscard]] const Attended& attended() const noexcept { return attended_; }
  [[nodiscard]] KVCacheSpecKind kind() const noexcept override {
    return KVCacheSpecKind::kFullAttention;
  }
  [[nodiscard]] std::int64_t max_num_blocks_per_request(const RequestLimits& limits) const override;
  [[nodiscard]] bool recycles_blocks() const noexcept override { return false; }
  [[nodiscard]] std::optional<std::int64_t> sliding_window_of_group() const noexcept override {
    return std::nullopt;
  }
  [[nodiscard]] KVCacheSpecPtr copy_with_new_block_size(std::int64_t block_size) const override;
  [[nodiscard]] KVCacheSpecPtr copy_with_padded_page_size(std::int64_t bytes) const override;
  [[nodiscard]] bool equals(const KVCacheSpec& other) const noexcept override;

 private:
  Attended attended_;
};

// A query sees the last `sliding_window` tokens, its own included; older ones are given back.
class SlidingWindowSpec final : public AttentionSpec {
 public:
  // `extra_retained_tokens` more are kept, though no query sees them: drafting may go back to them.
  SlidingWindowSpec(AttentionFormat format, std::int64_t sliding_window,
                    std::int64_t extra_retained_tokens = 0);

  [[nodiscard]] std::int64_t sliding_window() const noexcept { return sliding_window_; }
  [[nodiscard]] std::int64_t extra_retained_tokens() const noexcept {
    return extra_retained_tokens_;
  }
  [[nodiscard]] KVCacheSpecKind kind() const noexcept override {
    return KVCacheSpecKind::kSlidingWindow;
  }
  [[nodiscard]] std::int64_t max_num_blocks_per_request(const RequestLimits& limits) const override;
  [[nodiscard]] bool recycles_blocks() const noexcept override { return true; }
  [[nodiscard]] std::optional<std::int64_t> sliding_window_of_group() const noexcept override {
    return sliding_window_;
  }
  [[nodiscard]] KVCacheSpecPtr copy_with_new_block_size(std::int64_t block_size) const override;
  [[nodiscard]] KVCacheSpecPtr copy_with_padded_page_size(std::int64_t bytes) const override;
  [[nodiscard]] bool equals(const KVCacheSpec& other) const noexcept override;

 private:
  std::int64_t sliding_window_;
  std::int64_t extra_retained_tokens_;
};

// A query sees the tokens of its own chunk of `attention_chunk_size`; earlier chunks are given
// back.
class ChunkedLocalAttentionSpec final : public AttentionSpec {
 public:
  ChunkedLocalAttentionSpec(AttentionFormat format, std::int64_t attention_chunk_size);

  [[nodiscard]] std::int64_t attention_chunk_size() const noexcept { return attention_chunk_size_; }
  [[nodiscard]] KVCacheSpecKind kind() const noexcept override {
    return KVCacheSpecKind::kChunkedLocalAttention;
  }
  [[nodiscard]] std::int64_t max_num_blocks_per_request(const RequestLimits& limits) const override;
  [[nodiscard]] bool recycles_blocks() const noexcept override { return true; }
  [[nodiscard]] std::optional<std::int64_t> sliding_window_of_group() const noexcept override {
    return std::nullopt;
  }
  [[nodiscard]] KVCacheSpecPtr copy_with_new_block_size(std::int64_t block_size) const override;
  [[nodiscard]] KVCacheSpecPtr copy_with_padded_page_size(std::int64_t bytes) const override;
  [[nodiscard]] bool equals(const KVCacheSpec& other) const noexcept override;

 private:
  std::int64_t attention_chunk_size_;
};

}  // namespace paged_kv
