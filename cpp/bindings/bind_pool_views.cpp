// SPDX-License-Identifier: Apache-2.0
//
// What vLLM's code reads inside of a pool: its free queue and its index, here to look at only.
#include "bindings.h"
#include "blocks_of_storage.h"
#include "casters.h"
#include "paged_kv/block_pool.h"

#include <optional>
#include <vector>

namespace paged_kv::bindings {
namespace {

struct FreeQueueView {
  PoolPtr pool;
};

struct CachedBlocksView {
  PoolPtr pool;

  [[nodiscard]] const BlockHashToBlockMap& map() const {
    return pool->cached_block_hash_to_block();
  }
};

using BlocksOfKeys = py::typing::Dict<py::bytes, py::object>;

// As vLLM's map has it inside: key -> block, or {id: block} if there are several.
BlocksOfKeys to_dict(const CachedBlocksView& self) {
  py::dict blocks_of_keys;  // key -> {id: block}
  for (const BlockHashWithGroupId& key : self.map().get_all_keys()) {
    const py::object packed = py::cast(key);
    if (!blocks_of_keys.contains(packed)) blocks_of_keys[packed] = py::dict();
    py::dict blocks = blocks_of_keys[packed];
    for (const BlockHandle& handle : to_handles(self.pool, self.map().get_all_blocks(key))) {
      blocks[py::int_(handle.block().block_id.value())] = handle;
    }
  }
  for (const auto& [key, value] : blocks_of_keys) {
    const auto blocks = py::reinterpret_borrow<py::dict>(value);
    if (blocks.size() == 1) blocks_of_keys[key] = (*blocks.begin()).second;
  }
  return BlocksOfKeys(blocks_of_keys);
}

void bind_free_queue_view(py::module_& m) {
  py::class_<FreeQueueView>(
      m, "FreeQueueView", "The free queue of a `BlockPool`, to look at: only the pool changes it.")
      .def_property_readonly(
          "num_free_blocks",
          [](const FreeQueueView& self) { return self.pool->get_num_free_blocks(); },
          "Blocks in the queue.")
      .def(
          "get_all_free_blocks",
          [](const FreeQueueView& self) {
            return to_handles(self.pool, self.pool->free_block_queue().get_all_free_blocks());
          },
          "The blocks in the order of their reuse. O(free blocks), for tests.");
}

void bind_cached_blocks_view(py::module_& m) {
  py::class_<CachedBlocksView>(
      m, "CachedBlocksView",
      R"(The prefix-cache index of a `BlockPool`, to look at: only the pool changes it.

Keys are made by `make_block_hash_with_group_id`. Those of `xxhash_cbor` are not looked up by
``get_one_block`` and ``contain``: as bytes they do not tell the content.
)")
      .def(
          "get_one_block",
          [](const CachedBlocksView& self,
             const BlockHashWithGroupId& key) -> std::optional<BlockHandle> {
            const auto block = self.map().get_one_block(key);
            if (!block) return std::nullopt;
            return to_handles(self.pool, {{*block}}).front();
          },
          py::arg("key"), "The first inserted block with `key`, or None. O(1).")
      .def(
          "contain",
          [](const CachedBlocksView& self, const BlockHashWithGroupId& key, BlockId block_id) {
            return self.map().contain(key, block_id);
          },
          py::arg("key"), py::arg("block_id"), "True if the block is there under `key`. O(1).")
      .def(
          "__len__", [](const CachedBlocksView& self) { return self.map().size(); },
          "Number of distinct keys.")
      .def_property_readonly("_cache", &to_dict,
                             "Key -> block, or {id: block} of several. A copy, for vLLM's tests.");
}

}  // namespace

void bind_pool_views(py::module_& m) {
  bind_free_queue_view(m);
  bind_cached_blocks_view(m);
  auto pool = py::reinterpret_borrow<py::class_<BlockPool, PoolPtr>>(m.attr("BlockPool"));
  pool.def_property_readonly(
          "free_block_queue", [](const PoolPtr& self) { return FreeQueueView{self}; },
          "The free queue, to look at.")
      .def_property_readonly(
          "cached_block_hash_to_block", [](const PoolPtr& self) { return CachedBlocksView{self}; },
          "The prefix-cache index, to look at.");
}

}  // namespace paged_kv::bindings
