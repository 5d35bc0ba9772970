// SPDX-License-Identifier: Apache-2.0
//
// A block of threads has one query of one head. A key is head_size / 8 chunks of 8 elements, one a
// lane: 4 lanes for head size 32, 16 for 128 (rounded up to a power of two, so that a warp is whole
// groups of lanes). The groups of all warps take keys in turn, 4 at a time:
//
//   products   each lane multiplies its chunk of key and query; shuffles add up the group's lanes
//   softmax    online: each group keeps its largest logit, the sum of its weights, and each lane
//              its chunk of the weighted sum of values
//   end        the groups' parts meet in shared memory, where each thread joins some dims
#include "cuda/src/find_seq.cuh"
#include "paged_kv/cuda/dispatch.cuh"
#include "paged_kv/cuda/dtype.cuh"
#include "paged_kv/cuda/launch.h"
#include "paged_kv/cuda/paged_attention_varlen.h"
#include "paged_kv/cuda/reduce.cuh"
#include "paged_kv/cuda/shared.cuh"
#include "paged_kv/cuda/vector.cuh"
#include "paged_kv/math.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>
#include <stdexcept>

namespace paged_kv::cuda {
namespace {

constexpr int kNumThreads = 128;
constexpr int kWarpSize = 32;
constexpr int kKeysAtOnce = 4;  // of a group of lanes: loads on their way
constexpr int kMaxGroups = kNumThreads;

struct Varlen {
  PagedAttentionVarlenParams op;
  std::int32_t lanes_per_key;  // a power of two, at most a warp
};

// What the groups have gathered.
struct GroupParts {
  alignas(16) float output[kNumThreads * kVarlenChunk];  // [group][lanes_per_key * kVarlenChunk]
  float max_logit[kMaxGroups];
  float exp_sum[kMaxGroups];
};

// The query of a block of threads and its visible keys [begin, end).
struct QueryRow {
  std::int64_t token;
  std::int64_t seq;
  std::int32_t head;
  std::int32_t kv_head;
  std::int64_t position;  // negative if the sequence has fewer keys than queries
  std::int32_t begin;
  std::int32_t end;
};

// Where a thread is: all lanes of a group work on the same keys.
struct Lane {
  int group;       // in the block of threads
  int num_groups;  // of the block of threads
  int dim;         // first of the lane's chunk; may be past the head's end
};

// What a lane keeps from key to key.
struct SoftmaxPart {
  float max_logit = -INFINITY;
  float exp_sum = 0.0f;
  float output[kVarlenChunk] = {};
};

__device__ __forceinline__ QueryRow find_row(const PagedAttentionVarlenParams& p,
                                             std::int64_t token, std::int32_t head, int lane) {
  QueryRow row{};
  row.token = token;
  row.head = head;
  row.kv_head = head / (p.num_heads / p.num_kv_heads);
  row.seq = find_seq(p.query_start_loc, token, lane);
  if (row.seq == kNoSeq) return row;
  const std::int64_t seq_len = max(0, min(p.seq_lens[row.seq], static_cast<int>(p.max_seq_len)));
  row.position = seq_len - (p.query_start_loc[row.seq + 1] - token);
  const std::int64_t end = p.causal ? min(seq_len, row.position + 1) : seq_len;
  row.end = static_cast<std::int32_t>(max(end, std::int64_t{0}));
  const bool is_cut = p.sliding_window > 0 && p.sliding_window <= row.position;
  row.begin = is_cut ? static_cast<std::int32_t>(row.position - p.sliding_window + 1) : 0;
  return row;
}

// The block of the cache that has the key at `position`, or -1.
__device__ __forceinline__ std::int32_t visible_block(const PagedAttentionVarlenParams& p,
                                                      const QueryRow& row, std::int64_t position,
                                                      std::int32_t& offset) {
  if (position >= row.end) return -1;
  const auto index = static_cast<std::uint32_t>(position);
  const std::uint32_t column = index / static_cast<std::uint32_t>(p.block_size);
  offset = static_cast<std::int32_t>(index - column * static_cast<std::uint32_t>(p.block_size));
  const std::int32_t block = p.block_tables(row.seq, column);
  return block >= 0 && block < p.num_blocks ? block : -1;
}

template <Element CacheT>
__device__ __forceinline__ Vector<CacheT, kVarlenChunk> load_chunk(const VarlenCacheSide& side,
                                                                   std::int64_t block,
                                                                   std::int64_t offset,
                                                                   std::int64_t element) {
  return Vector<CacheT, kVarlenChunk>::load(static_cast<const CacheT*>(side.data) +
                                            block * side.block_stride + offset * side.token_stride +
                                            element);
}

// Adds keys with these logits to the softmax so far.
template <Element CacheT>
__device__ __forceinline__ void add_keys(
    SoftmaxPart& part, const float (&logits)[kKeysAtOnce],
    const Vector<CacheT, kVarlenChunk> (&values)[kKeysAtOnce]) {
  float max_logit = part.max_logit;
#pragma unroll
  for (int k = 0; k < kKeysAtOnce; ++k) max_logit = fmaxf(max_logit, logits[k]);
  // Of logits that are all -inf or NaN the former must give 0, the latter NaN.
  const float subtracted = max_logit == -INFINITY ? 0.0f : max_logit;
  const float rescale = __expf(part.max_logit - subtracted);
  part.max_logit = max_logit;
  part.exp_sum *= rescale;
#pragma unroll
  for (int i = 0; i < kVarlenChunk; ++i) part.output[i] *= rescale;
#pragma unroll
  for (int k = 0; k < kKeysAtOnce; ++k) {
    const float weight = __expf(logits[k] - subtracted);
    part.exp_sum += weight;
    float elements[kVarlenChunk];
    values[k].to_floats(elements);
#pragma unroll
    for (int i = 0; i < kVarlenChunk; ++i) part.output[i] += weight * elements[i];
  }
}

// The softmax of the keys of this lane's group.
template <Element T, Element CacheT>
__device__ __forceinline__ SoftmaxPart attend(const Varlen& varlen, const QueryRow& row,
                                              const Lane& lane, int first_group_of_warp) {
  const PagedAttentionVarlenParams& p = varlen.op;
  const bool has_dims = lane.dim < p.head_size;
  const T* query = static_cast<const T*>(p.query) + row.token * p.query_token_stride +
                   row.head * p.query_head_stride + lane.dim;
  float query_chunk[kVarlenChunk] = {};
  if (has_dims) {
#pragma unroll
    for (int i = 0; i < kVarlenChunk; ++i) query_chunk[i] = to_float(query[i]);
  }
  const bool has_key_scale = Float8<CacheT> && p.key.scale.data != nullptr;
  const float scale = has_key_scale ? p.scale * p.key.scale[row.kv_head] : p.scale;
  const float slope = p.alibi_slopes.data == nullptr ? 0.0f : p.alibi_slopes[row.head];
  const std::int64_t key_element = row.kv_head * p.key.head_stride + lane.dim;
  const std::int64_t value_element = row.kv_head * p.value.head_stride + lane.dim;

  SoftmaxPart part;
  // In 64 bits: the last tile may reach past 2^31. Lanes of a warp leave together.
  for (std::int64_t tile = row.begin; tile + first_group_of_warp < row.end;
       tile += lane.num_groups * kKeysAtOnce) {
    float logits[kKeysAtOnce];
    Vector<CacheT, kVarlenChunk> keys[kKeysAtOnce] = {};
    Vector<CacheT, kVarlenChunk> values[kKeysAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kKeysAtOnce; ++k) {
      const std::int64_t position = tile + k * lane.num_groups + lane.group;
      std::int32_t offset = 0;
      const std::int32_t block = visible_block(p, row, position, offset);
      logits[k] = block < 0 ? -INFINITY : 0.0f;
      if (block < 0 || !has_dims) continue;
      keys[k] = load_chunk<CacheT>(p.key, block, offset, key_element);
      values[k] = load_chunk<CacheT>(p.value, block, offset, value_element);
    }
    float products[kKeysAtOnce];
#pragma unroll
    for (int k = 0; k < kKeysAtOnce; ++k) {
      float elements[kVarlenChunk];
      keys[k].to_floats(elements);
      products[k] = 0.0f;
#pragma unroll
      for (int i = 0; i < kVarlenChunk; ++i) products[k] += query_chunk[i] * elements[i];
    }
    for (int distance = varlen.lanes_per_key / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < kKeysAtOnce; ++k) {
        products[k] += __shfl_xor_sync(kFullWarp, products[k], distance);
      }
    }
#pragma unroll
    for (int k = 0; k < kKeysAtOnce; ++k) {
      if (logits[k] == -INFINITY) continue;
      float logit = scale * products[k];
      if (p.softcap != 0.0f) logit = p.softcap * tanhf(logit / p.softcap);
      if (p.alibi_slopes.data != nullptr) {
        const std::int64_t position = tile + k * lane.num_groups + lane.group;
        logit += slope * static_cast<float>(position - row.position);
      }
      logits[k] = logit;
    }
    add_keys<CacheT>(part, logits, values);
  }
  return part;
}

// The largest logit of all groups and, if it is larger, the sink.
struct Total {
  float max_logit;
  float subtracted;  // max_logit, or 0 for -inf
  float exp_sum;     // 0: no visible key
};

__device__ __forceinline__ Total join_sums(const PagedAttentionVarlenParams& p,
                                           const GroupParts& parts, int num_groups,
                                           std::int32_t head) {
  float max_logit = -INFINITY;
  for (int g = 0; g < num_groups; ++g) max_logit = fmaxf(max_logit, parts.max_logit[g]);
  const bool has_sink = p.sinks.data != nullptr;
  const float sink = has_sink ? p.sinks[head] : -INFINITY;
  const float keys_max = max_logit;
  if (sink > max_logit) max_logit = sink;
  const float subtracted = max_logit == -INFINITY ? 0.0f : max_logit;
  float exp_sum = 0.0f;
  for (int g = 0; g < num_groups; ++g) {
    exp_sum += parts.exp_sum[g] * __expf(parts.max_logit[g] - subtracted);
  }
  // Without a visible key there is nothing that the sink could take weight from.
  if (has_sink && !(keys_max == -INFINITY && exp_sum == 0.0f)) {
    // The largest logit has weight 1, infinity too, whose difference would be NaN.
    exp_sum += sink == subtracted ? 1.0f : __expf(sink - subtracted);
  }
  return {max_logit, subtracted, exp_sum};
}

// Grid: num_tokens * num_heads, heads first.
template <Element T, Element CacheT>
__global__ void __launch_bounds__(kNumThreads)
    paged_attention_varlen_kernel(const __grid_constant__ Varlen varlen) {
  const PagedAttentionVarlenParams& p = varlen.op;
  const int thread = static_cast<int>(threadIdx.x);
  const auto num_heads = static_cast<unsigned>(p.num_heads);
  const auto head = static_cast<std::int32_t>(blockIdx.x % num_heads);
  const QueryRow row = find_row(p, blockIdx.x / num_heads, head, thread % kWarpSize);
  if (row.seq == kNoSeq) return;

  const Lane lane{.group = thread / varlen.lanes_per_key,
                  .num_groups = kNumThreads / varlen.lanes_per_key,
                  .dim = thread % varlen.lanes_per_key * kVarlenChunk};
  const int first_group_of_warp = thread / kWarpSize * (kWarpSize / varlen.lanes_per_key);
  const SoftmaxPart part = attend<T, CacheT>(varlen, row, lane, first_group_of_warp);

  GroupParts& parts = static_shared<GroupParts>();
#pragma unroll
  for (int i = 0; i < kVarlenChunk; ++i) parts.output[thread * kVarlenChunk + i] = part.output[i];
  if (lane.dim == 0) {
    parts.max_logit[lane.group] = part.max_logit;
    parts.exp_sum[lane.group] = part.exp_sum;
  }
  __syncthreads();

  const Total total = join_sums(p, parts, lane.num_groups, head);
  const bool has_value_scale = Float8<CacheT> && p.value.scale.data != nullptr;
  const float value_scale = has_value_scale ? p.value.scale[row.kv_head] : 1.0f;
  const int padded_head_size = varlen.lanes_per_key * kVarlenChunk;
  T* out = static_cast<T*>(p.out) + row.token * p.out_token_stride + head * p.out_head_stride;
  for (int d = thread; d < p.head_size; d += kNumThreads) {
    float sum = 0.0f;
    for (int g = 0; g < lane.num_groups; ++g) {
      sum += parts.output[g * padded_head_size + d] * __expf(parts.max_logit[g] - total.subtracted);
    }
    out[d] = from_float<T>(total.exp_sum == 0.0f ? 0.0f : value_scale * sum / total.exp_sum);
  }
  if (p.lse.data == nullptr || thread != 0) return;
  p.lse(head, row.token) =
      total.exp_sum == 0.0f ? -INFINITY : total.subtracted + logf(total.exp_sum);
}

template <Element T, Element CacheT>
void launch_varlen(const Varlen& varlen, cudaStream_t stream) {
  const std::int64_t num_rows = varlen.op.num_tokens * varlen.op.num_heads;
  const dim3 grid(static_cast<unsigned>(narrow<std::int32_t>(num_rows, "query: tokens x heads")));
  launch(&paged_attention_varlen_kernel<T, CacheT>, grid, kNumThreads, 0, stream, varlen);
}

template <Element T>
void launch_for_cache(const Varlen& varlen, cudaStream_t stream) {
  switch (varlen.op.kv_cache_dtype) {
    case KvCacheDtype::kAuto:
      return launch_varlen<T, T>(varlen, stream);
    case KvCacheDtype::kFloat8E4M3:
      return launch_varlen<T, Float8E4M3>(varlen, stream);
    case KvCacheDtype::kFloat8E5M2:
      return launch_varlen<T, Float8E5M2>(varlen, stream);
    case KvCacheDtype::kInt8:
      throw std::invalid_argument("kv_cache_dtype: int8 caches are for the CPU");
  }
}

// What max_seq_len, the tables and int32 hold.
std::int64_t capacity(const PagedAttentionVarlenParams& p) {
  constexpr std::int64_t kMaxTokens = std::numeric_limits<std::int32_t>::max();
  const std::int64_t num_blocks = std::min(p.block_tables.num_cols, kMaxTokens);
  const std::int64_t of_tables = std::min(num_blocks * p.block_size, kMaxTokens);
  return p.max_seq_len < 0 ? of_tables : std::min(p.max_seq_len, of_tables);
}

}  // namespace

void paged_attention_varlen(const PagedAttentionVarlenParams& params, cudaStream_t stream) {
  if (params.num_tokens == 0) return;
  Varlen varlen{.op = params, .lanes_per_key = 0};
  varlen.op.max_seq_len = capacity(params);
  varlen.lanes_per_key = static_cast<std::int32_t>(
      std::bit_ceil(static_cast<unsigned>(params.head_size / kVarlenChunk)));
  dispatch_float_dtype(params.dtype, [&]<class T>() { launch_for_cache<T>(varlen, stream); });
}

}  // namespace paged_kv::cuda
