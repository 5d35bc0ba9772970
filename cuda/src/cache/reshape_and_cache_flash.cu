// SPDX-License-Identifier: Apache-2.0
#include "cuda/src/cache/elements.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/reshape_and_cache.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 128;
// Of keys and of values: four loads of 16 bytes are on their way before the first store.
constexpr int kChunksPerThread = 2;
constexpr int kChunksPerBlock = kNumThreads * kChunksPerThread;

// 16 bytes of the narrower 16- or 32-bit side; of fp8 8 bytes, for which 16-bit sources are 16.
template <class Conversion>
inline constexpr int kChunkSize =
    sizeof(typename Conversion::To) == 1 ? 8
                                         : static_cast<int>(16 / sizeof(typename Conversion::To));

struct FlashWrite {
  ReshapeAndCacheFlashParams op;
  std::int32_t chunks_per_head;
  std::int32_t chunks_per_token;
  bool has_vectors;
};

// Where one chunk comes from and goes to, keys and values alike.
struct ChunkPlace {
  std::int64_t token;
  std::int64_t block;
  std::int64_t offset;  // of the token inside its block
  std::int64_t head;
  std::int64_t dim;
  bool is_skipped;
};

// Chunk number `chunk`, counted from the first chunk of token `first_token`.
template <int kSize>
__device__ ChunkPlace find_place(const FlashWrite& write, std::int64_t first_token, int chunk) {
  const ReshapeAndCacheFlashParams& p = write.op;
  ChunkPlace place{};
  place.token = first_token + chunk / write.chunks_per_token;
  place.is_skipped = true;
  if (place.token >= p.slot_mapping.size) return place;
  const std::int64_t slot = p.slot_mapping[place.token];
  if (slot < 0 || slot >= p.num_blocks * p.block_size) return place;
  place.is_skipped = false;
  place.block = slot / p.block_size;
  place.offset = slot % p.block_size;
  const int chunk_of_token = chunk % write.chunks_per_token;
  place.head = chunk_of_token / write.chunks_per_head;
  place.dim = std::int64_t{chunk_of_token % write.chunks_per_head} * kSize;
  return place;
}

template <class T, int kSize>
__device__ ElementVector<T, kSize> load_chunk(const NewTokens& tokens, const ChunkPlace& place,
                                              int count, bool is_vector) {
  const T* src = static_cast<const T*>(tokens.data) + place.token * tokens.token_stride +
                 place.head * tokens.strides.head + place.dim * tokens.strides.dim;
  return load_elements<T, kSize>(src, tokens.strides.dim, count, is_vector);
}

template <class T, int kSize>
__device__ void store_chunk(const ElementVector<T, kSize>& chunk, const FlashCache& cache,
                            const ChunkPlace& place, int count, bool is_vector) {
  T* dst = static_cast<T*>(cache.data) + place.block * cache.block_stride +
           place.offset * cache.offset_stride + place.head * cache.strides.head +
           place.dim * cache.strides.dim;
  store_elements(chunk, dst, cache.strides.dim, count, is_vector);
}

// Grid: (pieces of kChunksPerBlock chunks of the batch, wherever tokens begin and end).
template <class Conversion>
__global__ void __launch_bounds__(kNumThreads)
    reshape_and_cache_flash_kernel(const __grid_constant__ FlashWrite write) {
  using From = typename Conversion::From;
  constexpr int kSize = kChunkSize<Conversion>;
  const ReshapeAndCacheFlashParams& p = write.op;
  // One 64-bit division a block; what follows counts chunks from first_token on, in 32 bits.
  const std::int64_t first_chunk = std::int64_t{blockIdx.x} * kChunksPerBlock;
  const std::int64_t first_token = first_chunk / write.chunks_per_token;
  const int thread_chunk = static_cast<int>(first_chunk % write.chunks_per_token + threadIdx.x);

  ChunkPlace places[kChunksPerThread];
  int counts[kChunksPerThread];
  ElementVector<From, kSize> keys[kChunksPerThread];
  ElementVector<From, kSize> values[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    places[i] = find_place<kSize>(write, first_token, thread_chunk + i * kNumThreads);
    counts[i] = static_cast<int>(min(p.head_size - places[i].dim, std::int64_t{kSize}));
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    if (places[i].is_skipped) continue;
    keys[i] = load_chunk<From, kSize>(p.key, places[i], counts[i], write.has_vectors);
    values[i] = load_chunk<From, kSize>(p.value, places[i], counts[i], write.has_vectors);
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    if (places[i].is_skipped) continue;
    const float k_scale = scale_of<Conversion>(p.k_scale, places[i].head);
    const float v_scale = scale_of<Conversion>(p.v_scale, places[i].head);
    store_chunk(convert_elements<Conversion, kSize>(keys[i], k_scale), p.key_cache, places[i],
                counts[i], write.has_vectors);
    store_chunk(convert_elements<Conversion, kSize>(values[i], v_scale), p.value_cache, places[i],
                counts[i], write.has_vectors);
  }
}

template <class Conversion>
bool allows_vectors_of(const NewTokens& tokens, const FlashCache& cache) {
  constexpr int kSize = kChunkSize<Conversion>;
  return allows_vectors<typename Conversion::From, kSize>(tokens.data, tokens.strides,
                                                          {tokens.token_stride}) &&
         allows_vectors<typename Conversion::To, kSize>(cache.data, cache.strides,
                                                        {cache.block_stride, cache.offset_stride});
}

template <class Conversion>
void launch_writer(const ReshapeAndCacheFlashParams& p, cudaStream_t stream) {
  constexpr int kSize = kChunkSize<Conversion>;
  const std::int64_t chunks_per_head = ceil_div(p.head_size, std::int64_t{kSize});
  const std::int64_t chunks_per_token = chunks_per_head * p.num_kv_heads;
  // Leaves room for the chunks of one block of threads.
  PAGED_KV_CHECK(chunks_per_token <= std::int64_t{1} << 30, "key: expected at most 2^30 chunks of ",
                 kSize, " elements a token, got ", chunks_per_token);
  const FlashWrite write{.op = p,
                         .chunks_per_head = static_cast<std::int32_t>(chunks_per_head),
                         .chunks_per_token = static_cast<std::int32_t>(chunks_per_token),
                         .has_vectors = p.head_size % kSize == 0 &&
                                        allows_vectors_of<Conversion>(p.key, p.key_cache) &&
                                        allows_vectors_of<Conversion>(p.value, p.value_cache)};
  const std::int64_t num_blocks =
      ceil_div(p.slot_mapping.size * chunks_per_token, std::int64_t{kChunksPerBlock});
  const dim3 grid(
      static_cast<unsigned>(narrow<std::int32_t>(num_blocks, "number of thread blocks")));
  launch(&reshape_and_cache_flash_kernel<Conversion>, grid, kNumThreads, 0, stream, write);
}

}  // namespace

void reshape_and_cache_flash(const ReshapeAndCacheFlashParams& params, cudaStream_t stream) {
  if (params.slot_mapping.size == 0 || params.num_kv_heads * params.head_size == 0) return;
  dispatch_conversion<Quantise>(params.kv_cache_dtype, params.dtype, [&]<class Conversion>() {
    launch_writer<Conversion>(params, stream);
  });
}

}  // namespace paged_kv::cuda
