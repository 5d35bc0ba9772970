// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/new_token_rows.h"
#include "ops/cpu/reshape_and_cache.h"
#include "ops/cpu/slot_runs.h"
#include "ops/cpu/strided_row.h"
#include "ops/cpu/transpose.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

namespace paged_kv::cpu {
namespace {

// A group of tokens is one tile, whose dims are whole panels.
static_assert(kPanelTokens <= kTileTokens && kTileDims % kPanelDims == 0);

// Tokens first_token .. first_token + num_tokens - 1 go to one group of 16 tokens, from `lane` on.
struct GroupRun {
  std::int64_t first_token;
  std::int64_t num_tokens;
  std::int64_t block;
  std::int64_t first_element;  // of the group, from that of its head and block
  std::int64_t lane;
};

// The longest run from `token` on whose slots follow each other inside one group. The slot of
// `token` is not negative.
GroupRun find_run(const ReshapeAndCachePanelsParams& p, std::int64_t token, std::int64_t end) {
  const std::int64_t slot = p.slot_mapping[token];
  const std::int64_t offset = slot % p.block_size;
  const std::int64_t lane = offset % kPanelTokens;
  const std::int64_t limit = std::min(end - token, kPanelTokens - lane);
  return {token, run_length(p.slot_mapping, token, limit), slot / p.block_size,
          (offset - lane) * p.head_size, lane};
}

// Of cache elements with the type T, kX of them side by side.
template <class T, int kX>
class PanelsWriter {
 public:
  explicit PanelsWriter(const ReshapeAndCachePanelsParams& p)
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
      const GroupRun run = find_run(p_, token, end);
      // Keys of all heads, then values: fewer places are read at a time.
      for_each_tile(keys_, p_.key_cache, run,
                    [&](const DenseRows& rows, std::int64_t num_dims, std::byte* panels) {
                      write_keys(rows, run, num_dims, panels);
                    });
      for_each_tile(values_, p_.value_cache, run,
                    [&](const DenseRows& rows, std::int64_t num_dims, std::byte* panels) {
                      write_values(rows, run, num_dims, panels);
                    });
      token += run.num_tokens;
    }
  }

 private:
  // f(rows, number of dims, where the panels of these dims begin)
  template <class F>
  void for_each_tile(const NewTokenRows& tokens, const PanelsCache& cache, const GroupRun& run,
                     F&& f) const noexcept {
    alignas(16) std::byte memory[kTileTokens * kTileDims * sizeof(float)];
    for (std::int64_t head = 0; head < p_.num_kv_heads; ++head) {
      std::byte* group =
          static_cast<std::byte*>(cache.data) +
          (run.block * cache.block_stride + head * cache.head_stride + run.first_element) *
              kElementSize;
      for (std::int64_t dim = 0; dim < p_.head_size; dim += kTileDims) {
        const std::int64_t num_dims = std::min(kTileDims, p_.head_size - dim);
        f(tokens.rows(run.first_token, run.num_tokens, head, dim, num_dims, memory), num_dims,
          group + dim * kPanelTokens * kElementSize);
      }
    }
  }

  // A unit of kX dims of all tokens is contiguous in the cache.
  static void write_keys(const DenseRows& rows, const GroupRun& run, std::int64_t num_dims,
                         std::byte* panels) noexcept {
    using Unit = std::conditional_t<kX == 2, std::uint32_t, T>;
    static_assert(sizeof(Unit) == kX * sizeof(T));
    constexpr std::int64_t kUnitSize = sizeof(Unit);
    transpose_rows<Unit>(rows.data, rows.stride_bytes, run.num_tokens, num_dims / kX,
                         panels + run.lane * kUnitSize, kPanelTokens * kUnitSize);
  }

  // A panel of 16 dims has kX tokens after the other.
  static void write_values(const DenseRows& rows, const GroupRun& run, std::int64_t num_dims,
                           std::byte* panels) noexcept {
    for (std::int64_t i = 0; i < run.num_tokens;) {
      const std::byte* src = rows.data + i * rows.stride_bytes;
      const std::int64_t lane = run.lane + i;
      std::byte* dst = panels + lane / kX * kX * kRowBytes + lane % kX * kElementSize;
      if constexpr (kX == 1) {
        for_each_panel(num_dims, src, dst, [](const std::byte* from, std::byte* to) {
          std::memcpy(to, from, kRowBytes);
        });
        ++i;
      } else if (lane % 2 == 0 && i + 1 < run.num_tokens) {
        for_each_panel(num_dims, src, dst, [&](const std::byte* from, std::byte* to) {
          using Vector = TransposedBlock<T>;
          Vector::zip(from, from + rows.stride_bytes, to);
          Vector::zip(from + 16, from + rows.stride_bytes + 16, to + 32);
        });
        i += 2;
      } else {
        // The other token of the pair may be in use, or being written by another thread.
        for_each_panel(num_dims, src, dst, [](const std::byte* from, std::byte* to) {
          copy_strided<sizeof(T)>(from, kElementSize, to, kX * kElementSize, kPanelDims);
        });
        ++i;
      }
    }
  }

  // f(16 dims of a row, their place)
  template <class F>
  static void for_each_panel(std::int64_t num_dims, const std::byte* src, std::byte* dst,
                             F&& f) noexcept {
    for (std::int64_t dim = 0; dim < num_dims; dim += kPanelDims) {
      f(src, dst);
      src += kRowBytes;
      dst += kPanelTokens * kRowBytes;
    }
  }

  static constexpr std::int64_t kElementSize = sizeof(T);
  static constexpr std::int64_t kRowBytes = kPanelDims * kElementSize;
  static_assert(kX == 1 || kRowBytes == 32);

  const ReshapeAndCachePanelsParams& p_;
  NewTokenRows keys_;
  NewTokenRows values_;
};

template <class T, int kX>
void write_panels(const ReshapeAndCachePanelsParams& p, const ThreadRunner& runner) {
  const PanelsWriter<T, kX> writer(p);
  const std::int64_t bytes_per_token = 2 * p.num_kv_heads * p.head_size * p.element_size;
  parallel_for(runner, p.slot_mapping.size, copies_per_task(bytes_per_token),
               [&](std::int64_t begin, std::int64_t end) { writer.write(begin, end); });
}

}  // namespace

void reshape_and_cache_panels(const ReshapeAndCachePanelsParams& p, const ThreadRunner& runner) {
  check_slots(p.slot_mapping, p.num_blocks * p.block_size);
  if (p.kv_cache_dtype != KvCacheDtype::kAuto) return write_panels<std::uint8_t, 1>(p, runner);
  if (p.element_size == 4) return write_panels<std::uint32_t, 1>(p, runner);
  if (panel_x(p.dtype, p.kv_cache_dtype) == 2) return write_panels<std::uint16_t, 2>(p, runner);
  write_panels<std::uint16_t, 1>(p, runner);
}

}  // namespace paged_kv::cpu
