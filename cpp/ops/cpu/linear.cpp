// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/linear.h"

#include "ops/cpu/scratch.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace paged_kv::cpu {
namespace {

// Panels in a tile: few enough that for most models the next tile, fetched meanwhile, is still in
// the second-level cache when its turn comes; many enough to be worth a turn of a thread.
constexpr std::int64_t kTilePanels = 3;
constexpr std::int64_t kTileFeatures = kTilePanels * kPanelFeatures;
// So many rows of the input go over a tile at a time: their sums stay in the first-level cache.
constexpr std::int64_t kRowsAtATime = 24;
// So much of the input goes over the whole weight before the rest has its turn: it stays in the
// second-level cache, or in the third where rows are long. Fewer rows would read the weight too
// often.
constexpr std::int64_t kChunkBytes = 192 * 1024;
constexpr std::int64_t kMinChunkRows = 3 * kRowsAtATime;
// Fewer rows leave the weight to the processor's own prefetcher, which sees that it lies in order
// and keeps up.
constexpr std::int64_t kMinRowsToFetch = 3;

const void* element(const void* data, ElementType type, std::int64_t index) {
  return static_cast<const char*>(data) + index * element_size(type);
}

// A tile of the output: some rows of the input by a tile of the weight.
struct OutputTile {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t weight_tile = 0;

  [[nodiscard]] std::int64_t num_rows() const noexcept { return row_end - row_begin; }
};

// The tiles of the output: chunk by chunk of the input, in each in the order of the weight. Threads
// take the next one in turns, as one of them is often slower than the others.
class OutputTiles {
 public:
  explicit OutputTiles(const LinearParams& p)
      : num_rows_(p.num_rows),
        chunk_rows_(choose_chunk_rows(p)),
        tiles_per_chunk_(ceil_div(p.out_features, kTileFeatures)),
        num_tiles_(ceil_div(num_rows_, chunk_rows_) * tiles_per_chunk_) {}

  [[nodiscard]] std::int64_t num_tiles() const noexcept { return num_tiles_; }

  // Without rows after the last one. Any thread may call it.
  OutputTile take() noexcept {
    const std::int64_t tile = next_.fetch_add(1, std::memory_order_relaxed);
    if (tile >= num_tiles_) return {};
    const std::int64_t row_begin = tile / tiles_per_chunk_ * chunk_rows_;
    return {row_begin, std::min(row_begin + chunk_rows_, num_rows_), tile % tiles_per_chunk_};
  }

 private:
  static std::int64_t choose_chunk_rows(const LinearParams& p) noexcept {
    const std::int64_t row_bytes = p.in_features * std::int64_t{sizeof(float)};
    const std::int64_t fitting = kChunkBytes / row_bytes / kRowsAtATime * kRowsAtATime;
    return std::max(fitting, kMinChunkRows);
  }

  std::int64_t num_rows_;
  std::int64_t chunk_rows_;
  std::int64_t tiles_per_chunk_;
  std::int64_t num_tiles_;
  std::atomic<std::int64_t> next_{0};
};

// The panels of a tile; the last one may be filled up with other features.
struct WeightTile {
  std::int64_t first_feature;
  std::int64_t num_features;
  WeightPanels panels;

  WeightTile(const LinearParams& p, std::int64_t index)
      : first_feature(index * kTileFeatures),
        num_features(std::min(p.out_features - first_feature, kTileFeatures)),
        panels{.data = element(p.weight, p.weight_type, first_feature * p.in_features),
               .count = ceil_div(num_features, kPanelFeatures),
               .in_features = p.in_features} {}

  // The memory of the panels.
  [[nodiscard]] MemoryRun memory(const LinearParams& p) const noexcept {
    const std::int64_t num_elements = panels.count * kPanelFeatures * p.in_features;
    const char* begin = static_cast<const char*>(panels.data);
    return {begin, begin + num_elements * element_size(p.weight_type)};
  }
};

// The input as float32; it is not copied if it is that already.
FloatRows float_rows(const LinearParams& p, float* buffer, const ThreadRunner& runner) {
  if (p.x_type == ElementType::kFloat) {
    // It is only read.
    return {static_cast<float*>(const_cast<void*>(p.x)), p.x_stride, p.num_rows};
  }
  const auto convert = p.kernels->convert_row[static_cast<int>(p.x_type)];
  parallel_for(runner, p.num_rows, copies_per_task(p.in_features * std::int64_t{sizeof(float)}),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t r = begin; r < end; ++r) {
                   convert(element(p.x, p.x_type, r * p.x_stride), p.in_features,
                           buffer + r * p.in_features);
                 }
               });
  return {buffer, p.in_features, p.num_rows};
}

// The results of some rows, `sums_per_row` apart, from `begin` on: with the bias, rounded.
void store_rows(const LinearParams& p, const WeightTile& tile, const float* bias, float* sums,
                std::int64_t sums_per_row, std::int64_t begin, std::int64_t count) {
  const auto store = p.kernels->store_row[static_cast<int>(p.out_type)];
  for (std::int64_t r = 0; r < count; ++r) {
    float* row = sums + r * sums_per_row;
    for (std::int64_t i = 0; p.bias != nullptr && i < tile.num_features; ++i) row[i] += bias[i];
    const std::int64_t index = (begin + r) * p.out_stride + tile.first_feature;
    store(row, 1.0f, tile.num_features,
          static_cast<char*>(p.out) + index * element_size(p.out_type));
  }
}

// The product for one tile of the output; the weight of the `next` is fetched meanwhile.
void multiply_tile(const LinearParams& p, const FloatRows& x, const OutputTile& output,
                   const OutputTile& next) {
  WeightTile tile(p, output.weight_tile);
  alignas(64) float sums[kRowsAtATime * kTileFeatures];
  alignas(64) float bias[kTileFeatures];
  if (p.bias != nullptr) {
    p.kernels->convert_row[static_cast<int>(p.bias_type)](
        element(p.bias, p.bias_type, tile.first_feature), tile.num_features, bias);
  }
  const auto multiply = p.kernels->panels.multiply[static_cast<int>(p.weight_type)];
  MemoryRun next_memory;
  LinesAhead ahead;
  if (next.num_rows() > 0 && p.num_rows >= kMinRowsToFetch) {
    next_memory = WeightTile(p, next.weight_tile).memory(p);
    ahead = LinesAhead::of(&next_memory, 1, ceil_div(output.num_rows(), kRowsAtATime));
    tile.panels.ahead = &ahead;
  }
  const std::int64_t sums_per_row = tile.panels.count * kPanelFeatures;
  // Sums that are results are written where these belong.
  const bool are_results =
      p.bias == nullptr && p.out_type == ElementType::kFloat && sums_per_row == tile.num_features;
  for (std::int64_t begin = output.row_begin; begin < output.row_end; begin += kRowsAtATime) {
    const std::int64_t count = std::min(output.row_end - begin, kRowsAtATime);
    const FloatRows rows{x.data + begin * x.stride, x.stride, count};
    if (are_results) {
      float* out = static_cast<float*>(p.out) + begin * p.out_stride + tile.first_feature;
      multiply(rows, tile.panels, {out, p.out_stride});
    } else {
      multiply(rows, tile.panels, {sums, sums_per_row});
      store_rows(p, tile, bias, sums, sums_per_row, begin, count);
    }
  }
}

}  // namespace

void linear(const LinearParams& params, const ThreadRunner& runner) {
  static thread_local Scratch scratch;
  float* float_x = nullptr;
  if (params.x_type != ElementType::kFloat) {
    const std::int64_t num_bytes =
        params.num_rows * params.in_features * std::int64_t{sizeof(float)};
    float_x = reinterpret_cast<float*>(scratch.reserve(num_bytes));
  }
  const FloatRows x = float_rows(params, float_x, runner);
  OutputTiles tiles(params);
  const std::int64_t num_workers = std::min(tiles.num_tiles(), runner.num_threads());
  parallel_for(runner, num_workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      for (OutputTile next = tiles.take(); next.num_rows() > 0;) {
        const OutputTile output = next;
        next = tiles.take();
        multiply_tile(params, x, output, next);
      }
    }
  });
}

}  // namespace paged_kv::cpu
