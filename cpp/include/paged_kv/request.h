// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "paged_kv/block_hash.h"
#include "paged_kv/ids.h"
#include "paged_kv/request_hash.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace paged_kv {

// Where a request stands. Everything after kPreempted is finished.
enum class RequestStatus : std::int8_t {
  kWaiting = 1,
  kWaitingForStructuredOutputGrammar,
  kWaitingForRemoteKvs,
  kWaitingForStreamingReq,
  kRunning,
  kPreempted,
  kFinishedStopped,
  kFinishedLengthCapped,
  kFinishedAborted,
  kFinishedIgnored,
  kFinishedError,
  kFinishedRepetition,
};

[[nodiscard]] constexpr bool is_finished(RequestStatus status) noexcept {
  return status > RequestStatus::kPreempted;
}

class Request;

// Gives the hashes of the full blocks of a request that are not in its block_hashes() yet.
using RequestBlockHasher = std::function<std::vector<BlockHash>(const Request&)>;

// Hashes blocks of `hash_block_size` tokens with `sha256_cbor`.
struct Sha256BlockHasher {
  std::int64_t hash_block_size;
  BlockHash none_hash;

  [[nodiscard]] std::vector<BlockHash> operator()(const Request& request) const;
};

// Hashes blocks of `hash_block_size` tokens with `xxhash_cbor`, and keeps their contents in
// `contents` as long as it lives. The hasher of one request.
class Xxh3BlockHasher {
 public:
  Xxh3BlockHasher(std::int64_t hash_block_size, const BlockHash& none_hash,
                  std::shared_ptr<PrefixContents> contents);

  // Throws std::invalid_argument if the request has hashes that another hasher made.
  [[nodiscard]] std::vector<BlockHash> operator()(const Request& request);

  // The hashes of the first tokens of a request with other keys. They serve as long as `last`,
  // which becomes the holder of their contents.
  [[nodiscard]] std::vector<BlockHash> hash_prefix(const RequestKeys& keys,
                                                   std::span<const std::int32_t> token_ids,
                                                   ContentHolder& last) const;

 private:
  std::int64_t hash_block_size_;
  BlockHash none_hash_;
  std::shared_ptr<PrefixContents> contents_;
  ContentHolder last_;  // of the request's last hash
};

// An Xxh3BlockHasher. Throws std::invalid_argument unless hash_block_size is positive.
[[nodiscard]] RequestBlockHasher make_xxh3_block_hasher(std::int64_t hash_block_size,
                                                        const BlockHash& none_hash,
                                                        std::shared_ptr<PrefixContents> contents);

// A Sha256BlockHasher. Throws std::invalid_argument unless hash_block_size is positive.
[[nodiscard]] RequestBlockHasher make_request_block_hasher(std::int64_t hash_block_size,
                                                           const BlockHash& none_hash);

// What a request is made of, and what stays as it is.
struct RequestOptions {
  std::string request_id;
  std::vector<std::int32_t> prompt_token_ids;
  RequestKeys keys;
  // Keeps alive what keys.prompt_embeds points to.
  std::shared_ptr<const void> prompt_embeds_owner;
  std::optional<std::int64_t> lora_id;  // of the adapter in keys.lora, for events
  std::optional<std::string> session_id;
  std::int64_t priority = 0;  // lower is sooner
  double arrival_time = 0.0;  // seconds
  // Its prompt's cached blocks are not read; its own blocks are cached all the same.
  bool skip_reading_prefix_cache = false;
  // Blocks reused from the prefix cache are reported by BlockStored events too.
  bool reports_reused_blocks = false;
};

// How far a request has come. A scheduler writes these, the managers of the cache read them.
struct RequestProgress {
  RequestStatus status = RequestStatus::kWaiting;
  // Tokens whose keys and values are in the cache, or will be after the steps under way.
  std::int64_t num_computed_tokens = 0;
  // Of these, tokens of steps whose output has not been processed yet.
  std::int64_t num_in_flight_tokens = 0;
  std::int64_t num_output_placeholders = 0;
  std::int64_t num_preemptions = 0;
  // Where a prefix that others share ends; a sparse prefix cache keeps the blocks before it. In
  // tokens, 0: none known. KVCacheManager::get_computed_blocks() finds it.
  std::int64_t shared_prefix_boundary = 0;
  std::vector<std::int32_t> spec_token_ids;  // drafts, not part of the request's tokens
};

// A place in the tables of one KVCacheManager, remembered by the request so that the manager need
// not look up its id again. Only RequestTable reads and writes it.
struct RequestHandle {
  std::uint64_t table_id = 0;  // 0: none
  RequestIdx request_idx;
  std::uint32_t generation = 0;
};

// How far a request had come.
struct RequestMark {
  std::size_t num_tokens = 0;
  std::size_t num_block_hashes = 0;
  std::int64_t num_tokens_to_hash = 0;
};

// A sequence of tokens to be computed, and the hashes of its full blocks.
//
// Invariants:
//   R1  block_hashes() are those of the first full blocks of all_token_ids(), in order, each
//       chained to the one before; after every append all full blocks have one (with a hasher);
//   R2  the first num_prompt_tokens() tokens never change, and tokens are only appended, or taken
//       back with their hashes by rewind().
//
// Cost: O(1) per call; appending is O(tokens) and one hash per block that becomes full.
// Thread rule: one owner thread.
// Source: vLLM 0.32 v1/request.py::Request.
class Request {
 public:
  // `hasher` empty: the request has no block hashes, and cannot be cached.
  explicit Request(RequestOptions options, RequestBlockHasher hasher = {});
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  [[nodiscard]] const RequestOptions& options() const noexcept { return options_; }
  [[nodiscard]] const std::string& request_id() const noexcept { return options_.request_id; }
  [[nodiscard]] const RequestKeys& keys() const noexcept { return options_.keys; }

  [[nodiscard]] std::span<const std::int32_t> all_token_ids() const noexcept {
    return all_token_ids_;
  }
  [[nodiscard]] std::int64_t num_tokens() const noexcept {
    return static_cast<std::int64_t>(all_token_ids_.size());
  }
  [[nodiscard]] std::int64_t num_prompt_tokens() const noexcept { return num_prompt_tokens_; }
  [[nodiscard]] std::int64_t num_output_tokens() const noexcept {
    return num_tokens() - num_prompt_tokens_;
  }
  [[nodiscard]] std::int64_t num_tokens_with_spec() const noexcept {
    return num_tokens() + static_cast<std::int64_t>(progress.spec_token_ids.size());
  }
  [[nodiscard]] std::span<const BlockHash> block_hashes() const noexcept { return block_hashes_; }

  // Hashes the blocks that are full now, and from now on those that become full. Throws
  // std::invalid_argument if an Xxh3BlockHasher has made hashes, which it must keep.
  void set_block_hasher(RequestBlockHasher hasher);

  // Null: the hasher is another function, or there is none.
  [[nodiscard]] const Sha256BlockHasher* sha256_hasher() const noexcept {
    return hasher_.target<Sha256BlockHasher>();
  }
  [[nodiscard]] const Xxh3BlockHasher* xxh3_hasher() const noexcept {
    return hasher_.target<Xxh3BlockHasher>();
  }

  // Changes nothing if the hasher throws, or memory is wanting.
  void append_output_token_ids(std::span<const std::int32_t> token_ids);

  // rewind() undoes what was appended since mark(): for who appends to several requests, or to
  // none.
  [[nodiscard]] RequestMark mark() const noexcept {
    return {all_token_ids_.size(), block_hashes_.size(), num_tokens_to_hash_};
  }
  void rewind(const RequestMark& mark) noexcept;

  // What every step reads comes first, in a few cache lines.
  RequestProgress progress;

 private:
  friend class RequestTable;
  void update_block_hashes();

  mutable RequestHandle handle_;
  std::vector<std::int32_t> all_token_ids_;
  std::vector<BlockHash> block_hashes_;
  // The hasher has nothing to do before there are so many tokens.
  std::int64_t num_tokens_to_hash_ = 0;
  RequestBlockHasher hasher_;
  std::int64_t num_prompt_tokens_;
  RequestOptions options_;
};

}  // namespace paged_kv
