// SPDX-License-Identifier: Apache-2.0
#include "ops/cpu/attention_planner.h"

#include "paged_kv/check.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace paged_kv::cpu {
namespace {

struct Tile {
  std::int64_t seq;
  std::int64_t query_begin;
  std::int64_t num_queries;
  std::int64_t seq_len;
  std::int64_t units;
};

[[nodiscard]] std::int64_t rows_per_tile(std::int64_t head_size) {
  return head_size <= 128 ? kPlanPrefillRows : kPlanPrefillRows / 2;
}

[[nodiscard]] std::int64_t queries_per_tile(std::int64_t group_size, std::int64_t head_size) {
  return std::max<std::int64_t>(rows_per_tile(head_size) / group_size, 1);
}

std::vector<Tile> make_tiles(const PlanProblem& p, std::int64_t group_size,
                             std::int64_t tile_queries) {
  std::vector<Tile> tiles;
  for (std::int64_t seq = 0; seq < p.seq_lens.size; ++seq) {
    const std::int64_t query_len = p.query_start_loc[seq + 1] - p.query_start_loc[seq];
    const std::int64_t seq_len = p.seq_lens[seq];
    const bool is_decode = query_len * group_size <= kPlanDecodeRows;
    const std::int64_t step = is_decode ? query_len : tile_queries;
    for (std::int64_t begin = 0; begin < query_len; begin += step) {
      const std::int64_t num_queries = std::min(step, query_len - begin);
      const std::int64_t last_pos = seq_len - query_len + begin + num_queries - 1;
      tiles.push_back({seq, begin, num_queries, seq_len, plan_units(last_pos)});
    }
  }
  return tiles;
}

// Calls place(tile, slot, units) for the pieces of the walk, in order, and returns the number of
// slots used. The device kernel does the same with the same integers.
template <class F>
std::int64_t walk(const std::vector<Tile>& tiles, std::int64_t payload, F&& place) {
  std::int64_t slot = 0;
  std::int64_t load = 0;
  for (const Tile& tile : tiles) {
    const std::int64_t min_units =
        std::max(kPlanMinPieceUnits, ceil_div(tile.units, kPlanMaxPiecesPerTile));
    std::int64_t rest = tile.units;
    for (bool done = false; !done;) {
      const std::int64_t room = payload - load - kPlanPieceCost;
      std::int64_t units = rest;
      if (rest > room) {
        // Cut, and leave enough for the piece that follows.
        units = std::min(room, rest - min_units);
        if (units < min_units) {  // no piece of this tile goes here
          ++slot;
          load = 0;
          continue;
        }
      }
      place(tile, slot, units);
      load += units + kPlanPieceCost;
      rest -= units;
      done = rest == 0;
    }
  }
  return slot + 1;
}

// The smallest payload that a binary search finds to fit into the slots.
std::int64_t find_payload(const std::vector<Tile>& tiles, std::int64_t num_slots) {
  std::int64_t total = 0;
  std::int64_t smallest = kPlanPieceCost;  // at which every tile can be placed in an empty slot
  for (const Tile& tile : tiles) {
    total += tile.units + kPlanPieceCost;
    const std::int64_t min_units =
        std::max(kPlanMinPieceUnits, ceil_div(tile.units, kPlanMaxPiecesPerTile));
    // Less than two smallest pieces are never cut.
    smallest = std::max(smallest, kPlanPieceCost + std::min(tile.units, 2 * min_units - 1));
  }
  std::int64_t low = std::max(smallest, ceil_div(total, num_slots));
  std::int64_t high = std::max(low, total);  // one slot: fits
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    const auto ignore = [](const Tile&, std::int64_t, std::int64_t) {};
    if (walk(tiles, middle, ignore) <= num_slots) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return high;
}

// Sets the fields of the pieces [first, end), one tile, that are known when its last is placed.
void finish_tile(AttentionPlan& plan, std::size_t first) {
  const auto num_pieces = static_cast<std::int32_t>(plan.pieces.size() - first);
  for (std::size_t i = first; i < plan.pieces.size(); ++i) {
    PlanPiece& piece = plan.pieces[i];
    piece.piece_idx = static_cast<std::int32_t>(i - first);
    piece.num_pieces = num_pieces;
    piece.partial = num_pieces == 1 ? -1 : plan.num_partials++;
  }
}

}  // namespace

std::int64_t plan_units(std::int64_t last_pos) noexcept {
  return last_pos < 0 ? 0 : last_pos / kPlanUnit + 1;
}

std::int64_t plan_slots(std::int64_t num_slots, std::int64_t num_kv_heads) noexcept {
  return std::max<std::int64_t>(num_slots / num_kv_heads, 1);
}

void check_plan_problem(const PlanProblem& p) {
  // Keeps every size that follows, and max_plan_size(), within 64 bits.
  constexpr std::int64_t kMax = std::numeric_limits<std::int32_t>::max();
  PAGED_KV_CHECK(p.num_heads <= kMax, "num_heads: expected <= ", kMax, ", got ", p.num_heads);
  PAGED_KV_CHECK(p.num_slots <= kMax, "num_slots: expected <= ", kMax, ", got ", p.num_slots);
  PAGED_KV_CHECK(p.num_kv_heads >= 1 && p.num_heads >= 1 && p.num_heads % p.num_kv_heads == 0,
                 "num_heads: expected a multiple of num_kv_heads = ", p.num_kv_heads, ", got ",
                 p.num_heads);
  PAGED_KV_CHECK(p.head_size >= 1, "head_size: expected >= 1, got ", p.head_size);
  PAGED_KV_CHECK(p.num_slots >= 1, "num_slots: expected >= 1, got ", p.num_slots);
  PAGED_KV_CHECK(p.query_start_loc[0] == 0, "query_start_loc[0]: expected 0, got ",
                 p.query_start_loc[0]);
  for (std::int64_t seq = 0; seq < p.seq_lens.size; ++seq) {
    PAGED_KV_CHECK(p.query_start_loc[seq] <= p.query_start_loc[seq + 1], "query_start_loc[",
                   seq + 1, "]: expected >= ", p.query_start_loc[seq], " (the start before), got ",
                   p.query_start_loc[seq + 1]);
    PAGED_KV_CHECK(p.seq_lens[seq] >= 0, "seq_lens[", seq, "]: expected >= 0, got ",
                   p.seq_lens[seq]);
  }
}

AttentionPlan plan_attention(const PlanProblem& problem) {
  check_plan_problem(problem);
  const std::int64_t group_size = problem.num_heads / problem.num_kv_heads;
  const std::int64_t num_slots = plan_slots(problem.num_slots, problem.num_kv_heads);
  AttentionPlan plan;
  plan.queries_per_tile = queries_per_tile(group_size, problem.head_size);
  const std::vector<Tile> tiles = make_tiles(problem, group_size, plan.queries_per_tile);
  plan.payload = find_payload(tiles, num_slots);

  std::int64_t units_done = 0;  // of the current tile
  std::size_t first_piece = 0;
  walk(tiles, plan.payload, [&](const Tile& tile, std::int64_t slot, std::int64_t units) {
    if (units_done == 0) first_piece = plan.pieces.size();
    while (std::ssize(plan.slot_begin) <= slot) {
      plan.slot_begin.push_back(static_cast<std::int32_t>(plan.pieces.size()));
    }
    const bool is_last = units_done + units == tile.units;
    const std::int64_t key_begin = units_done * kPlanUnit;
    const std::int64_t key_end = is_last ? tile.seq_len : key_begin + units * kPlanUnit;
    plan.pieces.push_back({.seq = static_cast<std::int32_t>(tile.seq),
                           .query_begin = static_cast<std::int32_t>(tile.query_begin),
                           .num_queries = static_cast<std::int32_t>(tile.num_queries),
                           .key_begin = static_cast<std::int32_t>(key_begin),
                           .key_end = static_cast<std::int32_t>(key_end),
                           .piece_idx = 0,
                           .num_pieces = 0,
                           .partial = 0});
    units_done = is_last ? 0 : units_done + units;
    if (is_last) finish_tile(plan, first_piece);
  });
  plan.slot_begin.resize(static_cast<std::size_t>(num_slots + 1),
                         static_cast<std::int32_t>(plan.pieces.size()));
  return plan;
}

std::int64_t max_plan_size(std::int64_t num_seqs, std::int64_t num_tokens, std::int64_t num_heads,
                           std::int64_t num_kv_heads, std::int64_t head_size,
                           std::int64_t num_slots) {
  const std::int64_t slots = plan_slots(num_slots, num_kv_heads);
  const std::int64_t max_tiles =
      num_seqs + num_tokens / queries_per_tile(num_heads / num_kv_heads, head_size);
  // Each slot but the last is left at most once with a tile cut in two.
  return kPlanHeaderSize + slots + 1 + kPlanPieceSize * (max_tiles + slots - 1);
}

void write_plan(const AttentionPlan& plan, std::int64_t num_seqs, std::span<std::int32_t> buffer) {
  const std::int32_t header[kPlanHeaderSize] = {
      kPlanVersion,
      static_cast<std::int32_t>(num_seqs),
      static_cast<std::int32_t>(plan.slot_begin.size() - 1),
      static_cast<std::int32_t>(plan.pieces.size()),
      plan.num_partials,
      static_cast<std::int32_t>(plan.queries_per_tile),
      static_cast<std::int32_t>(kPlanUnit),
      0,
  };
  auto* position = std::copy(std::begin(header), std::end(header), buffer.data());
  position = std::copy(plan.slot_begin.begin(), plan.slot_begin.end(), position);
  if (!plan.pieces.empty()) {
    std::memcpy(position, plan.pieces.data(), plan.pieces.size() * sizeof(PlanPiece));
  }
}

}  // namespace paged_kv::cpu
