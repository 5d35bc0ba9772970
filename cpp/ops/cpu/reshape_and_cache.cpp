// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/reshape_and_cache.h"

#include "ops/cpu/new_token_rows.h"
#include "ops/cpu/slot_runs.h"
#include "ops/cpu/strided_row.h"
#include "ops/cpu/transpose.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace paged_kv::cpu {
namespace {

constexpr std::int64_t kChunkBytes = 16;  // x elements

// Tokens first_token .. first_token + num_tokens - 1 go to block `block`, from `offset` on.
struct SlotRun {
  std::int64_t first_token;
  std::int64_t num_tokens;
  std::int64_t block;
  std::int64_t offset;
};

// A part of a run's rows of one head, and where it begins in the cache.
struct Tile {
  DenseRows rows;
  std::int64_t num_tokens;
  std::int64_t num_dims;
  std::byte* dst;
};

// The longest run from `token` on, up to a tile, whose slots follow each other inside one block.
// The slot of `token` is not negative.
SlotRun find_run(const ReshapeAndCacheParams& p, std::int64_t token, std::int64_t end) {
  const std::int64_t slot = p.slot_mapping[token];
  const std::int64_t offset = slot % p.block_size;
  const std::int64_t limit = std::min({end - token, p.block_size - offset, kTileTokens});
  return {token, run_length(p.slot_mapping, token, limit), slot / p.block_size, offset};
}

// Of cache elements with the type T.
template <class T>
class PackedWriter {
 public:
  explicit PackedWriter(const ReshapeAndCacheParams& p)
      : p_(p),
        keys_(p.key, conversion_to_cache(p.dtype, p.element_size, p.kv_cache_dtype, p.k_scale)),
        values_(p.value,
                conversion_to_cache(p.dtype, p.element_size, p.kv_cache_dtype, p.v_scale)) {}

  void write(std::int64_t begin, std::int64_t end) const noexcept {
    for (std::int64_t token = begin; token < end;) {
      if (p_.slot_mapping[token] < 0) {
        ++token;
        continue;
      }
      const SlotRun run = find_run(p_, token, end);
      // Keys of all heads, then values: fewer places are read at a time.
      for_each_tile([&](std::int64_t head, std::int64_t dim) { write_keys_of(run, head, dim); });
      for_each_tile([&](std::int64_t head, std::int64_t dim) { write_values_of(run, head, dim); });
      token += run.num_tokens;
    }
  }

 private:
  template <class F>
  void for_each_tile(F&& f) const noexcept {
    for (std::int64_t head = 0; head < p_.num_kv_heads; ++head) {
      for (std::int64_t dim = 0; dim < p_.head_size; dim += kTileDims) f(head, dim);
    }
  }

  void write_keys_of(const SlotRun& run, std::int64_t head, std::int64_t dim) const noexcept {
    const std::int64_t num_dims = std::min(kTileDims, p_.head_size - dim);
    alignas(kChunkBytes) std::byte memory[kTileTokens * kTileDims * sizeof(float)];
    const PackedKeyCache& k = p_.key_cache;
    write_keys({keys_.rows(run.first_token, run.num_tokens, head, dim, num_dims, memory),
                run.num_tokens, num_dims,
                at(k.data, run.block * k.block_stride + head * k.head_stride +
                               dim / p_.x * k.chunk_stride + run.offset * k.offset_stride)});
  }

  void write_values_of(const SlotRun& run, std::int64_t head, std::int64_t dim) const noexcept {
    const std::int64_t num_dims = std::min(kTileDims, p_.head_size - dim);
    alignas(kChunkBytes) std::byte memory[kTileTokens * kTileDims * sizeof(float)];
    const PackedValueCache& v = p_.value_cache;
    write_values({values_.rows(run.first_token, run.num_tokens, head, dim, num_dims, memory),
                  run.num_tokens, num_dims,
                  at(v.data, run.block * v.block_stride + head * v.head_stride +
                                 dim * v.dim_stride + run.offset * v.offset_stride)});
  }

  // A token's chunk is contiguous in the cache, and the same chunk of the next token follows.
  void write_keys(const Tile& tile) const noexcept {
    const PackedKeyCache& cache = p_.key_cache;
    const std::int64_t chunk_stride = cache.chunk_stride * kElementSize;
    const std::int64_t lane_stride = cache.lane_stride * kElementSize;
    for (std::int64_t i = 0; i < tile.num_tokens; ++i) {
      const std::byte* src = tile.rows.data + i * tile.rows.stride_bytes;
      std::byte* dst = at(tile.dst, i * cache.offset_stride);
      for (std::int64_t dim = 0; dim < tile.num_dims; dim += p_.x) {
        if (cache.lane_stride == 1) {
          std::memcpy(dst, src, kChunkBytes);
        } else {
          copy_strided<kElementSize>(src, kElementSize, dst, lane_stride, p_.x);
        }
        src += kChunkBytes;
        dst += chunk_stride;
      }
    }
  }

  void write_values(const Tile& tile) const noexcept {
    const PackedValueCache& cache = p_.value_cache;
    const std::int64_t dim_stride = cache.dim_stride * kElementSize;
    if (cache.offset_stride == 1) {  // a dim of all tokens is contiguous
      return transpose_rows<T>(tile.rows.data, tile.rows.stride_bytes, tile.num_tokens,
                               tile.num_dims, tile.dst, dim_stride);
    }
    for (std::int64_t i = 0; i < tile.num_tokens; ++i) {
      copy_strided<kElementSize>(tile.rows.data + i * tile.rows.stride_bytes, kElementSize,
                                 at(tile.dst, i * cache.offset_stride), dim_stride, tile.num_dims);
    }
  }

  static constexpr std::int64_t kElementSize = sizeof(T);

  [[nodiscard]] static std::byte* at(void* data, std::int64_t element) noexcept {
    return static_cast<std::byte*>(data) + element * kElementSize;
  }

  const ReshapeAndCacheParams& p_;
  NewTokenRows keys_;
  NewTokenRows values_;
};

template <class T>
void write_packed(const ReshapeAndCacheParams& p, const ThreadRunner& runner) {
  const PackedWriter<T> writer(p);
  const std::int64_t bytes_per_token = 2 * p.num_kv_heads * p.head_size * p.element_size;
  parallel_for(runner, p.slot_mapping.size, copies_per_task(bytes_per_token),
               [&](std::int64_t begin, std::int64_t end) { writer.write(begin, end); });
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& p, const ThreadRunner& runner) {
  check_slots(p.slot_mapping, p.num_blocks * p.block_size);
  if (p.kv_cache_dtype != KvCacheDtype::kAuto) return write_packed<std::uint8_t>(p, runner);
  if (p.element_size == 2) return write_packed<std::uint16_t>(p, runner);
  write_packed<std::uint32_t>(p, runner);
}

}  // namespace paged_kv::cpu
