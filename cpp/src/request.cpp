// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/request.h"

#include "paged_kv/check.h"

#include <utility>

namespace paged_kv {

RequestBlockHasher make_request_block_hasher(std::int64_t hash_block_size,
                                             const BlockHash& none_hash) {
  PAGED_KV_CHECK(hash_block_size > 0, "hash_block_size must be positive, got ", hash_block_size);
  return Sha256BlockHasher{hash_block_size, none_hash};
}

std::vector<BlockHash> Sha256BlockHasher::operator()(const Request& request) const {
  const std::span<const BlockHash> hashes = request.block_hashes();
  const auto num_hashed_blocks = static_cast<std::int64_t>(hashes.size());
  const std::int64_t start = num_hashed_blocks * hash_block_size;
  if (start + hash_block_size > request.num_tokens()) return {};
  return hash_full_blocks(
      request.keys(), request.all_token_ids().subspan(static_cast<std::size_t>(start)),
      hash_block_size, num_hashed_blocks, hashes.empty() ? none_hash : hashes.back());
}

Xxh3BlockHasher::Xxh3BlockHasher(std::int64_t hash_block_size, const BlockHash& none_hash,
                                 std::shared_ptr<PrefixContents> contents)
    : hash_block_size_(hash_block_size), none_hash_(none_hash), contents_(std::move(contents)) {
  PAGED_KV_CHECK(hash_block_size > 0, "hash_block_size must be positive, got ", hash_block_size);
  PAGED_KV_CHECK(contents_ != nullptr, "an Xxh3BlockHasher needs PrefixContents");
}

std::vector<BlockHash> Xxh3BlockHasher::operator()(const Request& request) {
  const std::span<const BlockHash> hashes = request.block_hashes();
  PAGED_KV_CHECK(
      hashes.empty() || (hashes.back().is_xxh3() && contents_->contains(hashes.back().content())),
      "the request's block hashes were made by another hasher");
  const auto num_hashed_blocks = static_cast<std::int64_t>(hashes.size());
  const std::int64_t start = num_hashed_blocks * hash_block_size_;
  if (start + hash_block_size_ > request.num_tokens()) return {};
  return hash_full_blocks_xxh3(request.keys(),
                               request.all_token_ids().subspan(static_cast<std::size_t>(start)),
                               hash_block_size_, num_hashed_blocks,
                               hashes.empty() ? none_hash_ : hashes.back(), contents_, last_);
}

std::vector<BlockHash> Xxh3BlockHasher::hash_prefix(const RequestKeys& keys,
                                                    std::span<const std::int32_t> token_ids,
                                                    ContentHolder& last) const {
  return hash_full_blocks_xxh3(keys, token_ids, hash_block_size_, 0, none_hash_, contents_, last);
}

RequestBlockHasher make_xxh3_block_hasher(std::int64_t hash_block_size, const BlockHash& none_hash,
                                          std::shared_ptr<PrefixContents> contents) {
  return Xxh3BlockHasher(hash_block_size, none_hash, std::move(contents));
}

Request::Request(RequestOptions options, RequestBlockHasher hasher)
    : all_token_ids_(std::move(options.prompt_token_ids)),
      hasher_(std::move(hasher)),
      num_prompt_tokens_(static_cast<std::int64_t>(all_token_ids_.size())),
      options_(std::move(options)) {
  options_.prompt_token_ids.clear();
  check_mm_features(options_.keys.mm_features);
  update_block_hashes();
}

void Request::set_block_hasher(RequestBlockHasher hasher) {
  PAGED_KV_CHECK(block_hashes_.empty() || xxh3_hasher() == nullptr, "request ", request_id(),
                 " has hashes that only its present hasher can continue");
  hasher_.swap(hasher);
  num_tokens_to_hash_ = 0;
  try {
    update_block_hashes();
  } catch (...) {
    hasher_.swap(hasher);
    throw;
  }
}

void Request::append_output_token_ids(std::span<const std::int32_t> token_ids) {
  const std::size_t num_tokens_before = all_token_ids_.size();
  all_token_ids_.insert(all_token_ids_.end(), token_ids.begin(), token_ids.end());
  try {
    update_block_hashes();
  } catch (...) {
    all_token_ids_.resize(num_tokens_before);
    throw;
  }
}

void Request::rewind(const RequestMark& mark) noexcept {
  all_token_ids_.resize(mark.num_tokens);
  block_hashes_.resize(mark.num_block_hashes);
  num_tokens_to_hash_ = mark.num_tokens_to_hash;
}

void Request::update_block_hashes() {
  if (!hasher_ || num_tokens() < num_tokens_to_hash_) return;
  std::vector<BlockHash> new_hashes = hasher_(*this);
  if (block_hashes_.empty()) {
    block_hashes_ = std::move(new_hashes);
  } else {
    block_hashes_.insert(block_hashes_.end(), new_hashes.begin(), new_hashes.end());
  }
  // Only of our own hasher it is known when it will have something to do.
  if (const Sha256BlockHasher* hasher = sha256_hasher()) {
    num_tokens_to_hash_ = (std::ssize(block_hashes_) + 1) * hasher->hash_block_size;
  }
}

}  // namespace paged_kv
