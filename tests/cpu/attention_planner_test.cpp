// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_planner.h"

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

struct Batch {
  std::vector<std::int32_t> query_lens;
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> starts{};

  PlanProblem problem(std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t num_slots,
                      std::int64_t head_size = 128) {
    starts.assign(1, 0);
    for (const std::int32_t len : query_lens) starts.push_back(starts.back() + len);
    return {.query_start_loc = {starts.data(), std::ssize(starts), 1},
            .seq_lens = {seq_lens.data(), std::ssize(seq_lens), 1},
            .num_heads = num_heads,
            .num_kv_heads = num_kv_heads,
            .head_size = head_size,
            .num_slots = num_slots};
  }
};

std::int64_t units_of(const PlanPiece& piece, const Batch& batch) {
  const auto seq = static_cast<std::size_t>(piece.seq);
  if (piece.piece_idx + 1 < piece.num_pieces) {
    return (piece.key_end - piece.key_begin) / kPlanUnit;
  }
  const std::int64_t last_pos =
      batch.seq_lens[seq] - batch.query_lens[seq] + piece.query_begin + piece.num_queries - 1;
  return plan_units(last_pos) - piece.key_begin / kPlanUnit;
}

// I1, I3, I4.
void expect_covered_once(const AttentionPlan& plan, const Batch& batch) {
  std::int32_t next_partial = 0;
  std::map<std::int32_t, std::int32_t> queries_done;
  for (std::size_t i = 0; i < plan.pieces.size();) {
    const PlanPiece& tile = plan.pieces[i];
    const auto seq = static_cast<std::size_t>(tile.seq);
    EXPECT_EQ(tile.query_begin, queries_done[tile.seq]);
    queries_done[tile.seq] += tile.num_queries;
    EXPECT_LE(tile.num_pieces, kPlanMaxPiecesPerTile);
    std::int32_t keys_done = 0;
    for (std::int32_t k = 0; k < tile.num_pieces; ++k, ++i) {
      ASSERT_LT(i, plan.pieces.size());
      const PlanPiece& piece = plan.pieces[i];
      EXPECT_EQ(std::pair(piece.seq, piece.query_begin), std::pair(tile.seq, tile.query_begin));
      EXPECT_EQ(piece.num_queries, tile.num_queries);
      EXPECT_EQ(std::pair(piece.piece_idx, piece.num_pieces), std::pair(k, tile.num_pieces));
      EXPECT_EQ(piece.key_begin, keys_done);
      EXPECT_EQ(piece.key_begin % kPlanUnit, 0);
      keys_done = piece.key_end;
      EXPECT_EQ(piece.partial, tile.num_pieces == 1 ? -1 : next_partial++);
      if (tile.num_pieces > 1) {
        EXPECT_GE(units_of(piece, batch), kPlanMinPieceUnits);
      }
    }
    EXPECT_EQ(keys_done, batch.seq_lens[seq]);
  }
  for (std::size_t seq = 0; seq < batch.seq_lens.size(); ++seq) {
    EXPECT_EQ(queries_done[static_cast<std::int32_t>(seq)], batch.query_lens[seq]);
  }
  EXPECT_EQ(plan.num_partials, next_partial);
}

std::vector<std::int64_t> loads(const AttentionPlan& plan, const Batch& batch) {
  std::vector<std::int64_t> result;
  for (std::size_t slot = 0; slot + 1 < plan.slot_begin.size(); ++slot) {
    std::int64_t load = 0;
    EXPECT_LE(plan.slot_begin[slot], plan.slot_begin[slot + 1]);
    for (std::int32_t i = plan.slot_begin[slot]; i < plan.slot_begin[slot + 1]; ++i) {
      load += units_of(plan.pieces[static_cast<std::size_t>(i)], batch) + kPlanPieceCost;
    }
    result.push_back(load);
  }
  EXPECT_EQ(plan.slot_begin.front(), 0);
  EXPECT_EQ(plan.slot_begin.back(), std::ssize(plan.pieces));
  return result;
}

TEST(AttentionPlanner, RandomBatchesAreCoveredOnceAndBalanced) {
  std::mt19937 random(7);
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<std::int32_t>(low, high)(random);
  };
  constexpr std::pair<std::int64_t, std::int64_t> kHeads[] = {{8, 8}, {32, 8}, {71, 1}, {9, 3}};
  for (int round = 0; round < 400; ++round) {
    Batch batch;
    const int num_seqs = draw(0, 20);
    for (int i = 0; i < num_seqs; ++i) {
      const std::int32_t query_len = draw(0, 3) > 0 ? draw(0, 2) : draw(0, 700);
      batch.query_lens.push_back(query_len);
      batch.seq_lens.push_back(draw(0, 9) == 0 ? draw(0, 300'000) : query_len + draw(0, 3000));
    }
    const auto [num_heads, num_kv_heads] = kHeads[round % 4];
    const std::int64_t num_slots = draw(1, 400);
    const AttentionPlan plan = plan_attention(batch.problem(num_heads, num_kv_heads, num_slots));

    expect_covered_once(plan, batch);
    const std::int64_t slots = plan_slots(num_slots, num_kv_heads);
    const auto slot_loads = loads(plan, batch);
    ASSERT_EQ(std::ssize(slot_loads), slots);
    std::int64_t total = 0;
    std::int64_t longest = 0;
    for (const std::int64_t load : slot_loads) {
      EXPECT_LE(load, plan.payload);
      total += load;
    }
    for (const std::int32_t len : batch.seq_lens) {
      longest = std::max<std::int64_t>(longest, plan_units(len - 1));
    }
    // Balanced: a slot is left with room for less than a smallest piece and its cost.
    const std::int64_t slack =
        kPlanPieceCost + 2 * std::max(kPlanMinPieceUnits, longest / kPlanMaxPiecesPerTile + 1);
    EXPECT_LE(plan.payload, (total + slots - 1) / slots + slack);

    const std::int64_t num_tokens = batch.starts.back();
    const std::int64_t needed =
        kPlanHeaderSize + slots + 1 + kPlanPieceSize * std::ssize(plan.pieces);
    EXPECT_LE(needed, max_plan_size(num_seqs, num_tokens, num_heads, num_kv_heads, 128, num_slots));
  }
}

TEST(AttentionPlanner, OneLongSequenceFillsAllSlots) {
  Batch batch{.query_lens = {1}, .seq_lens = {64 * 128}};
  const AttentionPlan plan = plan_attention(batch.problem(8, 1, 16));
  EXPECT_EQ(plan.pieces.size(), 16U);
  for (const PlanPiece& piece : plan.pieces) EXPECT_EQ(piece.key_end - piece.key_begin, 4 * 128);
}

TEST(AttentionPlanner, NothingIsCutWhenThereAreEnoughSequences) {
  Batch batch{.query_lens = std::vector<std::int32_t>(64, 1),
              .seq_lens = std::vector<std::int32_t>(64, 1024)};
  const AttentionPlan plan = plan_attention(batch.problem(8, 8, 8 * 64));
  EXPECT_EQ(plan.num_partials, 0);
  EXPECT_EQ(plan.pieces.size(), 64U);
}

TEST(AttentionPlanner, ASequenceWithoutKeysStillHasAPiece) {
  Batch batch{.query_lens = {1, 0, 3}, .seq_lens = {0, 50, 0}};
  const AttentionPlan plan = plan_attention(batch.problem(8, 8, 4));
  expect_covered_once(plan, batch);  // its queries' outputs are to be zeroed
  EXPECT_EQ(plan.pieces.size(), 2U);
}

TEST(AttentionPlanner, AnEmptyBatchHasAnEmptyPlan) {
  Batch batch{.query_lens = {}, .seq_lens = {}};
  const AttentionPlan plan = plan_attention(batch.problem(8, 8, 16));
  EXPECT_TRUE(plan.pieces.empty());
  EXPECT_EQ(plan.slot_begin, (std::vector<std::int32_t>{0, 0, 0}));
}

TEST(AttentionPlanner, WritesTheDocumentedForm) {
  Batch batch{.query_lens = {1, 1}, .seq_lens = {1000, 30}};
  const AttentionPlan plan = plan_attention(batch.problem(4, 2, 4, 64));
  std::vector<std::int32_t> buffer(static_cast<std::size_t>(max_plan_size(2, 2, 4, 2, 64, 4)), -7);
  write_plan(plan, 2, buffer);
  const std::vector<std::int32_t> expected{
      1, 2, 2, 3,   2,    64, 128, 0,  // header
      0, 1, 3,                         // slot 0: the first piece, slot 1: the two others
      0, 0, 1, 0,   768,  0,  2,   0,  // sequence 0, 6 units
      0, 0, 1, 768, 1000, 1,  2,   1,  // sequence 0, 2 units
      1, 0, 1, 0,   30,   0,  1,   -1};
  ASSERT_GE(buffer.size(), expected.size());
  EXPECT_TRUE(std::equal(expected.begin(), expected.end(), buffer.begin()));
}

TEST(AttentionPlanner, RefusesBadInput) {
  Batch batch{.query_lens = {1}, .seq_lens = {10}};
  EXPECT_THROW((void)plan_attention(batch.problem(8, 3, 4)), std::invalid_argument);
  EXPECT_THROW((void)plan_attention(batch.problem(8, 0, 4)), std::invalid_argument);
  EXPECT_THROW((void)plan_attention(batch.problem(8, 8, 0)), std::invalid_argument);
  batch.seq_lens[0] = -1;
  EXPECT_THROW((void)plan_attention(batch.problem(8, 8, 4)), std::invalid_argument);
  Batch decreasing{.query_lens = {3, -1}, .seq_lens = {10, 10}};
  EXPECT_THROW((void)plan_attention(decreasing.problem(8, 8, 4)), std::invalid_argument);
}

}  // namespace
}  // namespace paged_kv::cpu
