// SPDX-License-Identifier: Apache-2.0
#include "cuda/src/cache/elements.cuh"
#include "cuda/src/cache/slots.cuh"
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
constexpr std::int64_t kMaxChunksPerLaunch = std::int64_t{1} << 30;

// 16 bytes of the narrower 16- or 32-bit side; of fp8 8 bytes, for which 16-bit sources are 16.
template <class Conversion>
inline constexpr int kChunkSize =
    sizeof(typename Conversion::To) == 1 ? 8
                                         : static_cast<int>(16 / sizeof(typename Conversion::To));

// Chunks are counted in 32 bits, so a launch takes the tokens from first_token on.
struct FlashWrite {
  ReshapeAndCacheFlashParams op;
  Slots slots;
  std::int64_t first_token;
  std::int32_t num_chunks;
  std::int32_t chunks_per_head;
  std::int32_t chunks_per_token;
  bool has_vectors;
};

// Where one chunk comes from and goes to, keys and values alike.
struct ChunkPlace {
  std::int64_t token;
  SlotPlace slot;
  std::int64_t head;
  std::int64_t dim;
  bool is_skipped;
};

template <int kSize>
__device__ ChunkPlace find_place(const FlashWrite& write, int chunk) {
  ChunkPlace place{};
  place.is_skipped = true;
  if (chunk >= write.num_chunks) return place;
  place.token = write.first_token + chunk / write.chunks_per_token;
  const std::int64_t slot = write.op.slot_mapping[place.token];
  if (!has_slot(write.slots, slot)) return place;
  place.is_skipped = false;
  place.slot = place_of(write.slots, slot);
  const int chunk_of_token = chunk % write.chunks_per_token;
  place.head = chunk_of_token / write.chunks_per_head;
  place.dim = std::int64_t{chunk_of_token % write.chunks_per_head} * kSize;
  return place;
}

template <class T>
__device__ const T* source_of(const NewTokens& tokens, const ChunkPlace& place) {
  return static_cast<const T*>(tokens.data) + place.token * tokens.token_stride +
         place.head * tokens.strides.head + place.dim * tokens.strides.dim;
}

template <class T>
__device__ T* destination_of(const FlashCache& cache, const ChunkPlace& place) {
  return static_cast<T*>(cache.data) + place.slot.block * cache.block_stride +
         place.slot.offset * cache.offset_stride + place.head * cache.strides.head +
         place.dim * cache.strides.dim;
}

template <class Conversion>
__device__ void write_elements(const FlashWrite& write, const NewTokens& tokens,
                               const FlashCache& cache, const KvScale& scale,
                               const ChunkPlace& place) {
  constexpr std::int64_t kSize = kChunkSize<Conversion>;
  copy_elements<Conversion>(source_of<typename Conversion::From>(tokens, place), tokens.strides.dim,
                            destination_of<typename Conversion::To>(cache, place),
                            cache.strides.dim,
                            static_cast<int>(min(write.op.head_size - place.dim, kSize)),
                            scale_of<Conversion>(scale, place.head));
}

template <class Conversion>
__device__ void write_vectors(const FlashWrite& write,
                              const ChunkPlace (&places)[kChunksPerThread]) {
  using From = typename Conversion::From;
  using To = typename Conversion::To;
  constexpr int kSize = kChunkSize<Conversion>;
  const ReshapeAndCacheFlashParams& p = write.op;
  ElementVector<From, kSize> keys[kChunksPerThread];
  ElementVector<From, kSize> values[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    if (places[i].is_skipped) continue;
    keys[i] = load_vector<From, kSize>(source_of<From>(p.key, places[i]));
    values[i] = load_vector<From, kSize>(source_of<From>(p.value, places[i]));
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    if (places[i].is_skipped) continue;
    const float k_scale = scale_of<Conversion>(p.k_scale, places[i].head);
    const float v_scale = scale_of<Conversion>(p.v_scale, places[i].head);
    store_vector(convert_elements<Conversion, kSize>(keys[i], k_scale),
                 destination_of<To>(p.key_cache, places[i]));
    store_vector(convert_elements<Conversion, kSize>(values[i], v_scale),
                 destination_of<To>(p.value_cache, places[i]));
  }
}

// Grid: (pieces of kChunksPerBlock chunks, wherever tokens begin and end).
template <class Conversion>
__global__ void __launch_bounds__(kNumThreads)
    reshape_and_cache_flash_kernel(const __grid_constant__ FlashWrite write) {
  const int first_chunk = static_cast<int>(blockIdx.x * kChunksPerBlock + threadIdx.x);
  ChunkPlace places[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    places[i] = find_place<kChunkSize<Conversion>>(write, first_chunk + i * kNumThreads);
  }
  if (write.has_vectors) {
    write_vectors<Conversion>(write, places);
    return;
  }
  const ReshapeAndCacheFlashParams& p = write.op;
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    if (places[i].is_skipped) continue;
    write_elements<Conversion>(write, p.key, p.key_cache, p.k_scale, places[i]);
    write_elements<Conversion>(write, p.value, p.value_cache, p.v_scale, places[i]);
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
  PAGED_KV_CHECK(chunks_per_token <= kMaxChunksPerLaunch, "key: expected at most ",
                 kMaxChunksPerLaunch, " chunks of ", kSize, " elements a token, got ",
                 chunks_per_token);
  const std::int64_t tokens_per_launch = kMaxChunksPerLaunch / chunks_per_token;
  FlashWrite write{.op = p,
                   .slots = slots_of(p.num_blocks, p.block_size),
                   .first_token = 0,
                   .num_chunks = 0,
                   .chunks_per_head = static_cast<std::int32_t>(chunks_per_head),
                   .chunks_per_token = static_cast<std::int32_t>(chunks_per_token),
                   .has_vectors = p.head_size % kSize == 0 &&
                                  allows_vectors_of<Conversion>(p.key, p.key_cache) &&
                                  allows_vectors_of<Conversion>(p.value, p.value_cache)};
  const std::int64_t num_tokens = p.slot_mapping.size;
  for (; write.first_token < num_tokens; write.first_token += tokens_per_launch) {
    const std::int64_t count = std::min(tokens_per_launch, num_tokens - write.first_token);
    write.num_chunks = static_cast<std::int32_t>(count * chunks_per_token);
    const dim3 grid(static_cast<unsigned>(ceil_div(write.num_chunks, kChunksPerBlock)));
    launch(&reshape_and_cache_flash_kernel<Conversion>, grid, kNumThreads, 0, stream, write);
  }
}

}  // namespace

void reshape_and_cache_flash(const ReshapeAndCacheFlashParams& params, cudaStream_t stream) {
  if (params.slot_mapping.size == 0 || params.num_kv_heads * params.head_size == 0) return;
  dispatch_conversion<Quantise>(params.kv_cache_dtype, params.dtype, [&]<class Conversion>() {
    launch_writer<Conversion>(params, stream);
  });
}

}  // namespace paged_kv::cuda
