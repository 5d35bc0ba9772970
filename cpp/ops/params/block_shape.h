// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace paged_kv {

// What one block looks like inside a cache, as the fewest runs of contiguous bytes.
class BlockShape {
 public:
  struct Dim {
    std::int64_t size;
    std::int64_t stride_bytes;
    [[nodiscard]] bool operator==(const Dim&) const = default;
  };

  // `sizes` and `strides` (elements, not negative) are those of the cache without its first, the
  // block dimension. Dimensions that continue each other in memory are merged.
  BlockShape(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides,
             std::int64_t element_size)
      : run_bytes_(element_size) {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] != 1) outer_.push_back({sizes[i], strides[i] * element_size});
    }
    // The order of elements does not matter to a copy, so dimensions go by stride: an hnd view of a
    // dense block then merges into one run, as an nhd one does.
    std::sort(outer_.begin(), outer_.end(),
              [](const Dim& a, const Dim& b) { return a.stride_bytes > b.stride_bytes; });
    while (!outer_.empty() && outer_.back().stride_bytes == run_bytes_) {
      run_bytes_ *= outer_.back().size;
      outer_.pop_back();
    }
    for (const Dim& dim : outer_) num_runs_ *= dim.size;
  }

  [[nodiscard]] bool operator==(const BlockShape&) const = default;

  // Of the runs, from the largest stride to the smallest.
  [[nodiscard]] std::span<const Dim> outer_dims() const noexcept { return outer_; }
  [[nodiscard]] std::int64_t run_bytes() const noexcept { return run_bytes_; }
  [[nodiscard]] std::int64_t num_runs() const noexcept { return num_runs_; }
  [[nodiscard]] std::int64_t num_bytes() const noexcept { return num_runs_ * run_bytes_; }

  // On the host. Cost: num_runs() memcpys of run_bytes().
  void copy(const std::byte* src, std::byte* dst) const {
    if (num_bytes() == 0) return;  // memcpy may not be given the null pointers of an empty tensor
    for (std::int64_t run = 0; run < num_runs_; ++run) {
      std::int64_t offset = 0;
      std::int64_t rest = run;
      for (std::size_t i = outer_.size(); i-- > 0;) {
        offset += rest % outer_[i].size * outer_[i].stride_bytes;
        rest /= outer_[i].size;
      }
      std::memcpy(dst + offset, src + offset, static_cast<std::size_t>(run_bytes_));
    }
  }

 private:
  std::vector<Dim> outer_;
  std::int64_t run_bytes_;
  std::int64_t num_runs_ = 1;
};

// One cache tensor, its first dimension the block.
struct BlockedCache {
  std::byte* data;
  std::int64_t num_blocks;
  std::int64_t block_stride_bytes;
  BlockShape shape;
};

}  // namespace paged_kv
