// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/linear.h"

#include "ops/cpu/scratch.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstddef>

namespace paged_kv::cpu {
namespace {

// So many rows go over a tile of the weight at a time: both stay in the second-level cache.
constexpr std::int64_t kRowsAtATime = 64;
// Rows of the weight in a tile: few enough that the next tile, fetched meanwhile, is still in the
// second-level cache when its turn comes.
constexpr std::int64_t kTileFeatures = kWholeBlocksOfKeys;
static_assert(kTileFeatures <= kTileKeys);
// One row of float32 leaves the weight to the processor's own prefetcher, which sees that it lies
// in order and keeps up. 16-bit rows are done sooner than it brings the next ones.
bool fetches_next_tile(const LinearParams& p) {
  return p.num_rows > 1 || p.weight_type != ElementType::kFloat;
}

const void* element(const void* data, ElementType type, std::int64_t index) {
  return static_cast<const char*>(data) + index * element_size(type);
}

// Some rows of the weight, as multiply_keys() takes them.
class WeightTile {
 public:
  // The first rows of [first_feature, end_feature), none if that is empty.
  WeightTile(const LinearParams& p, std::int64_t first_feature, std::int64_t end_feature)
      : type_(p.weight_type),
        first_feature_(first_feature),
        count_(std::clamp<std::int64_t>(end_feature - first_feature, 0, kTileFeatures)) {
    for (std::int64_t i = 0; i < count_; ++i) {
      rows_[i] = element(p.weight, type_, (first_feature + i) * p.weight_stride);
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
  [[nodiscard]] std::int64_t end_feature() const noexcept { return first_feature_ + count_; }
  [[nodiscard]] std::int64_t count() const noexcept { return count_; }
  [[nodiscard]] const void* const* rows() const noexcept { return rows_; }
  // All of it where it lies, for one call. `runs`: [kTileFeatures], of what is given.
  [[nodiscard]] LinesAhead lines(const LinearParams& p, MemoryRun* runs) const noexcept {
    MemoryRuns collected(runs);
    for (std::int64_t i = 0; i < count_; ++i) {
      collected.add(rows_[i], p.in_features * element_size(type_));
    }
    return LinesAhead::of(runs, collected.finish(), 1);
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

// All rows times one tile of the weight; `next` is fetched meanwhile.
void multiply_tile(const LinearParams& p, const FloatRows& x, const WeightTile& tile,
                   const WeightTile& next) {
  alignas(64) float products[kRowsAtATime * kTileKeys];
  alignas(64) float bias[kTileKeys];
  if (p.bias != nullptr) {
    p.kernels->convert_row[static_cast<int>(p.bias_type)](
        element(p.bias, p.bias_type, tile.first_feature()), tile.count(), bias);
  }
  const auto multiply = p.kernels->multiply_keys[static_cast<int>(tile.type())];
  const auto store = p.kernels->store_row[static_cast<int>(p.out_type)];
  MemoryRun runs[kTileFeatures];
  LinesAhead ahead = fetches_next_tile(p) ? next.lines(p, runs) : LinesAhead{};
  for (std::int64_t begin = 0; begin < x.count; begin += kRowsAtATime) {
    const std::int64_t count = std::min(x.count - begin, kRowsAtATime);
    multiply({x.data + begin * x.stride, x.stride, count},
             {.rows = tile.rows(),
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
  const std::int64_t num_tiles = ceil_div(params.out_features, kTileFeatures);
  const std::int64_t num_workers = std::min(num_tiles, runner.num_threads());
  ScratchCutter sizes(nullptr);
  (void)Buffers(params, converts_tiles, num_workers, sizes);
  ScratchCutter cutter(scratch.reserve(sizes.num_bytes()));
  const Buffers buffers(params, converts_tiles, num_workers, cutter);
  const FloatRows x = float_rows(params, buffers.x, runner);

  // Each worker reads one stretch of the weight.
  parallel_for(runner, num_workers, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t worker = begin; worker < end; ++worker) {
      const std::int64_t last_tile = (worker + 1) * num_tiles / num_workers;
      const std::int64_t stretch_end = std::min(last_tile * kTileFeatures, params.out_features);
      WeightTile next(params, worker * num_tiles / num_workers * kTileFeatures, stretch_end);
      while (next.count() > 0) {
        WeightTile tile = next;
        next = WeightTile(params, tile.end_feature(), stretch_end);
        if (converts_tiles) {
          tile.convert_to_float(
              params, buffers.converted_tile + worker * kTileFeatures * params.in_features);
        }
        multiply_tile(params, x, tile, next);
      }
    }
  });
}

}  // namespace paged_kv::cpu
