// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/linear.h"

#include "ops/cpu/scratch.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <atomic>
#include <cstddef>

namespace paged_kv::cpu {
namespace {

// Rows of the weight in a tile: few enough that for most models the next tile, fetched meanwhile,
// is still in the second-level cache when its turn comes; many enough to be worth a turn of a
// thread.
constexpr std::int64_t kTileFeatures = 2 * kWholeBlocksOfKeys;
static_assert(kTileFeatures <= kTileKeys);
// So many rows of the input go over a tile at a time: their products stay in the first-level cache.
constexpr std::int64_t kRowsAtATime = 16;
// So much of the input goes over the whole weight before the rest has its turn: it stays in the
// second-level cache, or in the third where rows are long. Fewer rows would read the weight too
// often.
constexpr std::int64_t kChunkBytes = 192 * 1024;
constexpr std::int64_t kMinChunkRows = 64;
// One row of float32 leaves the weight to the processor's own prefetcher, which sees that it lies
// in order and keeps up. 16-bit rows are done sooner than it brings the next ones.
bool fetches_next_tile(const LinearParams& p) {
  return p.num_rows > 1 || p.weight_type != ElementType::kFloat;
}

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

// Some rows of the weight, as multiply_keys() takes them.
class WeightTile {
 public:
  WeightTile(const LinearParams& p, std::int64_t index)
      : type_(p.weight_type),
        first_feature_(index * kTileFeatures),
        count_(std::min(p.out_features - first_feature_, kTileFeatures)) {
    for (std::int64_t i = 0; i < count_; ++i) {
      rows_[i] = element(p.weight, type_, (first_feature_ + i) * p.weight_stride);
    }
  }

  // Copies the rows to `target`, [kTileFeatures, in_features].
  void convert_to_float(const LinearParams& p, float* target) {
    for (std::int64_t i = 0; i < count_; ++i) {
      float* row = target + i * p.in_features;
      p.kernels->convert_row[static_cast<int>(type_)](rows_[i], p.in_features, row);
      rows_[i] = row;
    }
    type_ = ElementType::kFloat;
  }

  [[nodiscard]] ElementType type() const noexcept { return type_; }
  [[nodiscard]] std::int64_t first_feature() const noexcept { return first_feature_; }
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }
  [[nodiscard]] const void* const* rows() const noexcept { return rows_; }
  // All of it where it lies, for so many calls. `runs`: [kTileFeatures], of what is given.
  [[nodiscard]] LinesAhead lines(const LinearParams& p, std::int64_t num_calls,
                                 MemoryRun* runs) const noexcept {
    MemoryRuns collected(runs);
    for (std::int64_t i = 0; i < count_; ++i) {
      collected.add(rows_[i], p.in_features * element_size(type_));
    }
    return LinesAhead::of(runs, collected.finish(), num_calls);
  }

 private:
  ElementType type_;
  std::int64_t first_feature_;
  std::int64_t count_;
  const void* rows_[kTileFeatures];  // count_ of them
};

// The memory of a call.
struct Buffers {
  float* x = nullptr;  // [num_rows, in_features], if x is not float32
  // [num_workers, kTileFeatures, in_features], if products need it
  float* converted_tile = nullptr;

  Buffers(const LinearParams& p, bool converts_tiles, std::int64_t num_workers,
          ScratchCutter& cutter) {
    if (p.x_type != ElementType::kFloat) x = cutter.take<float>(p.num_rows * p.in_features);
    if (converts_tiles) {
      converted_tile = cutter.take<float>(num_workers * kTileFeatures * p.in_features);
    }
  }
};

// The input as float32; it is not copied if it is that already.
FloatRows float_rows(const LinearParams& p, float* buffer, const ThreadRunner& runner) {
  if (p.x_type == ElementType::kFloat) {
    // multiply_keys() only reads its queries.
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

// The product for one tile of the output; the weight of the `next` is fetched meanwhile.
void multiply_tile(const LinearParams& p, const FloatRows& x, const OutputTile& output,
                   const WeightTile& tile, const OutputTile& next) {
  alignas(64) float products[kRowsAtATime * kTileKeys];
  alignas(64) float bias[kTileKeys];
  if (p.bias != nullptr) {
    p.kernels->convert_row[static_cast<int>(p.bias_type)](
        element(p.bias, p.bias_type, tile.first_feature()), tile.count(), bias);
  }
  const auto multiply = p.kernels->multiply_keys[static_cast<int>(tile.type())];
  const auto store = p.kernels->store_row[static_cast<int>(p.out_type)];
  MemoryRun runs[kTileFeatures];
  LinesAhead ahead;
  if (next.num_rows() > 0 && fetches_next_tile(p)) {
    ahead =
        WeightTile(p, next.weight_tile).lines(p, ceil_div(output.num_rows(), kRowsAtATime), runs);
  }
  for (std::int64_t begin = output.row_begin; begin < output.row_end; begin += kRowsAtATime) {
    const std::int64_t count = std::min(output.row_end - begin, kRowsAtATime);
    multiply({x.data + begin * x.stride, x.stride, count},
             {.tokens = tile.rows(),
              .begin = 0,
              .end = tile.count(),
              .size = p.in_features,
              .ahead = &ahead},
             products);
    for (std::int64_t r = 0; r < count; ++r) {
      float* row = products + r * kTileKeys;
      for (std::int64_t i = 0; p.bias != nullptr && i < tile.count(); ++i) row[i] += bias[i];
      const std::int64_t index = (begin + r) * p.out_stride + tile.first_feature();
      store(row, 1.0f, tile.count(), static_cast<char*>(p.out) + index * element_size(p.out_type));
    }
  }
}

}  // namespace

void linear(const LinearParams& params, const ThreadRunner& runner) {
  static thread_local Scratch scratch;
  const bool converts_tiles =
      params.kernels->multiply_keys[static_cast<int>(params.weight_type)] == nullptr;
  OutputTiles tiles(params);
  const std::int64_t num_workers = std::min(tiles.num_tiles(), runner.num_threads());
  ScratchCutter sizes(nullptr);
  (void)Buffers(params, converts_tiles, num_workers, sizes);
  ScratchCutter cutter(scratch.reserve(sizes.num_bytes()));
  const Buffers buffers(params, converts_tiles, num_workers, cutter);
  const FloatRows x = float_rows(params, buffers.x, runner);

  parallel_for(runner, num_workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      for (OutputTile next = tiles.take(); next.num_rows() > 0;) {
        const OutputTile output = next;
        next = tiles.take();
        WeightTile tile(params, output.weight_tile);
        if (converts_tiles) {
          tile.convert_to_float(
              params, buffers.converted_tile + worker * kTileFeatures * params.in_features);
        }
        multiply_tile(params, x, output, tile, next);
      }
    }
  });
}

}  // namespace paged_kv::cpu
