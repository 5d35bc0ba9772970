// SPDX-License-Identifier: Apache-2.0
#include "cuda/src/cache/elements.cuh"
#include "cuda/src/cache/slots.cuh"
#include "cuda/src/find_seq.cuh"
#include "paged_kv/cuda/gather_cache.h"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/math.h"

#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kNumWarps = 4;
constexpr int kChunksPerLane = 4;  // loads on their way before the first store
constexpr std::int64_t kNotFound = -1;

// 16 bytes of 16- and 32-bit caches, 8 of fp8 ones.
template <class Conversion>
inline constexpr int kChunkSize = sizeof(typename Conversion::From) == 1
                                      ? 8
                                      : static_cast<int>(16 / sizeof(typename Conversion::From));

struct Gather {
  GatherCacheParams op;
  Slots slots;
  std::int32_t chunks_per_head;
  std::int32_t chunks_per_token;
  bool has_vectors;
};

// The cache's element offset of the token that goes to `row`, or kNotFound.
__device__ std::int64_t find_token(const Gather& gather, std::int64_t row, int lane) {
  const GatherCacheParams& p = gather.op;
  const std::int64_t seq = find_seq(p.cu_seq_lens, row, lane);
  if (seq == kNoSeq) return kNotFound;
  const std::int64_t start = p.seq_starts.data == nullptr ? 0 : p.seq_starts[seq];
  const std::int64_t first_row = p.cu_seq_lens[seq];
  if (start < 0 || first_row < 0) return kNotFound;
  // Below 2^32, as both summands are below 2^31: a position divides as a slot does.
  const SlotPlace place = place_of(gather.slots, start + (row - first_row));
  if (place.block >= p.block_tables.num_cols) return kNotFound;
  const std::int64_t block = p.block_tables(seq, place.block);
  if (block < 0 || block >= p.num_blocks) return kNotFound;
  return block * p.block_stride + place.offset * p.offset_stride;
}

// The pieces of a token, in the cache and in out.
template <class Conversion>
struct TokenRow {
  const typename Conversion::From* src;
  typename Conversion::To* dst;
};

struct ChunkPlace {
  std::int64_t head;
  std::int64_t dim;
};

template <class Conversion>
__device__ ChunkPlace find_place(const Gather& gather, int chunk) {
  return {.head = chunk / gather.chunks_per_head,
          .dim = std::int64_t{chunk % gather.chunks_per_head} * kChunkSize<Conversion>};
}

[[nodiscard]] __device__ std::int64_t offset_in(const TokenStrides& strides,
                                                const ChunkPlace& place) {
  return place.head * strides.head + place.dim * strides.dim;
}

template <class Conversion>
__device__ void copy_vectors(const Gather& gather, const TokenRow<Conversion>& row, int lane) {
  using From = typename Conversion::From;
  constexpr int kSize = kChunkSize<Conversion>;
  const GatherCacheParams& p = gather.op;
  for (int first = lane; first < gather.chunks_per_token; first += kWarpSize * kChunksPerLane) {
    ElementVector<From, kSize> chunks[kChunksPerLane] = {};
#pragma unroll
    for (int i = 0; i < kChunksPerLane; ++i) {
      const int chunk = first + i * kWarpSize;
      if (chunk >= gather.chunks_per_token) continue;
      const ChunkPlace place = find_place<Conversion>(gather, chunk);
      chunks[i] = load_vector<From, kSize>(row.src + offset_in(p.cache_strides, place));
    }
#pragma unroll
    for (int i = 0; i < kChunksPerLane; ++i) {
      const int chunk = first + i * kWarpSize;
      if (chunk >= gather.chunks_per_token) continue;
      const ChunkPlace place = find_place<Conversion>(gather, chunk);
      const float scale = scale_of<Conversion>(p.scale, place.head);
      store_vector(convert_elements<Conversion, kSize>(chunks[i], scale),
                   row.dst + offset_in(p.out_strides, place));
    }
  }
}

template <class Conversion>
__device__ void copy_token(const Gather& gather, const TokenRow<Conversion>& row, int lane) {
  if (gather.has_vectors) {
    copy_vectors(gather, row, lane);
    return;
  }
  constexpr std::int64_t kSize = kChunkSize<Conversion>;
  const GatherCacheParams& p = gather.op;
  for (int chunk = lane; chunk < gather.chunks_per_token; chunk += kWarpSize) {
    const ChunkPlace place = find_place<Conversion>(gather, chunk);
    copy_elements<Conversion>(row.src + offset_in(p.cache_strides, place), p.cache_strides.dim,
                              row.dst + offset_in(p.out_strides, place), p.out_strides.dim,
                              static_cast<int>(min(p.head_size - place.dim, kSize)),
                              scale_of<Conversion>(p.scale, place.head));
  }
}

// Grid: (groups of kNumWarps rows of out).
template <class Conversion>
__global__ void __launch_bounds__(kNumWarps* kWarpSize)
    gather_cache_kernel(const __grid_constant__ Gather gather) {
  const GatherCacheParams& p = gather.op;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const std::int64_t row = std::int64_t{blockIdx.x} * kNumWarps + warp;
  if (row >= p.num_out_tokens) return;
  const std::int64_t offset = find_token(gather, row, lane);
  if (offset == kNotFound) return;
  const TokenRow<Conversion> token{
      .src = static_cast<const typename Conversion::From*>(p.cache) + offset,
      .dst = static_cast<typename Conversion::To*>(p.out) + row * p.out_token_stride};
  copy_token(gather, token, lane);
}

template <class Conversion>
void launch_gather(const GatherCacheParams& p, cudaStream_t stream) {
  constexpr int kSize = kChunkSize<Conversion>;
  const std::int64_t chunks_per_head = ceil_div(p.head_size, std::int64_t{kSize});
  const std::int64_t chunks_per_token = chunks_per_head * p.num_kv_heads;
  PAGED_KV_CHECK(chunks_per_token <= std::int64_t{1} << 30,
                 "cache: expected at most 2^30 chunks of ", kSize, " elements a token, got ",
                 chunks_per_token);
  const bool has_vectors =
      p.head_size % kSize == 0 &&
      allows_vectors<typename Conversion::From, kSize>(p.cache, p.cache_strides,
                                                       {p.block_stride, p.offset_stride}) &&
      allows_vectors<typename Conversion::To, kSize>(p.out, p.out_strides, {p.out_token_stride});
  const Gather gather{.op = p,
                      .slots = slots_of(p.num_blocks, p.block_size),
                      .chunks_per_head = static_cast<std::int32_t>(chunks_per_head),
                      .chunks_per_token = static_cast<std::int32_t>(chunks_per_token),
                      .has_vectors = has_vectors};
  const std::int64_t num_groups = ceil_div(p.num_out_tokens, std::int64_t{kNumWarps});
  const dim3 grid(static_cast<unsigned>(narrow<std::int32_t>(num_groups, "out: number of rows")));
  launch(&gather_cache_kernel<Conversion>, grid, kNumWarps * kWarpSize, 0, stream, gather);
}

// dispatch_conversion() names a converter by the dtype outside the cache first.
template <class T, class Quantised>
using DequantiseTo = Dequantise<Quantised, T>;

}  // namespace

void gather_cache(const GatherCacheParams& params, cudaStream_t stream) {
  if (params.num_out_tokens == 0 || params.num_kv_heads * params.head_size == 0) return;
  dispatch_conversion<DequantiseTo>(params.kv_cache_dtype, params.dtype, [&]<class Conversion>() {
    launch_gather<Conversion>(params, stream);
  });
}

}  // namespace paged_kv::cuda
