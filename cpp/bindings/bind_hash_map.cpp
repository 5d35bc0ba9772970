// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/block_hash_map.h"

#include <optional>
#include <unordered_map>

namespace paged_kv::bindings {
namespace {

// The map of the core knows ids; Python wants the blocks back that it put in.
class MapOfHandles {
 public:
  [[nodiscard]] BlockHashToBlockMap& map() { return map_; }

  [[nodiscard]] std::optional<BlockHandle> get_one_block(const BlockHashWithGroupId& key) const {
    const auto block = map_.get_one_block(key);
    if (!block) return std::nullopt;
    return handles_.at(*block).handle;
  }

  void insert(const BlockHashWithGroupId& key, const BlockHandle& handle) {
    const BlockId id = handle.block().block_id;
    const auto known = handles_.find(id);
    PAGED_KV_CHECK(known == handles_.end() || known->second.handle == handle,
                   "another block with id ", id, " is in the map");
    if (map_.contain(key, id)) return;
    map_.insert(key, id);
    ++handles_.try_emplace(id, Holder{handle, 0}).first->second.num_keys;
  }

  [[nodiscard]] std::optional<BlockHandle> pop(const BlockHashWithGroupId& key, BlockId id) {
    if (!map_.pop(key, id)) return std::nullopt;
    const auto holder = handles_.find(id);
    BlockHandle handle = holder->second.handle;
    if (--holder->second.num_keys == 0) handles_.erase(holder);
    return handle;
  }

 private:
  struct Holder {
    BlockHandle handle;
    std::int32_t num_keys;
  };
  BlockHashToBlockMap map_;
  std::unordered_map<BlockId, Holder> handles_;
};

}  // namespace

void bind_hash_map(py::module_& m) {
  py::class_<MapOfHandles>(m, "BlockHashToBlockMap",
                           R"(Prefix-cache index: key -> the blocks that hold this content.

Several blocks may share a key; a lookup gives the one inserted first. `BlockPool` has one of these
inside. Keys are made by `make_block_hash_with_group_id`. All methods are O(1).

Source:
    vLLM 0.32 v1/core/block_pool.py::BlockHashToBlockMap.
)")
      .def(py::init<>())
      .def("get_one_block", &MapOfHandles::get_one_block, py::arg("key"),
           "The first inserted block with `key`, or None.")
      .def(
          "contain",
          [](MapOfHandles& self, const BlockHashWithGroupId& key, BlockId block_id) {
            return self.map().contain(key, block_id);
          },
          py::arg("key"), py::arg("block_id"), "True if the block is there under `key`.")
      .def("insert", &MapOfHandles::insert, py::arg("key"), py::arg("block"),
           "Add a block behind the others with `key`.")
      .def("pop", &MapOfHandles::pop, py::arg("key"), py::arg("block_id"),
           "Remove one block from `key` and return it; None, and no change, if it is not there.")
      .def(
          "__len__", [](MapOfHandles& self) { return self.map().size(); },
          "Number of distinct keys.");
}

}  // namespace paged_kv::bindings
