// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/paged_attention.h"

#include "ops/cpu/attention_tile.h"
#include "ops/cpu/attention_workers.h"
#include "ops/cpu/float16.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <vector>

namespace paged_kv::cpu {
namespace {

// Tiles of queries of a batch, numbered sequence by sequence.
class TileList {
 public:
  TileList(const AttentionBatch& batch, std::int64_t queries_per_tile)
      : batch_(batch), queries_per_tile_(queries_per_tile) {
    first_tile_.reserve(static_cast<std::size_t>(batch.num_seqs() + 1));
    first_tile_.push_back(0);
    for (std::int64_t seq = 0; seq < batch.num_seqs(); ++seq) {
      const std::int64_t num_tiles = ceil_div(batch.query_len(seq), queries_per_tile);
      first_tile_.push_back(first_tile_.back() + num_tiles);
    }
  }

  [[nodiscard]] std::int64_t size() const noexcept { return first_tile_.back(); }

  // Within a sequence the last queries, which see the most keys, come first: then the threads
  // finish at about the same time.
  [[nodiscard]] QueryTile operator()(std::int64_t tile, std::int64_t kv_head) const {
    const auto next = std::upper_bound(first_tile_.begin(), first_tile_.end(), tile);
    const std::int64_t seq = next - first_tile_.begin() - 1;
    const std::int64_t query_begin = (*next - 1 - tile) * queries_per_tile_;
    return {seq, kv_head, query_begin,
            std::min(queries_per_tile_, batch_.query_len(seq) - query_begin)};
  }

 private:
  const AttentionBatch& batch_;
  std::int64_t queries_per_tile_;
  std::vector<std::int64_t> first_tile_;  // [num_seqs + 1]
};

// The keys that some query of the tile sees, from the start of a tile of keys.
KeyRange keys_of(const QueryTile& tile, const AttentionBatch& batch, const AttentionMask& mask) {
  const std::int64_t seq_len = batch.seq_lens[tile.seq];
  const std::int64_t first_pos = batch.first_query_pos(tile.seq) + tile.query_begin;
  const std::int64_t begin = mask.visible(first_pos, seq_len).begin;
  const std::int64_t end = mask.visible(first_pos + tile.num_queries - 1, seq_len).end;
  return {begin / kTileKeys * kTileKeys, end};
}

template <class T>
void write_results(const PagedAttentionParams<T>& p, const QueryTile& tile,
                   const AttentionTile<T>& result) {
  const std::int64_t first_token = p.batch.query_begin(tile.seq) + tile.query_begin;
  for (std::int64_t row = 0; row < result.num_rows(); ++row) {
    const std::int64_t token = first_token + row / p.group_size();
    const std::int64_t head = tile.kv_head * p.group_size() + row % p.group_size();
    result.write_output(row, p.out + token * p.out_token_stride + head * p.out_head_stride);
    if (p.lse != nullptr) {
      p.lse[head * p.lse_head_stride + token * p.lse_token_stride] = result.log_sum_exp(row);
    }
  }
}

}  // namespace

template <class T>
void paged_attention(const PagedAttentionParams<T>& params, const ThreadRunner& runner) {
  const TileList tiles(params.batch, queries_per_tile(params.group_size()));
  const std::int64_t num_items = tiles.size() * params.num_kv_heads;
  for_each_item(params, num_items, runner, [&](AttentionTile<T>& worker, std::int64_t item) {
    const QueryTile tile = tiles(item / params.num_kv_heads, item % params.num_kv_heads);
    worker.run(tile, keys_of(tile, params.batch, params.mask), params.sinks != nullptr);
    write_results(params, tile, worker);
  });
}

template void paged_attention(const PagedAttentionParams<float>&, const ThreadRunner&);
template void paged_attention(const PagedAttentionParams<Half>&, const ThreadRunner&);
template void paged_attention(const PagedAttentionParams<BFloat16>&, const ThreadRunner&);

}  // namespace paged_kv::cpu
