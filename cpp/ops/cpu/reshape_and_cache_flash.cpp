// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/reshape_and_cache.h"
#include "ops/cpu/slot_runs.h"
#include "ops/cpu/token_move.h"
#include "paged_kv/check.h"

#include <algorithm>

namespace paged_kv::cpu {
namespace {

// Keys, or values.
class FlashWriter {
 public:
  FlashWriter(const ReshapeAndCacheFlashParams& p, const NewTokens& src, const FlashCache& dst,
              const ElementConversion& conversion)
      : src_(static_cast<const std::byte*>(src.data)),
        dst_(static_cast<std::byte*>(dst.data)),
        token_stride_(src.token_stride * conversion.src_element_size),
        block_stride_(dst.block_stride * conversion.dst_element_size),
        offset_stride_(dst.offset_stride * conversion.dst_element_size),
        move_(conversion, p.num_kv_heads, p.head_size, src.strides, dst.strides) {}

  // Tokens from first_token on go to consecutive places of one block.
  void write(std::int64_t first_token, std::int64_t num_tokens, std::int64_t block,
             std::int64_t offset) const noexcept {
    const std::byte* src = src_ + first_token * token_stride_;
    std::byte* dst = dst_ + block * block_stride_ + offset * offset_stride_;
    move_.tokens(src, token_stride_, dst, offset_stride_, num_tokens);
  }

  [[nodiscard]] std::int64_t bytes_per_token() const noexcept { return move_.bytes_per_token(); }

 private:
  const std::byte* src_;
  std::byte* dst_;
  std::int64_t token_stride_;
  std::int64_t block_stride_;
  std::int64_t offset_stride_;
  TokenMover move_;
};

FlashWriter key_writer(const ReshapeAndCacheFlashParams& p) {
  return {p, p.key, p.key_cache,
          conversion_to_cache(p.dtype, p.element_size, p.kv_cache_dtype, p.k_scale)};
}

FlashWriter value_writer(const ReshapeAndCacheFlashParams& p) {
  return {p, p.value, p.value_cache,
          conversion_to_cache(p.dtype, p.element_size, p.kv_cache_dtype, p.v_scale)};
}

}  // namespace

void check_slots(VectorView<const std::int64_t> slot_mapping, std::int64_t num_slots) {
  for (std::int64_t token = 0; token < slot_mapping.size; ++token) {
    PAGED_KV_CHECK(slot_mapping[token] < num_slots, "slot_mapping[", token,
                   "]: expected to be below num_blocks * block_size = ", num_slots, ", got ",
                   slot_mapping[token]);
  }
}

void reshape_and_cache_flash(const ReshapeAndCacheFlashParams& p, const ThreadRunner& runner) {
  check_slots(p.slot_mapping, p.num_blocks * p.block_size);
  const FlashWriter key = key_writer(p);
  const FlashWriter value = value_writer(p);
  const std::int64_t bytes_per_token = key.bytes_per_token() + value.bytes_per_token();
  parallel_for(runner, p.slot_mapping.size, copies_per_task(bytes_per_token),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t token = begin; token < end;) {
                   const std::int64_t slot = p.slot_mapping[token];
                   if (slot < 0) {
                     ++token;
                     continue;
                   }
                   const std::int64_t left_in_block = p.block_size - slot % p.block_size;
                   const std::int64_t length =
                       run_length(p.slot_mapping, token, std::min(end - token, left_in_block));
                   key.write(token, length, slot / p.block_size, slot % p.block_size);
                   value.write(token, length, slot / p.block_size, slot % p.block_size);
                   token += length;
                 }
               });
}

}  // namespace paged_kv::cpu
