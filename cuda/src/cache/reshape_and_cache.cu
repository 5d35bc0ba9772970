// SPDX-License-Identifier: Apache-2.0
//
// A warp moves a tile of 8 tokens x 4 chunks; a chunk is x dims, 16 bytes of the key cache. Lanes:
// token = lane % 8, chunk = lane / 8. Keys of 8 consecutive slots are 128 bytes in a row. Values
// lie transposed in the cache, one row a dim: 8 consecutive slots are turned around in shared
// memory and stored as pieces of rows; other slots element by element.
#include "cuda/src/cache/elements.cuh"
#include "cuda/src/cache/slots.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/reduce.cuh"
#include "paged_kv/cuda/reshape_and_cache.h"
#include "paged_kv/cuda/shared.cuh"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstdint>

namespace paged_kv::cuda {
namespace {

constexpr int kNumWarps = 4;
constexpr int kWarpSize = 32;
constexpr int kTileTokens = 8;
constexpr int kTileChunks = kWarpSize / kTileTokens;
constexpr std::int64_t kMaxGridY = 65535;

template <class T>
inline constexpr int kX = static_cast<int>(16 / sizeof(T));

struct PackedWrite {
  ReshapeAndCacheParams op;
  Slots slots;
  std::int32_t chunks_per_head;
  std::int32_t num_chunks;  // of a token
  bool has_key_vectors;     // source
  bool has_value_vectors;
  bool has_key_cache_vectors;
  bool has_value_rows;  // pieces of kTileTokens elements of a row may be stored as vectors
};

// A warp's tile of values, transposed: of each chunk x dims of 8 tokens, 128 bytes. A dim's tokens
// are one vector, or two if T is 4 bytes wide.
template <class T>
struct ValueTile {
  static constexpr int kPieceTokens = std::min<int>(kTileTokens, static_cast<int>(16 / sizeof(T)));
  static constexpr int kPiecesPerDim = kTileTokens / kPieceTokens;
  static constexpr int kNumPieces = kTileChunks * kX<T> * kPiecesPerDim;
  using Piece = ElementVector<T, kPieceTokens>;

  struct Chunk {
    Piece pieces[kX<T>][kPiecesPerDim];
    unsigned char padding[16];  // else the lanes of all four chunks would write to the same banks
  };
  Chunk chunks[kTileChunks];
};

template <class T>
struct SharedTiles {
  ValueTile<T> of_warp[kNumWarps];
};

// The tiles cut the tokens so that one which starts a piece of 8 slots (from a multiple of 8 of its
// block on) also starts a tile, as long as slots run on: tile i > 0 begins within the 8 tokens from
// 8 * (i - 1) on, at the first that would start a piece if the slots ran on from there. A tile
// holds up to 15 tokens.
[[nodiscard]] __device__ std::int64_t first_token_of(const PackedWrite& write, std::int64_t tile) {
  const VectorView<const std::int64_t>& slot_mapping = write.op.slot_mapping;
  if (tile == 0) return 0;
  const std::int64_t token = (tile - 1) * kTileTokens;
  if (token >= slot_mapping.size) return slot_mapping.size;
  const std::int64_t slot = slot_mapping[token];
  if (!has_slot(write.slots, slot)) return token;
  const std::int64_t past_piece = place_of(write.slots, slot).offset % kTileTokens;
  const std::int64_t shift = past_piece == 0 ? 0 : kTileTokens - past_piece;
  return min(token + shift, slot_mapping.size);
}

// What a lane moves, or nothing.
struct Lane {
  std::int64_t token;
  SlotPlace slot;
  int tile_token;  // 0 .. 7
  int chunk;       // of the token, over all heads
  int head;
  int head_chunk;  // chunk of the head
  bool is_active;
};

template <class T>
__device__ void store_key(const PackedWrite& write, const Lane& lane,
                          const ElementVector<T, kX<T>>& chunk) {
  const PackedKeyCache& cache = write.op.key_cache;
  T* dst = static_cast<T*>(cache.data) + lane.slot.block * cache.block_stride +
           lane.head * cache.head_stride + lane.head_chunk * cache.chunk_stride +
           lane.slot.offset * cache.offset_stride;
  if (write.has_key_cache_vectors) {
    store_vector(chunk, dst);
  } else {
    store_elements(chunk, dst, cache.lane_stride);
  }
}

// Element by element: one dim of the chunk after the other.
template <class T>
__device__ void store_value(const PackedWrite& write, const Lane& lane,
                            const ElementVector<T, kX<T>>& chunk) {
  const PackedValueCache& cache = write.op.value_cache;
  T* dst = static_cast<T*>(cache.data) + lane.slot.block * cache.block_stride +
           lane.head * cache.head_stride +
           std::int64_t{lane.head_chunk} * kX<T> * cache.dim_stride +
           lane.slot.offset * cache.offset_stride;
  store_elements(chunk, dst, cache.dim_stride);
}

// The whole warp: tile_token 0 is at a multiple of 8 of its block, the other 7 follow it, and the
// tokens of a block lie next to each other.
template <class T>
__device__ void store_value_rows(const PackedWrite& write, const Lane& lane, int first_chunk,
                                 const ElementVector<T, kX<T>>& chunk, ValueTile<T>& tile) {
  using Tile = ValueTile<T>;
  const PackedValueCache& cache = write.op.value_cache;
  const int thread = static_cast<int>(threadIdx.x) % kWarpSize;
  typename Tile::Chunk& own = tile.chunks[thread / kTileTokens];
#pragma unroll
  for (int dim = 0; dim < kX<T>; ++dim) {
    auto& piece = own.pieces[dim][lane.tile_token / Tile::kPieceTokens];
    piece.values[lane.tile_token % Tile::kPieceTokens] = chunk.values[dim];
  }
  __syncwarp();
  T* block = static_cast<T*>(cache.data) + lane.slot.block * cache.block_stride + lane.slot.offset -
             lane.tile_token;
#pragma unroll
  for (int i = thread; i < Tile::kNumPieces; i += kWarpSize) {
    const int piece = i % Tile::kPiecesPerDim;
    const int dim = i / Tile::kPiecesPerDim % kX<T>;
    const int tile_chunk = i / Tile::kPiecesPerDim / kX<T>;
    const int token_chunk = first_chunk + tile_chunk;
    if (token_chunk >= write.num_chunks) break;
    const std::int64_t head = token_chunk / write.chunks_per_head;
    const std::int64_t head_dim = token_chunk % write.chunks_per_head * kX<T> + dim;
    T* dst =
        block + head * cache.head_stride + head_dim * cache.dim_stride + piece * Tile::kPieceTokens;
    *reinterpret_cast<typename Tile::Piece*>(dst) = tile.chunks[tile_chunk].pieces[dim][piece];
  }
  __syncwarp();  // the tile is used again
}

template <class Conversion>
__device__ ElementVector<typename Conversion::To, kX<typename Conversion::To>> load_and_convert(
    const NewTokens& tokens, const KvScale& scale, const Lane& lane, bool is_vector) {
  using From = typename Conversion::From;
  constexpr int kSize = kX<typename Conversion::To>;
  const From* src = static_cast<const From*>(tokens.data) + lane.token * tokens.token_stride +
                    lane.head * tokens.strides.head +
                    std::int64_t{lane.head_chunk} * kSize * tokens.strides.dim;
  const auto elements = is_vector ? load_vector<From, kSize>(src)
                                  : load_elements<From, kSize>(src, tokens.strides.dim);
  return convert_elements<Conversion, kSize>(elements, scale_of<Conversion>(scale, lane.head));
}

// Up to 8 tokens from first_token on, 4 chunks from first_chunk on.
template <class Conversion>
__device__ void write_tile(const PackedWrite& write, std::int64_t first_token,
                           std::int64_t end_token, int first_chunk,
                           ValueTile<typename Conversion::To>& tile) {
  using To = typename Conversion::To;
  const ReshapeAndCacheParams& p = write.op;
  const int thread = static_cast<int>(threadIdx.x) % kWarpSize;
  Lane lane{};
  lane.tile_token = thread % kTileTokens;
  lane.token = first_token + lane.tile_token;
  lane.chunk = first_chunk + thread / kTileTokens;
  lane.head = lane.chunk / write.chunks_per_head;
  lane.head_chunk = lane.chunk % write.chunks_per_head;
  const std::int64_t slot = lane.token < end_token ? p.slot_mapping[lane.token] : -1;
  const bool is_token = has_slot(write.slots, slot);
  if (is_token) lane.slot = place_of(write.slots, slot);
  lane.is_active = is_token && lane.chunk < write.num_chunks;

  const std::int64_t first_slot = __shfl_sync(kFullWarp, slot, 0);
  const bool follows = is_token && slot - lane.tile_token == first_slot &&
                       lane.slot.offset % kTileTokens == lane.tile_token;
  const bool is_run = write.has_value_rows && __all_sync(kFullWarp, follows) != 0;

  ElementVector<To, kX<To>> value{};
  if (lane.is_active) {
    const auto key = load_and_convert<Conversion>(p.key, p.k_scale, lane, write.has_key_vectors);
    value = load_and_convert<Conversion>(p.value, p.v_scale, lane, write.has_value_vectors);
    store_key(write, lane, key);
    if (!is_run) store_value(write, lane, value);
  }
  if (is_run) store_value_rows(write, lane, first_chunk, value, tile);
}

// Grid: (tiles, groups of kNumWarps * kTileChunks chunks; the last ones again and again).
template <class Conversion>
__global__ void __launch_bounds__(kNumWarps* kWarpSize)
    reshape_and_cache_kernel(const __grid_constant__ PackedWrite write) {
  using To = typename Conversion::To;
  const std::int64_t first_token = first_token_of(write, blockIdx.x);
  const std::int64_t end_token = first_token_of(write, std::int64_t{blockIdx.x} + 1);
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  ValueTile<To>& tile = static_shared<SharedTiles<To>>().of_warp[warp];
  const std::int64_t first_group = std::int64_t{blockIdx.y} * kNumWarps + warp;
  const std::int64_t group_step = std::int64_t{gridDim.y} * kNumWarps;
  for (std::int64_t group = first_group; group * kTileChunks < write.num_chunks;
       group += group_step) {
    const int first_chunk = static_cast<int>(group * kTileChunks);
    for (std::int64_t token = first_token; token < end_token; token += kTileTokens) {
      write_tile<Conversion>(write, token, end_token, first_chunk, tile);
    }
  }
}

template <class T, int kSize>
bool allows_vectors_of(const NewTokens& tokens) {
  return allows_vectors<T, kSize>(tokens.data, tokens.strides, {tokens.token_stride});
}

template <class T>
bool allows_vectors_of(const PackedKeyCache& cache) {
  return cache.lane_stride == 1 &&
         allows_vectors<T, kX<T>>(cache.data, {cache.block_stride, cache.head_stride,
                                               cache.chunk_stride, cache.offset_stride});
}

template <class T>
bool allows_rows_of(const PackedValueCache& cache) {
  return cache.offset_stride == 1 &&
         allows_vectors<T, kTileTokens>(cache.data,
                                        {cache.block_stride, cache.head_stride, cache.dim_stride});
}

template <class Conversion>
void launch_writer(const ReshapeAndCacheParams& p, cudaStream_t stream) {
  using From = typename Conversion::From;
  using To = typename Conversion::To;
  constexpr int kSize = kX<To>;
  const std::int64_t chunks_per_head = p.head_size / kSize;
  const std::int64_t num_chunks = chunks_per_head * p.num_kv_heads;
  PAGED_KV_CHECK(num_chunks <= std::int64_t{1} << 30, "key: expected at most 2^30 chunks of ",
                 kSize, " elements a token, got ", num_chunks);
  const PackedWrite write{.op = p,
                          .slots = slots_of(p.num_blocks, p.block_size),
                          .chunks_per_head = static_cast<std::int32_t>(chunks_per_head),
                          .num_chunks = static_cast<std::int32_t>(num_chunks),
                          .has_key_vectors = allows_vectors_of<From, kSize>(p.key),
                          .has_value_vectors = allows_vectors_of<From, kSize>(p.value),
                          .has_key_cache_vectors = allows_vectors_of<To>(p.key_cache),
                          .has_value_rows = allows_rows_of<To>(p.value_cache)};
  const std::int64_t num_tiles = ceil_div(p.slot_mapping.size, std::int64_t{kTileTokens}) + 1;
  const std::int64_t num_groups = ceil_div(num_chunks, std::int64_t{kNumWarps * kTileChunks});
  const dim3 grid(static_cast<unsigned>(narrow<std::int32_t>(num_tiles, "number of tiles")),
                  static_cast<unsigned>(std::min(num_groups, kMaxGridY)));
  launch(&reshape_and_cache_kernel<Conversion>, grid, kNumWarps * kWarpSize, 0, stream, write);
}

}  // namespace

void reshape_and_cache(const ReshapeAndCacheParams& params, cudaStream_t stream) {
  if (params.slot_mapping.size == 0 || params.num_kv_heads * params.head_size == 0) return;
  dispatch_conversion<Quantise>(params.kv_cache_dtype, params.dtype, [&]<class Conversion>() {
    launch_writer<Conversion>(params, stream);
  });
}

}  // namespace paged_kv::cuda
