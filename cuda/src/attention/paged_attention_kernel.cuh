// SPDX-License-Identifier: Apache-2.0
//
// The kernel of paged_attention_v1 and of the partitions of v2. A block of threads has one query
// (head, sequence) and one partition of its keys.
//
//   keys    a warp takes tiles of 32 tokens, one a lane, warp after warp. A lane reads its whole
//           key in 16-byte chunks: neighbours' chunks of one block of the cache are adjacent. The
//           tokens of a tile may lie in several blocks, so any multiple of 8 tokens a block works.
//   softmax of the logits in shared memory, by all threads
//   values  tiles as before. Four lanes share a row of values (one dimension), 8 tokens each, so a
//           warp reads 8 adjacent rows at once. Each lane sums its tokens; the sums of lanes and
//           then of warps are added at the end.
#pragma once

#include "cuda/src/attention/paged_attention_launch.cuh"
#include "paged_kv/cuda/division.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/paged_attention_config.h"
#include "paged_kv/cuda/reduce.cuh"
#include "paged_kv/cuda/shared.cuh"
#include "paged_kv/cuda/vector.cuh"

#include <cstdint>
#include <type_traits>
#include <utility>

namespace paged_kv::cuda {

template <int kHeadSize>
struct PagedAttentionShared {
  alignas(16) float query[kHeadSize];
  float output[kNumAttentionWarps][kHeadSize];  // of each warp's tokens
  float warp_max[kNumAttentionWarps];
  float warp_sum[kNumAttentionWarps];
};

// The query of a block of threads and its keys [begin, end).
struct AttentionRow {
  std::int64_t seq;
  std::int64_t head;
  std::int64_t kv_head;
  std::int32_t seq_len;
  std::int32_t begin;
  std::int32_t end;
  // Of the block-sparse pattern, if there is one.
  std::int32_t sparse_block_size;
  std::uint32_t sparse_start;  // offset() modulo vert_stride
  std::int64_t last_non_local_block;
};

inline constexpr std::int32_t kHiddenBlock = -1;

// What BlockSparsity::visible() says, without a 64-bit division. vert_stride is below 2^31.
__device__ __forceinline__ bool is_visible(const BlockSparsity& sparsity, const AttentionRow& row,
                                           std::int32_t token) {
  const std::int32_t key_block = token / row.sparse_block_size;
  return key_block > row.last_non_local_block ||
         (static_cast<std::uint32_t>(key_block) + row.sparse_start) %
                 static_cast<std::uint32_t>(sparsity.vert_stride) ==
             0;
}

// The block of the cache that has `token`; kHiddenBlock if the row may not see it.
__device__ __forceinline__ std::int32_t visible_block(const PagedAttentionParams& p,
                                                      const AttentionRow& row, std::int32_t token) {
  if (p.sparsity.enabled() && !is_visible(p.sparsity, row, token)) return kHiddenBlock;
  const std::int32_t block = p.block_tables(row.seq, token / p.block_size);
  return block >= 0 && block < p.num_blocks ? block : kHiddenBlock;
}

template <Element CacheT, int kHeadSize>
__device__ __forceinline__ float dot(const float* query, const CacheT* key,
                                     std::int64_t chunk_stride) {
  constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(CacheT));
  float sum = 0.0f;
#pragma unroll 4
  for (int d = 0; d < kHeadSize; d += kChunk) {
    float elements[kChunk];
    Vector<CacheT, kChunk>::load(key).to_floats(elements);
    key += chunk_stride;
    float chunk_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) chunk_sum += query[d + i] * elements[i];
    sum += chunk_sum;
  }
  return sum;
}

// Writes the logits of this warp's tiles, -inf for what is not visible; returns the lane's largest.
template <Element CacheT, int kHeadSize>
__device__ __forceinline__ float compute_logits(const PagedAttentionParams& p,
                                                const AttentionRow& row, const float* query,
                                                float* logits, int warp, int lane) {
  const auto* keys = static_cast<const CacheT*>(p.key_cache) + row.kv_head * p.key_head_stride;
  const float scale = Float8<CacheT> ? p.scale * p.k_scale[row.kv_head] : p.scale;
  const float slope = p.alibi_slopes.data == nullptr ? 0.0f : p.alibi_slopes[row.head];
  float max_logit = -INFINITY;
  for (int first = warp * kTileTokens; row.begin + first < row.end;
       first += kNumAttentionWarps * kTileTokens) {
    const std::int32_t token = row.begin + first + lane;
    const std::int32_t block = token < row.end ? visible_block(p, row, token) : kHiddenBlock;
    float logit = -INFINITY;
    if (block != kHiddenBlock) {
      const CacheT* key =
          keys + block * p.key_block_stride + token % p.block_size * p.key_token_stride;
      logit = scale * dot<CacheT, kHeadSize>(query, key, p.key_chunk_stride) +
              slope * static_cast<float>(token - (row.seq_len - 1));
    }
    logits[first + lane] = logit;
    max_logit = fmaxf(max_logit, logit);
  }
  return max_logit;
}

// Adds 8 tokens of values, times their weights, to the sums of rows 0, 8, 16, ... from `values` on.
// Of a partial vector only the first `num_valid` tokens are real; the others may be NaN.
template <bool kIsPartial, Element CacheT, int kNumRows>
__device__ __forceinline__ void add_values(float (&sums)[kNumRows], const CacheT* values,
                                           std::int64_t row_stride, const float* weights,
                                           int num_valid) {
  float weight[kVectorTokens];
#pragma unroll
  for (int i = 0; i < kVectorTokens; ++i) weight[i] = weights[i];
#pragma unroll
  for (int r = 0; r < kNumRows; ++r) {
    auto vector = Vector<CacheT, kVectorTokens>::load(values + r * row_stride);
    if constexpr (kIsPartial) vector.clear_from(num_valid);
    float elements[kVectorTokens];
    vector.to_floats(elements);
#pragma unroll
    for (int i = 0; i < kVectorTokens; ++i) sums[r] += weight[i] * elements[i];
  }
}

// The weighted sum of the values of this warp's tiles, into output[kHeadSize].
template <Element CacheT, int kHeadSize>
__device__ __forceinline__ void sum_values(const PagedAttentionParams& p, const AttentionRow& row,
                                           const float* weights, float* output, int warp,
                                           int lane) {
  constexpr int kVectorsPerTile = kTileTokens / kVectorTokens;
  constexpr int kRowsAtOnce = 32 / kVectorsPerTile;
  static_assert(kHeadSize % kRowsAtOnce == 0);
  const int vector = lane % kVectorsPerTile;
  const int first_row = lane / kVectorsPerTile;
  const auto* values = static_cast<const CacheT*>(p.value_cache) +
                       row.kv_head * p.value_head_stride + first_row * p.value_dim_stride;
  float sums[kHeadSize / kRowsAtOnce] = {};
  for (int first = warp * kTileTokens; row.begin + first < row.end;
       first += kNumAttentionWarps * kTileTokens) {
    const int index = first + vector * kVectorTokens;
    const std::int32_t token = row.begin + index;
    const std::int32_t block = token < row.end ? visible_block(p, row, token) : kHiddenBlock;
    if (block == kHiddenBlock) continue;
    const CacheT* source = values + block * p.value_block_stride + token % p.block_size;
    const std::int64_t row_stride = kRowsAtOnce * p.value_dim_stride;
    if (row.end - token >= kVectorTokens) {
      add_values<false>(sums, source, row_stride, weights + index, kVectorTokens);
    } else {
      add_values<true>(sums, source, row_stride, weights + index, row.end - token);
    }
  }
#pragma unroll
  for (int r = 0; r < kHeadSize / kRowsAtOnce; ++r) {
    const float sum = warp_sum<kVectorsPerTile>(sums[r]);
    if (vector == 0) output[r * kRowsAtOnce + first_row] = sum;
  }
}

// Grid: (num_heads, num_seqs, num_partitions). Dynamic shared memory: logits_bytes().
template <Element T, Element CacheT, int kHeadSize>
__global__ void __launch_bounds__(kNumAttentionWarps * 32)
    paged_attention_kernel(const __grid_constant__ PagedAttentionParams p,
                           const __grid_constant__ Partitions partitions) {
  constexpr int kNumThreads = kNumAttentionWarps * 32;
  using Shared = PagedAttentionShared<kHeadSize>;
  static_assert(sizeof(Shared) <= static_shared_bytes(kHeadSize));
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  const int warp = thread / 32;
  const auto partition = static_cast<std::int32_t>(blockIdx.z);

  AttentionRow row{};
  row.head = blockIdx.x;
  row.seq = blockIdx.y;
  row.seq_len = usable_seq_len(p, row.seq);
  row.begin = partition * partitions.num_tokens;
  if (row.begin >= row.seq_len && !partitions.is_v1()) return;
  row.end = min(row.begin + partitions.num_tokens, row.seq_len);
  row.kv_head = static_cast<std::int32_t>(row.head) / (p.num_heads / p.num_kv_heads);
  if (p.sparsity.enabled()) {
    const std::int64_t offset =
        p.sparsity.offset(row.head, p.num_heads, row.kv_head, p.num_kv_heads);
    row.sparse_start = static_cast<std::uint32_t>(divide(offset, p.sparsity.vert_stride).remainder);
    // No token is further than that, so its pattern block is 0 either way.
    constexpr std::int64_t kMaxTokens = 0x7fffffff;
    row.sparse_block_size = static_cast<std::int32_t>(min(p.sparsity.block_size, kMaxTokens));
    row.last_non_local_block = (row.seq_len - 1) / row.sparse_block_size - p.sparsity.local_blocks;
  }

  Shared& shared = static_shared<Shared>();
  float* logits = dynamic_shared<float>();
  const T* query = static_cast<const T*>(p.query) + row.seq * p.query_seq_stride +
                   row.head * p.query_head_stride;
  for (int d = thread; d < kHeadSize; d += kNumThreads) shared.query[d] = to_float(query[d]);
  __syncthreads();

  const float lane_max =
      compute_logits<CacheT, kHeadSize>(p, row, shared.query, logits, warp, lane);
  const float warp_max_logit = warp_max(lane_max);
  if (lane == 0) shared.warp_max[warp] = warp_max_logit;
  __syncthreads();

  float max_logit = shared.warp_max[0];
#pragma unroll
  for (int w = 1; w < kNumAttentionWarps; ++w) max_logit = fmaxf(max_logit, shared.warp_max[w]);
  // Of logits that are all -inf or NaN the former must give 0, the latter NaN.
  const float subtracted = max_logit == -INFINITY ? 0.0f : max_logit;
  float lane_sum = 0.0f;
  const int num_logits = round_up(max(row.end - row.begin, 0), kTileTokens);
  for (int i = thread; i < num_logits; i += kNumThreads) {
    const float weight = __expf(logits[i] - subtracted);
    logits[i] = weight;
    lane_sum += weight;
  }
  const float warp_exp_sum = warp_sum(lane_sum);
  if (lane == 0) shared.warp_sum[warp] = warp_exp_sum;
  __syncthreads();

  float exp_sum = 0.0f;
#pragma unroll
  for (int w = 0; w < kNumAttentionWarps; ++w) exp_sum += shared.warp_sum[w];
  sum_values<CacheT, kHeadSize>(p, row, logits, shared.output[warp], warp, lane);
  __syncthreads();

  const PartitionBuffers<void>& buffers = partitions.buffers;
  T* out = partitions.is_v1()
               ? static_cast<T*>(p.out) + row.seq * p.out_seq_stride + row.head * p.out_head_stride
               : static_cast<T*>(buffers.tmp_out) + row.seq * buffers.tmp_out_seq_stride +
                     row.head * buffers.tmp_out_head_stride +
                     partition * buffers.tmp_out_partition_stride;
  const float v_scale = Float8<CacheT> ? p.v_scale[row.kv_head] : 1.0f;
  for (int d = thread; d < kHeadSize; d += kNumThreads) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kNumAttentionWarps; ++w) sum += shared.output[w][d];
    out[d] = from_float<T>(exp_sum == 0.0f ? 0.0f : v_scale * sum / exp_sum);
  }
  if (partitions.is_v1() || thread != 0) return;
  buffers.exp_sums[row.seq * buffers.exp_sums_seq_stride + row.head * buffers.exp_sums_head_stride +
                   partition * buffers.exp_sums_partition_stride] = exp_sum;
  // -inf means no visible key, so it may not stand for logits of NaN.
  buffers.max_logits[row.seq * buffers.max_logits_seq_stride +
                     row.head * buffers.max_logits_head_stride +
                     partition * buffers.max_logits_partition_stride] =
      max_logit == -INFINITY && exp_sum != 0.0f ? exp_sum : max_logit;
}

// Calls f<kHeadSize>() for the one of kHeadSizes that `head_size` is.
template <Element CacheT, class F>
void dispatch_head_size(std::int32_t head_size, F&& f) {
  const auto try_size = [&]<std::size_t kIndex>() {
    constexpr auto kHeadSize = static_cast<int>(kHeadSizes[kIndex]);
    if constexpr (is_supported_head_size(kHeadSize, sizeof(CacheT))) {
      if (head_size == kHeadSize) f.template operator()<kHeadSize>();
    }
  };
  [&]<std::size_t... kIndices>(std::index_sequence<kIndices...>) {
    (try_size.template operator()<kIndices>(), ...);
  }(std::make_index_sequence<kHeadSizes.size()>());
}

template <Element T, Element CacheT>
void launch_paged_attention(const PagedAttentionParams& params, const Partitions& partitions,
                            cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(params.num_heads),
                  static_cast<unsigned>(params.seq_lens.size),
                  static_cast<unsigned>(partitions.num_partitions));
  const auto shared_bytes = static_cast<std::size_t>(logits_bytes(partitions.num_tokens));
  dispatch_head_size<CacheT>(params.head_size, [&]<int kHeadSize>() {
    launch(&paged_attention_kernel<T, CacheT, kHeadSize>, grid, kNumAttentionWarps * 32,
           shared_bytes, stream, params, partitions);
  });
}

}  // namespace paged_kv::cuda
