// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/free_queue.h"

#include <memory>
#include <optional>
#include <string>

namespace paged_kv::bindings {
namespace {

// A queue over blocks of its own.
class OwningQueue {
 public:
  explicit OwningQueue(std::span<BlockHandle* const> handles)
      : storage_(move_to_one_storage(handles)), queue_(storage_->own) {}

  [[nodiscard]] FreeKVCacheBlockQueue& queue() { return queue_; }
  [[nodiscard]] BlockHandle handle(BlockId position) const { return {storage_, position}; }
  [[nodiscard]] std::vector<BlockHandle> handles(std::span<const BlockId> positions) const {
    std::vector<BlockHandle> result;
    result.reserve(positions.size());
    for (const BlockId position : positions) result.push_back(handle(position));
    return result;
  }
  [[nodiscard]] BlockId position_of(const BlockHandle& handle) const {
    PAGED_KV_CHECK(handle.storage == storage_, "block ", handle.block().block_id,
                   " is not one of this queue's blocks");
    return handle.position;
  }
  [[nodiscard]] std::vector<BlockId> positions_of(const std::vector<BlockHandle>& handles) const {
    std::vector<BlockId> positions;
    positions.reserve(handles.size());
    for (const BlockHandle& handle : handles) positions.push_back(position_of(handle));
    return positions;
  }

 private:
  std::shared_ptr<BlockStorage> storage_;
  FreeKVCacheBlockQueue queue_;
};

std::optional<BlockHandle> neighbour(const BlockHandle& self, BlockId position) {
  if (!position.valid()) return std::nullopt;
  return BlockHandle{self.storage, position};
}

std::string repr(const BlockHandle& self) {
  const KVCacheBlock& block = self.block();
  const char* state = block.is_null ? ", null" : block.is_hashed() ? ", cached" : "";
  return concat("KVCacheBlock(block_id=", block.block_id, ", ref_cnt=", block.ref_cnt, state, ")");
}

void bind_kv_cache_block(py::module_& m) {
  py::class_<BlockHandle>(m, "KVCacheBlock",
                          R"(Metadata of one block of the KV cache.

A light handle to a place in a pool's (or queue's) storage, which it keeps alive. Two handles are
equal if they are of the same place. The blocks of a `BlockPool` change through the pool alone.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::KVCacheBlock.
)")
      .def(py::init(&BlockHandle::make_alone), py::arg("block_id"))
      .def_property_readonly(
          "block_id", [](const BlockHandle& self) { return self.block().block_id; },
          "The block's row in the cache tensors.")
      .def_property_readonly(
          "ref_cnt", [](const BlockHandle& self) { return self.block().ref_cnt; },
          "How many hold the block; 0 in a pool: it is free.")
      .def_property_readonly(
          "is_null", [](const BlockHandle& self) { return self.block().is_null; },
          "Whether it is the null block, block 0 of a pool.")
      .def_property_readonly(
          "block_hash",
          [](const BlockHandle& self) -> std::optional<BlockHashWithGroupId> {
            if (!self.block().is_hashed()) return std::nullopt;
            return self.block().key;
          },
          "Key in the prefix cache (hash and group id), None while the block is not in it.")
      .def_property_readonly(
          "block_hash_num_tokens",
          [](const BlockHandle& self) -> std::optional<std::int32_t> {
            if (!self.block().is_hashed()) return std::nullopt;
            return self.block().block_hash_num_tokens;
          },
          "Tokens of the prefix that `block_hash` names.")
      .def_property_readonly(
          "num_hits", [](const BlockHandle& self) { return self.block().num_hits; },
          "How often it was found in the prefix cache since it was last handed out, up to 65535.")
      .def_property_readonly(
          "prev_free_block",
          [](const BlockHandle& self) { return neighbour(self, self.block().prev_free_block); },
          "The block before it in its free queue, None at the front.")
      .def_property_readonly(
          "next_free_block",
          [](const BlockHandle& self) { return neighbour(self, self.block().next_free_block); },
          "The block after it in its free queue, None at the back.")
      .def(
          "set_block_hash",
          [](const BlockHandle& self, const BlockHashWithGroupId& key, std::int32_t num_tokens) {
            KVCacheBlock& block = self.own_block();
            PAGED_KV_CHECK(!block.is_hashed(), "block ", block.block_id, " has a hash already");
            block.key = key;
            block.block_hash_num_tokens = num_tokens;
          },
          py::arg("block_hash"), py::arg("num_tokens").noconvert(),
          "Name the block's content. Refused if it has a name, or belongs to a pool.")
      .def(
          "reset_hash", [](const BlockHandle& self) { self.own_block().reset_hash(); },
          "Forget the name of the block's content.")
      .def(
          "__eq__",
          [](const BlockHandle& self, const py::object& other) {
            return py::isinstance<BlockHandle>(other) && self == other.cast<const BlockHandle&>();
          },
          py::arg("other"))
      .def("__hash__", [](const BlockHandle& self) { return self.block().block_id.value(); })
      .def("__repr__", &repr);
}

void bind_free_queue(py::module_& m) {
  py::class_<OwningQueue>(
      m, "FreeKVCacheBlockQueue",
      R"(Free blocks in the order of their reuse: a linked list through the blocks.

The blocks must not belong to a pool or another queue; the queue becomes their owner. `BlockPool`
has one of these inside.

Raises:
    ValueError: a block that is not (or already) in the queue, or more blocks asked for than there
        are. The queue is then unchanged.

Source:
    vLLM 0.32 v1/core/kv_cache_utils.py::FreeKVCacheBlockQueue.

Example:
    >>> queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(4)])
    >>> first = queue.popleft()
    >>> queue.append(first)
    >>> [block.block_id for block in queue.get_all_free_blocks()]
    [1, 2, 3, 0]
)")
      .def(py::init([](const std::vector<BlockHandle*>& blocks) {
             for (const BlockHandle* block : blocks) {
               if (block == nullptr) throw py::type_error("blocks must not contain None");
             }
             return std::make_unique<OwningQueue>(blocks);
           }),
           py::arg("blocks"))
      .def_property_readonly(
          "num_free_blocks", [](OwningQueue& self) { return self.queue().num_free_blocks(); },
          "Blocks in the queue.")
      .def(
          "popleft", [](OwningQueue& self) { return self.handle(self.queue().popleft()); },
          "Take the first block. O(1).")
      .def(
          "popleft_n",
          [](OwningQueue& self, std::int64_t n) {
            PAGED_KV_CHECK(n >= 0 && n <= self.queue().num_free_blocks(), "cannot pop ", n,
                           " blocks from a queue of ", self.queue().num_free_blocks());
            std::vector<BlockId> positions(static_cast<std::size_t>(n));
            self.queue().popleft_n(positions);
            return self.handles(positions);
          },
          py::arg("n").noconvert(), "Take the first `n` blocks, in order. O(n).")
      .def(
          "remove",
          [](OwningQueue& self, const BlockHandle& block) {
            self.queue().remove(self.position_of(block));
          },
          py::arg("block"), "Take a block out of the middle. O(1).")
      .def(
          "append",
          [](OwningQueue& self, const BlockHandle& block) {
            self.queue().append(self.position_of(block));
          },
          py::arg("block"), "Put a block to the back. O(1).")
      .def(
          "append_n",
          [](OwningQueue& self, const std::vector<BlockHandle>& blocks) {
            self.queue().append_n(self.positions_of(blocks));
          },
          py::arg("blocks"), "Put blocks to the back, in order. O(n).")
      .def(
          "prepend_n",
          [](OwningQueue& self, const std::vector<BlockHandle>& blocks) {
            self.queue().prepend_n(self.positions_of(blocks));
          },
          py::arg("blocks"), "Put blocks to the front; blocks[0] is the next to be taken. O(n).")
      .def(
          "get_all_free_blocks",
          [](OwningQueue& self) { return self.handles(self.queue().get_all_free_blocks()); },
          "All blocks of the queue, in order. O(n), for tests.")
      .def(
          "check_integrity", [](OwningQueue& self) { self.queue().check_integrity(); },
          "Raise InvariantError if the links are inconsistent. O(n), for tests.");
}

}  // namespace

void bind_block(py::module_& m) {
  bind_kv_cache_block(m);
  bind_free_queue(m);
}

}  // namespace paged_kv::bindings
