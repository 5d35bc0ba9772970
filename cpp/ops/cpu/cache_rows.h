// SPDX-License-Identifier: Apache-2.0
//
// The keys, or the values, of one tile of tokens as rows that the inner loops can read: in place
// where the cache holds dense rows, or panels, of a type that they take, else converted to binary16
// (8-bit floats) or to float32.
#pragma once

#include "ops/cpu/paged_attention.h"
#include "ops/cpu/scratch.h"

#include <cstdint>

namespace paged_kv::cpu {

class CacheRows {
 public:
  // `side` is a member of `params`. Takes O(kTileKeys * head_size) floats from `scratch`, or counts
  // them only.
  CacheRows(const PagedAttentionParams& params, const CacheSide& side, ScratchCutter& scratch);

  // Turns to another sequence, whose rows are used by so many queries each.
  void begin(std::int64_t seq, std::int64_t num_queries);

  // Turns to the tokens `columns` of the tile that begins at position `tile_begin`, a multiple of
  // kTileKeys. Touches no element.
  void turn_to(std::int64_t tile_begin, KeyRange columns);

  // The rows of one kv head and of some of the columns turned to, valid until the next rows() or
  // turn_to().
  [[nodiscard]] TokenRows rows(KeyRange columns, std::int64_t kv_head);
  // Whether they are in panels: TokenPanelKernels says what their pointers are then.
  [[nodiscard]] bool in_panels() const noexcept { return access_ == Access::kPanels; }
  // Their index in the kernel tables.
  [[nodiscard]] int type() const noexcept { return static_cast<int>(form_); }

  // The memory of such rows of some kv heads, which lie side by side, in the order in which it is
  // read. It is fetched ahead: the first lines before kernels read any of it, others meanwhile. Of
  // rows, all lines are first ones: at most kTileKeys runs. Of panels, one head's, some are where
  // all are too many for the first-level cache; either part has at most kTileKeys / 2 runs. Where
  // tokens lie interleaved it is all of the head's block. Nothing if there are no columns, or where
  // elements are strewn.
  void add_first_lines(KeyRange columns, std::int64_t kv_head, std::int64_t num_heads,
                       MemoryRuns& runs) const;
  void add_other_lines(KeyRange columns, std::int64_t kv_head, MemoryRuns& runs) const;
  // The first ones of the tile that will be turned to next, after locate_next() with what begin()
  // and turn_to() will get.
  void locate_next(std::int64_t seq, std::int64_t tile_begin, KeyRange columns);
  void add_first_lines_of_next(KeyRange columns, std::int64_t kv_head, std::int64_t num_heads,
                               MemoryRuns& runs) const;

 private:
  // How the elements of a token lie.
  enum class Access {
    kWholeVectors,  // one after the other
    kDense,         // one after the other, the last vector not full
    kChunked,       // in chunks of 16 bytes: keys of the x-packed layout
    kTransposed,    // tokens one after the other, eight of them aligned: its values
    kStrided,
    kPanels,
  };
  static constexpr std::int64_t kNoTile = -1;

  [[nodiscard]] Access access() const noexcept;
  // Sets tokens_, or next_tokens_: where kv head 0 of the columns, or of their groups, lies.
  void locate(std::int64_t seq, std::int64_t tile_begin, KeyRange columns,
              const void** tokens) const;
  void locate_groups(std::int64_t seq, std::int64_t tile_begin, KeyRange columns,
                     const void** tokens) const;
  void add_first_lines(const void* const* tokens, KeyRange columns, std::int64_t kv_head,
                       std::int64_t num_heads, MemoryRuns& runs) const;
  void add_lines_of_rows(const void* const* tokens, KeyRange columns, std::int64_t kv_head,
                         std::int64_t num_heads, MemoryRuns& runs) const;
  // Bytes [begin, end) of one head's, in the order in which products read them.
  void add_lines_of_panels(const void* const* tokens, KeyRange columns, std::int64_t kv_head,
                           std::int64_t begin, std::int64_t end, MemoryRuns& runs) const;
  // The rows of a head, which lie so far behind those of head 0, into copy_.
  void convert(KeyRange columns, std::int64_t offset_bytes);
  void convert_strided(const void* source, float* target);
  void convert_groups(KeyRange columns, std::int64_t offset_bytes);

  const PagedAttentionParams& params_;
  const CacheSide& side_;
  int type_;
  std::int64_t padded_size_;
  Access access_;
  std::int64_t seq_ = 0;
  ElementType form_ = ElementType::kFloat;  // of rows()
  bool in_place_ = false;                   // rows() lie in the cache
  bool is_fetched_in_parts_ = false;        // some lines are no first ones
  std::int64_t next_tile_begin_ = kNoTile;
  const void** tokens_;       // [kTileKeys], of the tile turned to, into the cache
  const void** next_tokens_;  // of the tile at next_tile_begin_
  const void** converted_;    // [kTileKeys], into copy_
  float* copy_;               // [kTileKeys, padded_size], or half of it as binary16
  std::byte* dense_row_;      // a row without its strides
};

}  // namespace paged_kv::cpu
