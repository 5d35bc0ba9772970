// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/reshape_and_cache.h"

#include <algorithm>
#include <cstring>

namespace paged_kv::cpu {
namespace {

// Tokens first_token .. first_token + num_tokens - 1 go to block `block`, from `offset` on.
struct SlotRun {
  std::int64_t first_token;
  std::int64_t num_tokens;
  std::int64_t block;
  std::int64_t offset;
};

// The longest run from `token` on whose slots follow each other inside one block. The slot of
// `token` is not negative.
SlotRun find_run(const ReshapeAndCacheParams& p, std::int64_t token, std::int64_t end) {
  const std::int64_t slot = p.slot_mapping[token];
  SlotRun run{token, 1, slot / p.block_size, slot % p.block_size};
  const std::int64_t limit = std::min(end - token, p.block_size - run.offset);
  while (run.num_tokens < limit &&
         p.slot_mapping[token + run.num_tokens] == slot + run.num_tokens) {
    ++run.num_tokens;
  }
  return run;
}

// A token's chunk of x elements is contiguous in the cache, so keys go token by token.
template <class T>
void write_keys(const ReshapeAndCacheParams& p, const SlotRun& run) {
  const PackedKeyCache& cache = p.key_cache;
  const bool contiguous = p.key.strides.dim == 1 && cache.lane_stride == 1;
  for (std::int64_t head = 0; head < p.num_kv_heads; ++head) {
    for (std::int64_t i = 0; i < run.num_tokens; ++i) {
      const T* src = static_cast<const T*>(p.key.data) +
                     (run.first_token + i) * p.key.token_stride + head * p.key.strides.head;
      T* dst = static_cast<T*>(cache.data) + run.block * cache.block_stride +
               head * cache.head_stride + (run.offset + i) * cache.offset_stride;
      for (std::int64_t dim = 0; dim < p.head_size; dim += p.x, dst += cache.chunk_stride) {
        if (contiguous) {
          std::memcpy(dst, src + dim, 16);  // x elements are 16 bytes
          continue;
        }
        for (std::int64_t lane = 0; lane < p.x; ++lane) {
          dst[lane * cache.lane_stride] = src[(dim + lane) * p.key.strides.dim];
        }
      }
    }
  }
}

// A dim's row of the block is contiguous over tokens, so a run is transposed: the inner loop walks
// tokens, which makes one store per cache line out of what would be one per element.
template <class T>
void write_values(const ReshapeAndCacheParams& p, const SlotRun& run) {
  const PackedValueCache& cache = p.value_cache;
  for (std::int64_t head = 0; head < p.num_kv_heads; ++head) {
    const T* src = static_cast<const T*>(p.value.data) + run.first_token * p.value.token_stride +
                   head * p.value.strides.head;
    T* dst = static_cast<T*>(cache.data) + run.block * cache.block_stride +
             head * cache.head_stride + run.offset * cache.offset_stride;
    for (std::int64_t dim = 0; dim < p.head_size; ++dim) {
      for (std::int64_t i = 0; i < run.num_tokens; ++i) {
        dst[dim * cache.dim_stride + i * cache.offset_stride] =
            src[i * p.value.token_stride + dim * p.value.strides.dim];
      }
    }
  }
}

template <class T>
void write_range(const ReshapeAndCacheParams& p, std::int64_t begin, std::int64_t end) {
  for (std::int64_t token = begin; token < end;) {
    if (p.slot_mapping[token] < 0) {
      ++token;
      continue;
    }
    const SlotRun run = find_run(p, token, end);
    write_keys<T>(p, run);
    write_values<T>(p, run);
    token += run.num_tokens;
  }
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p, const ThreadRunner& runner) {
  check_slots(p.slot_mapping, p.num_blocks * p.block_size);
  dispatch_element_size(p.element_size, [&]<class T>() {
    const std::int64_t bytes_per_token = 2 * p.num_kv_heads * p.head_size * p.element_size;
    parallel_for(runner, p.slot_mapping.size, copies_per_task(bytes_per_token),
                 [&](std::int64_t begin, std::int64_t end) { write_range<T>(p, begin, end); });
  });
}

}  // namespace paged_kv::cpu
