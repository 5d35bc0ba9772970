// SPDX-License-Identifier: Apache-2.0
//
// Plans how the attention of one step is cut into pieces that fill a device evenly.
//
// The work is a list of tiles: some queries of a sequence, all heads of one kv head, against all
// their keys. A tile costs its keys in units of kPlanUnit tokens, plus a constant for each piece it
// is cut into. The walk goes through the tiles in order and fills one slot after the other up to a
// payload, cutting a tile where a slot is full; the payload is the smallest that fits into the
// slots. A slot is one resident thread block a kv head: every kv head runs the same plan, and a
// grid of slots x kv heads does for any lengths, so a captured graph can be replayed.
//
// Source: FlashMLA get_decoding_sched_meta (the walk); FlashInfer's plan() (smallest that fits).
//
// The plan as int32 (docs/attention_plan.md):
//   [0] kPlanVersion       [1] num_seqs      [2] num_slots of the walk   [3] num_pieces
//   [4] num_partials       [5] queries a tile [6] kPlanUnit              [7] 0
//   [8 .. 8 + num_slots]   first piece of each slot, then num_pieces
//   then kPlanPieceSize numbers a piece: seq, query_begin, num_queries, key_begin, key_end,
//        index in its tile, pieces of its tile, partial (-1: the piece is the whole tile).
// query_begin counts from the sequence's first query of the step, key_begin from its first token.
#pragma once

#include "paged_kv/strided_view.h"

#include <cstdint>
#include <span>
#include <vector>

namespace paged_kv::cpu {

inline constexpr std::int32_t kPlanVersion = 1;
inline constexpr std::int64_t kPlanHeaderSize = 8;
inline constexpr std::int64_t kPlanPieceSize = 8;

inline constexpr std::int64_t kPlanUnit = 128;         // tokens; pieces begin at multiples of it
inline constexpr std::int64_t kPlanPieceCost = 2;      // of starting a piece, in units
inline constexpr std::int64_t kPlanMinPieceUnits = 2;  // no piece of a cut tile is smaller
inline constexpr std::int64_t kPlanMaxPiecesPerTile = 64;
// A sequence with at most so many rows (queries x heads of a kv head) is one tile ...
inline constexpr std::int64_t kPlanDecodeRows = 16;
// ... and others are cut into tiles of so many rows, half of it for head sizes above 128.
inline constexpr std::int64_t kPlanPrefillRows = 128;

struct PlanProblem {
  VectorView<const std::int32_t> query_start_loc;  // [num_seqs + 1]
  VectorView<const std::int32_t> seq_lens;         // [num_seqs]
  std::int64_t num_heads;
  std::int64_t num_kv_heads;
  std::int64_t head_size;
  std::int64_t num_slots;  // thread blocks that the device runs at the same time
};

struct PlanPiece {
  std::int32_t seq;
  std::int32_t query_begin;
  std::int32_t num_queries;
  std::int32_t key_begin;
  std::int32_t key_end;  // of a tile's last piece: seq_len, though a causal mask may end before
  std::int32_t piece_idx;
  std::int32_t num_pieces;  // of its tile
  std::int32_t partial;     // where its partial result goes; -1: straight to the output
};
static_assert(sizeof(PlanPiece) == kPlanPieceSize * sizeof(std::int32_t));

// Invariants (tested in attention_planner_test.cpp):
//   I1 the pieces of a tile follow each other and cover [0, seq_len) once, the tiles of a sequence
//      its queries once;
//   I2 no slot's load is above `payload`, and no smaller payload that the search tried fits;
//   I3 a tile has at most kPlanMaxPiecesPerTile pieces; if more than one, none costs less than
//      kPlanMinPieceUnits units;
//   I4 partials are numbered 0 .. num_partials without gaps, those of a tile in order.
struct AttentionPlan {
  std::vector<std::int32_t> slot_begin;  // [num_slots + 1]
  std::vector<PlanPiece> pieces;
  std::int32_t num_partials = 0;
  std::int64_t queries_per_tile = 0;
  std::int64_t payload = 0;
};

// Units of keys that a causal tile ending with query position `last_pos` looks at.
[[nodiscard]] std::int64_t plan_units(std::int64_t last_pos) noexcept;

// Slots of the walk: those of the device, shared by the kv heads.
[[nodiscard]] std::int64_t plan_slots(std::int64_t num_slots, std::int64_t num_kv_heads) noexcept;

// Throws std::invalid_argument for starts that decrease, negative lengths, sizes below 1, or
// numbers of heads or slots past 32 bits. Then max_plan_size() of the problem cannot overflow.
void check_plan_problem(const PlanProblem& problem);

// Throws as check_plan_problem(). Memory: in proportion to max_plan_size().
// Cost: O((tiles + slots) * log(units)).
[[nodiscard]] AttentionPlan plan_attention(const PlanProblem& problem);

// Elements that a plan needs at most, for any lengths of so many sequences and queries.
[[nodiscard]] std::int64_t max_plan_size(std::int64_t num_seqs, std::int64_t num_tokens,
                                         std::int64_t num_heads, std::int64_t num_kv_heads,
                                         std::int64_t head_size, std::int64_t num_slots);

// Writes the form described above; `buffer` holds at least max_plan_size().
void write_plan(const AttentionPlan& plan, std::int64_t num_seqs, std::span<std::int32_t> buffer);

}  // namespace paged_kv::cpu
