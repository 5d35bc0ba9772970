// SPDX-License-Identifier: Apache-2.0
//
// How a batch is cut into work for threads. It changes no bit of a result, so only here is it seen
// whether work is shared out at all.
#include "ops/cpu/attention_pieces.h"

#include "random_cache.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

using testing::index;
using testing::Random;

// The lengths, heads and mask of a batch: all that a plan looks at.
struct Batch {
  std::vector<std::int32_t> query_lens, seq_lens;
  std::int64_t num_heads = 8, num_kv_heads = 2;
  AttentionMask mask{.causal = true, .sliding_window = 0};
  std::vector<std::int32_t> starts{};

  // Of this object, which must outlive it.
  PagedAttentionParams params() {
    starts.assign(1, 0);
    for (const std::int32_t len : query_lens) starts.push_back(starts.back() + len);
    PagedAttentionParams p{};
    p.batch.query_start_loc = {starts.data(), std::ssize(starts), 1};
    p.batch.seq_lens = {seq_lens.data(), std::ssize(seq_lens), 1};
    p.batch.num_tokens = starts.back();
    p.mask = mask;
    p.num_heads = num_heads;
    p.num_kv_heads = num_kv_heads;
    return p;
  }
};

// One sequence of 30,000 keys among ten of 20, each with one query.
Batch long_among_short() {
  Batch batch{.query_lens = std::vector<std::int32_t>(11, 1),
              .seq_lens = std::vector<std::int32_t>(11, 20)};
  batch.seq_lens[0] = 30'000;
  return batch;
}

Batch random_batch(Random& random) {
  Batch batch;
  for (std::int64_t left = random.between(0, 5); left > 0; --left) {
    const bool is_decode = random.one_in(2);
    batch.query_lens.push_back(
        static_cast<std::int32_t>(is_decode ? 1 : random.between(0, random.one_in(3) ? 200 : 30)));
    batch.seq_lens.push_back(
        static_cast<std::int32_t>(random.between(0, random.one_in(3) ? 9000 : 900)));
  }
  batch.num_kv_heads = random.between(1, 9);
  const bool has_large_groups = batch.num_kv_heads <= 2 && random.one_in(2);
  const std::int64_t group = has_large_groups ? random.between(60, 150) : random.between(1, 8);
  batch.num_heads = batch.num_kv_heads * group;
  batch.mask = {.causal = !random.one_in(4),
                .sliding_window = random.one_in(3) ? random.between(1, 2000) : 0};
  return batch;
}

// In products of a query with a key, of one kv head's group.
std::int64_t cost_of(const AttentionPiece& piece, const QueryTile& tile) {
  return tile.num_queries * (piece.keys.end - piece.keys.begin) * tile.num_kv_heads;
}

struct Costs {
  std::int64_t largest = 0, total = 0;
};

Costs costs_of(const AttentionPieces& work) {
  Costs costs;
  for (std::int64_t item = 0; item < work.num_items(); ++item) {
    const AttentionPiece& piece = work.piece_of(item);
    const std::int64_t cost = cost_of(piece, work.tile_of(piece, item));
    costs.largest = std::max(costs.largest, cost);
    costs.total += cost;
  }
  return costs;
}

// What is done for one (token, head): the ranges of keys, and of which cut tile they are parts.
struct RowWork {
  std::vector<KeyRange> keys;
  std::vector<std::int64_t> partials;  // -1: whole
};

using RowKey = std::pair<std::int64_t, std::int64_t>;  // token, head

std::map<RowKey, RowWork> work_by_row(const AttentionPieces& work, const PagedAttentionParams& p) {
  std::map<RowKey, RowWork> rows;
  for (std::int64_t item = 0; item < work.num_items(); ++item) {
    const AttentionPiece& piece = work.piece_of(item);
    const QueryTile tile = work.tile_of(piece, item);
    EXPECT_LE(tile.num_rows(p.group_size()), max_tile_rows(p.group_size()));
    for (std::int64_t r = 0; r < tile.num_rows(p.group_size()); ++r) {
      const std::int64_t token = p.batch.query_begin(tile.seq) + tile.query_of(r, p.group_size());
      RowWork& row = rows[{token, tile.head_of(r, p.group_size())}];
      row.keys.push_back(piece.keys);
      row.partials.push_back(piece.partial);
    }
  }
  return rows;
}

// The ranges follow each other without a gap, from split to split, and hold all visible keys.
void expect_keys_once(const RowWork& row, KeyRange visible) {
  for (std::size_t i = 1; i < row.keys.size(); ++i) {
    ASSERT_EQ(row.keys[i].begin, row.keys[i - 1].end);
    ASSERT_EQ(row.keys[i].begin % kSplitKeys, 0);
  }
  if (visible.empty()) return;
  ASSERT_LE(row.keys.front().begin, visible.begin);
  ASSERT_GE(row.keys.back().end, visible.end);
}

// One whole piece, or all parts of one cut tile that has the query.
void expect_parts_of_one_tile(const RowWork& row, const AttentionPieces& work, std::int64_t seq,
                              std::int64_t query) {
  if (row.partials.size() == 1 && row.partials[0] == -1) return;
  const auto& tiles = work.cut_tiles();
  const auto tile = std::ranges::find(tiles, row.partials[0], &CutTile::first_partial);
  ASSERT_NE(tile, tiles.end());
  EXPECT_EQ(tile->seq, seq);
  EXPECT_LE(tile->query_begin, query);
  EXPECT_GT(tile->query_begin + tile->num_queries, query);
  EXPECT_LE(tile->num_queries, work.max_cut_queries());
  ASSERT_EQ(std::ssize(row.partials), tile->num_partials);
  for (std::int64_t i = 0; i < tile->num_partials; ++i) {
    ASSERT_EQ(row.partials[index(i)], tile->first_partial + i);
    ASSERT_LT(row.partials[index(i)], work.num_partials());
  }
}

void expect_all_done_once(const AttentionPieces& work, const PagedAttentionParams& p) {
  const auto rows = work_by_row(work, p);
  ASSERT_EQ(std::ssize(rows), p.batch.num_tokens * p.num_heads);
  for (std::int64_t seq = 0; seq < p.batch.num_seqs(); ++seq) {
    for (std::int64_t query = 0; query < p.batch.query_len(seq); ++query) {
      const std::int64_t query_pos = p.batch.first_query_pos(seq) + query;
      const KeyRange visible = p.mask.visible(query_pos, p.batch.seq_lens[seq]);
      for (std::int64_t head = 0; head < p.num_heads; ++head) {
        const RowWork& row = rows.at({p.batch.query_begin(seq) + query, head});
        expect_keys_once(row, visible);
        expect_parts_of_one_tile(row, work, seq, query);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(AttentionPieces, ALongSequenceIsCutSoThatAllThreadsHaveWork) {
  constexpr std::int64_t kThreads = 8;
  Batch batch = long_among_short();
  AttentionPieces work;
  work.plan(batch.params(), kThreads);
  const Costs costs = costs_of(work);
  EXPECT_EQ(costs.total, (30'000 + 10 * 20) * batch.num_kv_heads);
  // Threads take items in turns: the last one is done at most half of a share after the others.
  EXPECT_LE(costs.largest * 2, costs.total / kThreads);
  ASSERT_EQ(std::ssize(work.cut_tiles()), 1);
  EXPECT_EQ(work.cut_tiles()[0].seq, 0);
  expect_all_done_once(work, batch.params());
}

TEST(AttentionPieces, FewSplitsAreSharedOutByHeads) {
  Batch batch{.query_lens = {1}, .seq_lens = {500}, .num_heads = 16, .num_kv_heads = 8};
  AttentionPieces work;
  work.plan(batch.params(), 8);
  EXPECT_EQ(work.num_items(), 8);
  work.plan(batch.params(), 1);
  EXPECT_EQ(work.num_items(), 1);
}

TEST(AttentionPieces, OneThreadCutsNothing) {
  Random random(1);
  for (int i = 0; i < 50; ++i) {
    Batch batch = i == 0 ? long_among_short() : random_batch(random);
    AttentionPieces work;
    work.plan(batch.params(), 1);
    EXPECT_TRUE(work.cut_tiles().empty());
    EXPECT_EQ(work.num_partials(), 0);
    EXPECT_EQ(work.max_cut_queries(), 0);
    for (std::int64_t item = 0; item < work.num_items(); ++item) {
      EXPECT_TRUE(work.piece_of(item).is_whole());
    }
  }
}

TEST(AttentionPieces, EveryQueryKeyAndHeadIsDoneOnce) {
  Random random(2);
  AttentionPieces work;  // from plan to plan: nothing of the last one may stay
  std::int64_t num_cut = 0;
  for (int i = 0; i < 100; ++i) {
    SCOPED_TRACE("batch " + std::to_string(i));
    Batch batch = random_batch(random);
    const std::int64_t num_threads = random.between(1, 16);
    work.plan(batch.params(), num_threads);
    expect_all_done_once(work, batch.params());
    if (HasFailure()) return;
    num_cut += std::ssize(work.cut_tiles());
    if (num_threads == 1) continue;

    // What could still be cut costs no more than half of a thread's share.
    const std::int64_t share = costs_of(work).total / num_threads;
    for (std::int64_t item = 0; item < work.num_items(); ++item) {
      const AttentionPiece& piece = work.piece_of(item);
      if ((piece.keys.end - 1) / kSplitKeys <= piece.keys.begin / kSplitKeys) continue;
      EXPECT_LE(cost_of(piece, work.tile_of(piece, item)) * 2, share);
    }
  }
  EXPECT_GT(num_cut, 20);
}

TEST(AttentionPieces, ItemsArePiecesTimesBlocksOfHeads) {
  Random random(3);
  for (int i = 0; i < 50; ++i) {
    Batch batch = random_batch(random);
    AttentionPieces work;
    work.plan(batch.params(), random.between(1, 16));
    std::int64_t next_item = 0;
    while (next_item < work.num_items()) {
      const AttentionPiece& piece = work.piece_of(next_item);
      ASSERT_EQ(piece.first_item, next_item);
      std::int64_t next_head = 0;
      for (; next_head < batch.num_kv_heads; ++next_item) {
        ASSERT_EQ(&work.piece_of(next_item), &piece);
        const QueryTile tile = work.tile_of(piece, next_item);
        ASSERT_EQ(tile.seq, piece.seq);
        ASSERT_EQ(tile.query_begin, piece.query_begin);
        ASSERT_EQ(tile.num_queries, piece.num_queries);
        ASSERT_EQ(tile.kv_head_begin, next_head);
        ASSERT_GT(tile.num_kv_heads, 0);
        next_head += tile.num_kv_heads;
      }
      ASSERT_EQ(next_head, batch.num_kv_heads);
    }
    ASSERT_EQ(next_item, work.num_items());
  }
}

// They see the most keys.
TEST(AttentionPieces, TheLastQueriesOfASequenceComeFirst) {
  Batch batch{.query_lens = {1000}, .seq_lens = {1000}};
  AttentionPieces work;
  work.plan(batch.params(), 1);
  ASSERT_GT(work.num_items(), 10);
  for (std::int64_t item = 1; item < work.num_items(); ++item) {
    EXPECT_LE(work.piece_of(item).query_begin, work.piece_of(item - 1).query_begin);
  }
  EXPECT_EQ(work.piece_of(work.num_items() - 1).query_begin, 0);
}

TEST(AttentionPieces, AnEmptyBatchHasNoItems) {
  Batch batch;
  AttentionPieces work;
  for (const std::int64_t num_threads : {1, 8}) {
    work.plan(batch.params(), num_threads);
    EXPECT_EQ(work.num_items(), 0);
    EXPECT_TRUE(work.cut_tiles().empty());
  }
}

}  // namespace
}  // namespace paged_kv::cpu
