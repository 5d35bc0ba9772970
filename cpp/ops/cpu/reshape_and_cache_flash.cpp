// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/reshape_and_cache.h"
#include "paged_kv/check.h"

namespace paged_kv::cpu {
namespace {

template <class T>
class FlashWriter {
 public:
  FlashWriter(const NewTokens& src, const FlashCache& dst, std::int64_t num_kv_heads,
              std::int64_t head_size)
      : src_(static_cast<const T*>(src.data)),
        dst_(static_cast<T*>(dst.data)),
        token_stride_(src.token_stride),
        block_stride_(dst.block_stride),
        offset_stride_(dst.offset_stride),
        copy_(num_kv_heads, head_size, src.strides, dst.strides) {}

  void write(std::int64_t token, std::int64_t block, std::int64_t offset) const noexcept {
    copy_(src_ + token * token_stride_, dst_ + block * block_stride_ + offset * offset_stride_);
  }

 private:
  const T* src_;
  T* dst_;
  std::int64_t token_stride_;
  std::int64_t block_stride_;
  std::int64_t offset_stride_;
  TokenCopier<T> copy_;
};

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
  dispatch_element_size(p.element_size, [&]<class T>() {
    const FlashWriter<T> key(p.key, p.key_cache, p.num_kv_heads, p.head_size);
    const FlashWriter<T> value(p.value, p.value_cache, p.num_kv_heads, p.head_size);
    const std::int64_t bytes_per_token = 2 * p.num_kv_heads * p.head_size * p.element_size;
    parallel_for(runner, p.slot_mapping.size, copies_per_task(bytes_per_token),
                 [&](std::int64_t begin, std::int64_t end) {
                   for (std::int64_t token = begin; token < end; ++token) {
                     const std::int64_t slot = p.slot_mapping[token];
                     if (slot < 0) {
                       continue;
                     }
                     const std::int64_t block = slot / p.block_size;
                     const std::int64_t offset = slot % p.block_size;
                     key.write(token, block, offset);
                     value.write(token, block, offset);
                   }
                 });
  });
}

}  // namespace paged_kv::cpu
