// SPDX-License-Identifier: Apache-2.0
#include "paged_kv/cuda/block_copy.h"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 128;
constexpr int kVectorsPerThread = 4;
constexpr int kVectorsPerBlock = kNumThreads * kVectorsPerThread;
constexpr std::size_t kMaxCachesPerLaunch = 64;
constexpr std::int64_t kMaxBlockBytes = std::int64_t{1} << 31;

// What the caches of a launch have in common: BlockShape without a vector, sizes in 32 bits.
struct BlockGeometry {
  std::int64_t num_blocks;
  std::int64_t block_stride_bytes;
  std::int64_t stride_bytes[kMaxBlockCopyDims];  // of the runs, from the largest to the smallest
  std::uint32_t sizes[kMaxBlockCopyDims];
  std::uint32_t num_dims;
  std::uint32_t num_runs;
  std::uint32_t run_bytes;
};

struct BlockCopy {
  BlockGeometry geometry;
  BlockMapping block_mapping;
  std::uint32_t tiles_per_block;  // of kVectorsPerBlock vectors
  std::byte* caches[kMaxCachesPerLaunch];
};
static_assert(sizeof(BlockCopy) <= 4096, "the limit for a launch's arguments");

// Divisions are of 32 bits: one of 64 bits is a call, and that takes a stack.
__device__ std::int64_t offset_of_run(const BlockGeometry& geometry, std::uint32_t run) {
  std::int64_t offset = 0;
#pragma unroll
  for (int i = kMaxBlockCopyDims - 1; i >= 0; --i) {
    if (i >= static_cast<int>(geometry.num_dims)) continue;
    offset += run % geometry.sizes[i] * geometry.stride_bytes[i];
    run /= geometry.sizes[i];
  }
  return offset;
}

// Grid: (pairs x tiles of a block, caches).
template <class Vector>
__global__ void __launch_bounds__(kNumThreads)
    copy_blocks_kernel(const __grid_constant__ BlockCopy copy) {
  const BlockGeometry& geometry = copy.geometry;
  const std::uint32_t pair = blockIdx.x / copy.tiles_per_block;
  const std::uint32_t tile = blockIdx.x % copy.tiles_per_block;
  const std::int64_t src_block = copy.block_mapping(pair, 0);
  const std::int64_t dst_block = copy.block_mapping(pair, 1);
  if (src_block < 0 || src_block >= geometry.num_blocks || dst_block < 0 ||
      dst_block >= geometry.num_blocks) {
    return;
  }
  std::byte* cache = copy.caches[blockIdx.y];
  const std::byte* src = cache + src_block * geometry.block_stride_bytes;
  std::byte* dst = cache + dst_block * geometry.block_stride_bytes;

  const std::uint32_t vectors_per_run = geometry.run_bytes / sizeof(Vector);
  const std::uint32_t num_vectors = vectors_per_run * geometry.num_runs;
  const std::uint32_t first = tile * kVectorsPerBlock + threadIdx.x;
  Vector vectors[kVectorsPerThread];
  std::int64_t offsets[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const std::uint32_t vector = first + static_cast<std::uint32_t>(i * kNumThreads);
    if (vector >= num_vectors) continue;
    std::uint32_t run = 0;
    std::uint32_t vector_of_run = vector;
    if (geometry.num_runs > 1) {
      run = vector / vectors_per_run;
      vector_of_run = vector - run * vectors_per_run;
    }
    constexpr std::int64_t kVectorBytes = sizeof(Vector);
    offsets[i] = offset_of_run(geometry, run) + vector_of_run * kVectorBytes;
    vectors[i] = *reinterpret_cast<const Vector*>(src + offsets[i]);
  }
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const std::uint32_t vector = first + static_cast<std::uint32_t>(i * kNumThreads);
    if (vector < num_vectors) *reinterpret_cast<Vector*>(dst + offsets[i]) = vectors[i];
  }
}

[[nodiscard]] bool have_one_geometry(const BlockedCache& a, const BlockedCache& b) {
  return a.num_blocks == b.num_blocks && a.block_stride_bytes == b.block_stride_bytes &&
         a.shape == b.shape;
}

[[nodiscard]] BlockGeometry geometry_of(const BlockedCache& cache) {
  const std::span<const BlockShape::Dim> dims = cache.shape.outer_dims();
  PAGED_KV_CHECK(dims.size() <= kMaxBlockCopyDims, "caches: expected at most ", kMaxBlockCopyDims,
                 " dimensions of a block that do not continue each other in memory, got ",
                 dims.size());
  PAGED_KV_CHECK(cache.shape.num_bytes() <= kMaxBlockBytes, "caches: expected blocks of at most ",
                 kMaxBlockBytes, " bytes, got ", cache.shape.num_bytes());
  BlockGeometry geometry{.num_blocks = cache.num_blocks,
                         .block_stride_bytes = cache.block_stride_bytes,
                         .stride_bytes = {},
                         .sizes = {},
                         .num_dims = static_cast<std::uint32_t>(dims.size()),
                         .num_runs = static_cast<std::uint32_t>(cache.shape.num_runs()),
                         .run_bytes = static_cast<std::uint32_t>(cache.shape.run_bytes())};
  for (std::size_t i = 0; i < dims.size(); ++i) {
    geometry.stride_bytes[i] = dims[i].stride_bytes;
    geometry.sizes[i] = static_cast<std::uint32_t>(dims[i].size);
  }
  return geometry;
}

// Whether everything that a copy's offsets are made of is a multiple of num_bytes.
[[nodiscard]] bool is_aligned(const BlockGeometry& geometry, std::span<const BlockedCache> caches,
                              std::int64_t num_bytes) {
  std::int64_t bits = geometry.run_bytes | geometry.block_stride_bytes;
  for (const std::int64_t stride_bytes : geometry.stride_bytes) bits |= stride_bytes;
  for (const BlockedCache& cache : caches) bits |= reinterpret_cast<std::intptr_t>(cache.data);
  return bits % num_bytes == 0;
}

template <class Vector>
void launch_copy(const BlockGeometry& geometry, std::span<const BlockedCache> caches,
                 BlockMapping block_mapping, cudaStream_t stream) {
  const std::int64_t num_vectors =
      static_cast<std::int64_t>(geometry.run_bytes / sizeof(Vector)) * geometry.num_runs;
  const std::int64_t tiles_per_block = ceil_div(num_vectors, std::int64_t{kVectorsPerBlock});
  BlockCopy copy{.geometry = geometry,
                 .block_mapping = block_mapping,
                 .tiles_per_block = static_cast<std::uint32_t>(tiles_per_block),
                 .caches = {}};
  for (std::size_t i = 0; i < caches.size(); ++i) copy.caches[i] = caches[i].data;
  const auto num_tiles = narrow<std::int32_t>(block_mapping.num_rows * tiles_per_block,
                                              "block_mapping: number of thread blocks");
  const dim3 grid(static_cast<unsigned>(num_tiles), static_cast<unsigned>(caches.size()));
  launch(&copy_blocks_kernel<Vector>, grid, kNumThreads, 0, stream, copy);
}

// Caches of one geometry.
void copy_in(std::span<const BlockedCache> caches, const BlockGeometry& geometry,
             BlockMapping block_mapping, cudaStream_t stream) {
  if (is_aligned(geometry, caches, 16)) {
    launch_copy<uint4>(geometry, caches, block_mapping, stream);
  } else if (is_aligned(geometry, caches, 4)) {
    launch_copy<std::uint32_t>(geometry, caches, block_mapping, stream);
  } else {
    launch_copy<std::uint8_t>(geometry, caches, block_mapping, stream);
  }
}

}  // namespace

void copy_blocks(std::span<const BlockedCache> caches, BlockMapping block_mapping,
                 cudaStream_t stream) {
  for (const BlockedCache& cache : caches) (void)geometry_of(cache);  // throws before any copy
  if (block_mapping.num_rows == 0) return;
  while (!caches.empty()) {
    std::size_t count = 1;
    while (count < std::min(caches.size(), kMaxCachesPerLaunch) &&
           have_one_geometry(caches[0], caches[count])) {
      ++count;
    }
    if (caches[0].shape.num_bytes() > 0) {
      copy_in(caches.first(count), geometry_of(caches[0]), block_mapping, stream);
    }
    caches = caches.subspan(count);
  }
}

}  // namespace paged_kv::cuda
