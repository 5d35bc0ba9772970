// SPDX-License-Identifier: Apache-2.0
//
// What attention fetches ahead of a cache in each layout: it changes no result, so nothing else
// would notice.
#include "ops/cpu/cache_rows.h"

#include "ops/cpu/isa/instruction_sets.h"

#include <array>
#include <cstddef>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

namespace paged_kv::cpu {
namespace {

constexpr std::int64_t kHeads = 4, kHeadSize = 16, kBlockSize = 16, kBlocks = 8;
constexpr std::int64_t kTokenBytes = kHeadSize * std::int64_t{sizeof(float)};
constexpr std::int64_t kBlockBytes = kHeads * kBlockSize * kTokenBytes;

// Two sequences of a cache of float32, whose blocks are 5, 2, 7, 3, 0, ... and the other way round.
struct Cache {
  explicit Cache(CacheSide of_layout, std::int64_t head_size = kHeadSize) : side(of_layout) {
    memory.resize(static_cast<std::size_t>(kBlocks * side.block_stride));
    side.data = memory.data();
    params.kernels = &kScalarKernels;
    params.batch.block_tables = {table.data(), 2, kBlocks, kBlocks, 1};
    params.batch.block_size = kBlockSize;
    params.cache_type = ElementType::kFloat;
    params.num_kv_heads = kHeads;
    params.head_size = head_size;
    params.key = params.value = side;
    ScratchCutter sizes(nullptr);
    (void)CacheRows(params, params.key, sizes);
    scratch.resize(static_cast<std::size_t>(sizes.num_bytes()) + 64);
  }

  // Keys, of so many queries.
  CacheRows rows(std::int64_t num_queries = 1) { return rows_of(params.key, num_queries); }
  CacheRows values() { return rows_of(params.value, 1); }

  // Where a token's head lies.
  [[nodiscard]] const void* place(std::int64_t token, std::int64_t head,
                                  std::int64_t seq = 0) const {
    const auto block_idx = static_cast<std::size_t>(seq * kBlocks + token / kBlockSize);
    return side.data + table[block_idx] * side.block_stride +
           token % kBlockSize * side.token_stride + head * side.head_stride;
  }

  CacheRows rows_of(const CacheSide& of, std::int64_t num_queries) {
    ScratchCutter cutter(scratch.data());
    CacheRows rows(params, of, cutter);
    rows.begin(0, num_queries);
    return rows;
  }

  std::vector<std::byte> memory;
  std::vector<std::int32_t> table{5, 2, 7, 3, 0, 1, 4, 6,  //
                                  6, 4, 1, 0, 3, 7, 2, 5};
  std::vector<std::byte> scratch;
  CacheSide side;
  PagedAttentionParams params{};
};

CacheSide layout(std::int64_t token_stride, std::int64_t head_stride,
                 std::int64_t chunk_size = kHeadSize, std::int64_t chunk_stride = 0) {
  CacheSide side{};
  side.block_stride = kBlockBytes;
  side.token_stride = token_stride;
  side.head_stride = head_stride;
  side.dim_stride = sizeof(float);
  side.chunk_size = chunk_size;
  side.chunk_stride = chunk_stride;
  return side;
}

CacheSide panels(std::int64_t head_size) {
  CacheSide side{};
  side.group_stride = side.head_stride = kBlockSize * head_size * std::int64_t{sizeof(float)};
  side.block_stride = kHeads * side.head_stride;
  return side;
}

CacheSide nhd() { return layout(kHeads * kTokenBytes, kTokenBytes); }
CacheSide hnd() { return layout(kTokenBytes, kBlockSize * kTokenBytes); }
// Keys of the classic ops: [head, dim / 4, token, 4].
CacheSide packed() { return layout(16, kBlockSize * kTokenBytes, 4, kBlockSize * 16); }

struct Piece {
  const void* begin;
  std::int64_t num_bytes;
  bool operator==(const Piece&) const = default;
};

// What add(runs) adds.
template <class F>
std::vector<Piece> runs_of(F&& add) {
  std::array<MemoryRun, kTileKeys> memory{};
  MemoryRuns runs(memory.data());
  add(runs);
  std::vector<Piece> result;
  for (std::int64_t i = 0, count = runs.finish(); i < count; ++i) {
    const MemoryRun& run = memory[static_cast<std::size_t>(i)];
    result.push_back({run.begin, run.end - run.begin});
  }
  return result;
}

std::vector<Piece> first_lines(const CacheRows& rows, KeyRange columns, std::int64_t kv_head,
                               std::int64_t num_heads) {
  return runs_of(
      [&](MemoryRuns& runs) { rows.add_first_lines(columns, kv_head, num_heads, runs); });
}

std::vector<Piece> other_lines(const CacheRows& rows, KeyRange columns, std::int64_t kv_head) {
  return runs_of([&](MemoryRuns& runs) { rows.add_other_lines(columns, kv_head, runs); });
}

TEST(MemoryRuns, PiecesThatFollowOneAnotherAreOneRun) {
  const std::array<char, 64> memory{};
  std::array<MemoryRun, 4> of_pieces{};
  MemoryRuns runs(of_pieces.data());
  for (const auto& [begin, num_bytes] : {std::pair{0, 8}, {8, 8}, {32, 4}, {16, 8}}) {
    runs.add(memory.data() + begin, num_bytes);
  }
  ASSERT_EQ(runs.finish(), 3);
  for (const auto& [i, begin, end] : {std::tuple{0, 0, 16}, {1, 32, 36}, {2, 16, 24}}) {
    EXPECT_EQ(of_pieces[static_cast<std::size_t>(i)].begin, memory.data() + begin);
    EXPECT_EQ(of_pieces[static_cast<std::size_t>(i)].end, memory.data() + end);
  }
  EXPECT_EQ(MemoryRuns(of_pieces.data()).finish(), 0);
}

TEST(LinesAhead, GroupsOfLinesAreSharedByTheCalls) {
  const std::array<char, 2048> memory{};
  const std::array<MemoryRun, 2> runs{
      {{memory.data(), memory.data() + 512}, {memory.data() + 1024, memory.data() + 1600}}};
  const LinesAhead lines = LinesAhead::of(runs.data(), 2, 4);
  EXPECT_EQ(lines.next, memory.data());
  EXPECT_EQ(lines.num_groups(), 2 + 3);
  EXPECT_EQ(lines.groups_per_call, 2);
  EXPECT_EQ(LinesAhead::of(runs.data(), 0, 4).num_groups(), 0);
}

TEST(CacheRowsAhead, TokensOfABlockAreOneRunIfAllTheirHeadsAreUsed) {
  Cache cache(nhd());
  CacheRows rows = cache.rows();
  rows.turn_to(64, {3, 64});
  EXPECT_EQ(first_lines(rows, {30, 35}, 0, kHeads),
            (std::vector<Piece>{{cache.place(94, 0), 2 * kHeads * kTokenBytes},
                                {cache.place(96, 0), 3 * kHeads * kTokenBytes}}));
  EXPECT_EQ(other_lines(rows, {30, 35}, 0), (std::vector<Piece>{}));
}

TEST(CacheRowsAhead, SomeHeadsOfATokenAreARun) {
  Cache cache(nhd());
  CacheRows rows = cache.rows();
  rows.turn_to(0, {0, 64});
  EXPECT_EQ(first_lines(rows, {14, 17}, 1, 2),
            (std::vector<Piece>{{cache.place(14, 1), 2 * kTokenBytes},
                                {cache.place(15, 1), 2 * kTokenBytes},
                                {cache.place(16, 1), 2 * kTokenBytes}}));
}

TEST(CacheRowsAhead, TokensOfAHeadAreOneRunOfABlock) {
  Cache cache(hnd());
  CacheRows rows = cache.rows();
  rows.turn_to(0, {0, 64});
  EXPECT_EQ(first_lines(rows, {14, 17}, 3, 1),
            (std::vector<Piece>{{cache.place(14, 3), 2 * kTokenBytes},
                                {cache.place(16, 3), kTokenBytes}}));
}

TEST(CacheRowsAhead, TokensThatLieInterleavedAreAllOfTheirBlock) {
  Cache cache(packed());
  CacheRows rows = cache.rows();
  rows.turn_to(0, {10, 64});
  EXPECT_EQ(first_lines(rows, {10, 33}, 2, 1),
            (std::vector<Piece>{{cache.place(10, 2), kBlockSize * kTokenBytes},
                                {cache.place(16, 2), kBlockSize * kTokenBytes},
                                {cache.place(32, 2), kBlockSize * kTokenBytes}}));
}

// Locates the tile as the next one: its lines are its own, those of the current tile, the first of
// sequence 0, stay what they were.
void locate_and_expect(const Cache& cache, CacheRows& rows, std::int64_t seq,
                       std::int64_t tile_begin) {
  rows.turn_to(0, {0, 64});
  rows.locate_next(seq, tile_begin, {0, 2});
  EXPECT_EQ(runs_of([&](MemoryRuns& runs) { rows.add_first_lines_of_next({0, 2}, 1, 1, runs); }),
            (std::vector<Piece>{{cache.place(tile_begin, 1, seq), 2 * kTokenBytes}}));
  EXPECT_EQ(first_lines(rows, {0, 1}, 1, 1),
            (std::vector<Piece>{{cache.place(0, 1), kTokenBytes}}));
}

TEST(CacheRowsAhead, TheNextTileIsThatOfItsOwnBlocks) {
  Cache cache(hnd());
  CacheRows rows = cache.rows();
  locate_and_expect(cache, rows, 0, 64);
  rows.turn_to(64, {0, 2});
  EXPECT_EQ(first_lines(rows, {0, 1}, 1, 1),
            (std::vector<Piece>{{cache.place(64, 1), kTokenBytes}}));
}

TEST(CacheRowsAhead, TheNextTileMayBeOfAnotherSequence) {
  Cache cache(hnd());
  for (const std::int64_t seq : {0, 1}) {  // whichever begins then
    CacheRows rows = cache.rows();
    locate_and_expect(cache, rows, 1, 0);
    rows.begin(seq, 1);
    rows.turn_to(0, {0, 2});
    EXPECT_EQ(first_lines(rows, {0, 1}, 1, 1),
              (std::vector<Piece>{{cache.place(0, 1, seq), kTokenBytes}}));
  }
}

TEST(CacheRowsAhead, NoColumnsAreNoLines) {
  Cache cache(nhd());
  CacheRows rows = cache.rows();
  rows.turn_to(0, {0, 64});
  EXPECT_TRUE(first_lines(rows, {64, 64}, 0, kHeads).empty());
}

TEST(CacheRowsAhead, StrewnElementsAreNotFetched) {
  CacheSide side = nhd();
  side.dim_stride = 2 * sizeof(float);
  Cache cache(side);
  CacheRows rows = cache.rows();
  rows.turn_to(0, {0, 4});
  EXPECT_TRUE(first_lines(rows, {0, 4}, 0, 1).empty());
}

// Blocks of groups of 8 KiB: a tile is as large as the first-level cache.
constexpr std::int64_t kLargeHead = 128, kLargeGroup = 8192;

TEST(CacheRowsAhead, PanelsOfASmallTileAreFetchedGroupByGroup) {
  Cache cache(panels(kHeadSize));
  CacheRows rows = cache.rows();
  rows.turn_to(0, {20, 64});
  EXPECT_EQ(first_lines(rows, {20, 40}, 1, 1),
            (std::vector<Piece>{{cache.place(16, 1), cache.side.group_stride},
                                {cache.place(32, 1), cache.side.group_stride}}));
  EXPECT_TRUE(other_lines(rows, {20, 40}, 1).empty());
}

TEST(CacheRowsAhead, ALargeTileOfManyQueriesIsFetchedWhole) {
  Cache cache(panels(kLargeHead), kLargeHead);
  CacheRows rows = cache.rows(7);
  rows.turn_to(0, {0, 64});
  EXPECT_EQ(
      first_lines(rows, {0, 32}, 0, 1),
      (std::vector<Piece>{{cache.place(0, 0), kLargeGroup}, {cache.place(16, 0), kLargeGroup}}));
  EXPECT_TRUE(other_lines(rows, {0, 32}, 0).empty());
}

TEST(CacheRowsAhead, OfALargeTileOfKeysTheBeginningComesFirst) {
  Cache cache(panels(kLargeHead), kLargeHead);
  CacheRows rows = cache.rows();
  rows.turn_to(0, {0, 64});
  const auto* first = static_cast<const std::byte*>(cache.place(0, 2));
  EXPECT_EQ(first_lines(rows, {0, 32}, 2, 1), (std::vector<Piece>{{first, 4096}}));
  EXPECT_EQ(other_lines(rows, {0, 32}, 2),
            (std::vector<Piece>{{first + 4096, 4096}, {cache.place(16, 2), kLargeGroup}}));
}

TEST(CacheRowsAhead, OfALargeTileOfValuesTheFirstDimsOfAllTokensComeFirst) {
  Cache cache(panels(kLargeHead), kLargeHead);
  CacheRows values = cache.values();
  values.turn_to(0, {0, 64});
  constexpr std::int64_t kPiece = 2048;  // 32 dims of a group
  const auto piece = [&](std::int64_t token, std::int64_t i) {
    return Piece{static_cast<const std::byte*>(cache.place(token, 1)) + i * kPiece, kPiece};
  };
  EXPECT_EQ(first_lines(values, {0, 48}, 1, 1), (std::vector<Piece>{piece(0, 0), piece(16, 0)}));
  std::vector<Piece> others{piece(32, 0)};
  for (const std::int64_t i : {1, 2, 3}) {
    for (const std::int64_t token : {0, 16, 32}) others.push_back(piece(token, i));
  }
  EXPECT_EQ(other_lines(values, {0, 48}, 1), others);
}

}  // namespace
}  // namespace paged_kv::cpu
