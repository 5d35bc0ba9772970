// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "blocks_of_storage.h"
#include "casters.h"
#include "eviction_policy_arg.h"
#include "hash_args.h"
#include "paged_kv/block_pool.h"
#include "process_contents.h"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace paged_kv::bindings {
namespace {

// The hashes of `request`, which may also be the hashes themselves.
py::object block_hashes_of(const py::object& request) {
  return py::isinstance<BlockHashList>(request) ? request : request.attr("block_hashes");
}

std::vector<std::uint8_t> to_mask(const std::optional<std::vector<bool>>& mask) {
  if (!mask) return {};
  return {mask->begin(), mask->end()};
}

using IdList = py::typing::List<py::int_>;
using DumpTuple = py::typing::Tuple<IdList, py::typing::Dict<py::int_, py::int_>,
                                    py::typing::Dict<py::str, IdList>>;
using IdTuple = py::typing::Tuple<IdList, py::ellipsis>;
using BlockTuple = py::typing::Tuple<py::typing::List<BlockHandle>, py::ellipsis>;

DumpTuple to_python(const BlockPoolDump& dump) {
  py::list free_order;
  for (const BlockId id : dump.free_order) free_order.append(id.value());
  py::dict ref_counts;
  for (const auto& [id, ref_cnt] : dump.ref_counts) ref_counts[py::int_(id.value())] = ref_cnt;
  py::dict hash_map;
  for (const auto& [key, ids] : dump.hash_map) {
    // Contents that differ may have one XXH3 digest.
    const py::object name = py::cast(key).attr("hex")();
    if (!hash_map.contains(name)) hash_map[name] = py::list();
    py::list blocks = hash_map[name];
    for (const BlockId id : ids) blocks.append(id.value());
    blocks.attr("sort")();
  }
  return py::make_tuple(free_order, ref_counts, hash_map);
}

void bind_queries(py::class_<BlockPool, PoolPtr>& pool) {
  pool.def_property_readonly("num_gpu_blocks", &BlockPool::num_gpu_blocks,
                             "Number of blocks, the null block included.")
      .def_property_readonly("enable_caching", &BlockPool::enable_caching,
                             "Whether full blocks can be found again.")
      .def_property_readonly("hash_block_size", &BlockPool::hash_block_size,
                             "Tokens that one block hash of a request covers.")
      .def_property_readonly(
          "blocks",
          [](const PoolPtr& self) {
            std::vector<BlockId> ids;
            for (const KVCacheBlock& block : self->blocks()) ids.push_back(block.block_id);
            return to_handles(self, ids);
          },
          "All blocks by id. O(num_gpu_blocks), for tests.")
      .def_property_readonly(
          "null_block", [](const PoolPtr& self) { return to_handles(self, {{kNullBlockId}})[0]; },
          "Block 0, which stands in tables where nothing is held.")
      .def("get_num_free_blocks", &BlockPool::get_num_free_blocks,
           "Blocks that nobody holds. Those whose content is cached count too.")
      .def("get_usage", &BlockPool::get_usage,
           "Share of the blocks, without the null block, that is held: 0.0 .. 1.0.")
      .def(
          "dump", [](const BlockPool& self) { return to_python(self.dump()); },
          R"(The whole state: (free ids in order, {id: ref_cnt} where not 0, {hex key: sorted ids}).)")
      .def("check_integrity", &BlockPool::check_integrity,
           "Raise InvariantError if the state is inconsistent. O(num_gpu_blocks), for tests.");
}

void bind_allocation(py::class_<BlockPool, PoolPtr>& pool) {
  pool.def(
          "get_new_blocks",
          [](const PoolPtr& self, std::int64_t num_blocks) {
            return to_handles(self, self->get_new_blocks(num_blocks));
          },
          py::arg("num_blocks").noconvert(),
          R"(Take blocks from the front of the free queue.

What they held leaves the prefix cache; each has ref_cnt 1 afterwards.

Raises:
    OutOfBlocksError: fewer than `num_blocks` are free. Nothing has changed.
)")
      .def(
          "get_new_block_ids",
          [](BlockPool& self, std::int64_t num_blocks) {
            return to_array(self.get_new_blocks(num_blocks));
          },
          py::arg("num_blocks").noconvert(), "`get_new_blocks`, as an int32 array of ids.")
      .def(
          "touch",
          [](BlockPool& self, const BlockIdsArg& blocks) { self.touch(blocks.in(self.blocks())); },
          py::arg("blocks"),
          "One more holder for each block; a free one leaves the queue and keeps its content.")
      .def(
          "free_blocks",
          [](BlockPool& self, const BlockIdsArg& blocks) {
            self.free_blocks(blocks.in(self.blocks()));
          },
          py::arg("ordered_blocks"),
          R"(One holder less for each block.

Blocks that nobody holds any more become free: those without a hash to the front of the queue,
those with one to its back (an `eviction_policy` may differ), both in the given order. So a request's blocks should be given last
block first: then a cached prefix is lost from its end.

Raises:
    ValueError: an unknown block, or one freed more often than it is held. Nothing has changed.
)");
}

void bind_prefix_cache(py::class_<BlockPool, PoolPtr>& pool) {
  pool.def(
          "cache_full_blocks",
          [](BlockPool& self, const py::object& request, const BlockIdsArg& blocks,
             std::int64_t num_cached_blocks, std::int64_t num_full_blocks, std::int64_t block_size,
             GroupId kv_cache_group_id, const std::optional<std::vector<bool>>& block_mask) {
            if (num_cached_blocks >= num_full_blocks) return;
            const BlockHashesArg hashes(block_hashes_of(request));
            self.cache_full_blocks(hashes.span(), blocks.in(self.blocks()), num_cached_blocks,
                                   num_full_blocks, block_size, kv_cache_group_id,
                                   to_mask(block_mask));
          },
          py::arg("request"), py::arg("blocks"), py::arg("num_cached_blocks").noconvert(),
          py::arg("num_full_blocks").noconvert(), py::arg("block_size").noconvert(),
          py::arg("kv_cache_group_id"), py::arg("block_mask") = py::none(),
          R"(Make blocks [num_cached_blocks, num_full_blocks) of a request findable.

Args:
    request: An object with `.block_hashes`, or a `BlockHashList` (not copied). One hash for every
        `hash_block_size` tokens. Those of `xxhash_cbor` must be a living `Request`'s.
    blocks: All blocks of the request.
    num_cached_blocks: Blocks that are cached already.
    num_full_blocks: Blocks that are full.
    block_size: Tokens per block: `hash_block_size`, or a multiple.
    kv_cache_group_id: Group of layers to which the blocks belong.
    block_mask: One bool for each block of the range; False leaves the block out.

Null blocks are skipped; a block cached under the same key stays as it is. Without caching nothing
happens.

Raises:
    ValueError: a block that nobody holds or that is cached as another content, or counts that do
        not fit. Nothing has changed.
)")
      .def(
          "get_cached_block",
          [](const PoolPtr& self, const BlockHash& block_hash,
             const std::vector<GroupId>& group_ids) -> std::optional<std::vector<BlockHandle>> {
            PAGED_KV_CHECK(!block_hash.is_xxh3(), "block_hash: ", kXxh3DigestBytes,
                           " bytes do not tell the content; give the request's block_hashes to "
                           "find_cached_prefix");
            const auto ids = self->get_cached_block(block_hash, group_ids);
            if (!ids) return std::nullopt;
            return to_handles(self, *ids);
          },
          py::arg("block_hash"), py::arg("kv_cache_group_ids"),
          R"(The cached block of each group, or None unless every group has one.

Raises:
    ValueError: a hash of `xxhash_cbor`, which as bytes does not tell the content.
)")
      .def(
          "find_cached_prefix",
          [](const BlockPool& self, const HashesObject& block_hashes, std::int64_t max_num_blocks,
             GroupId kv_cache_group_id, std::optional<std::int64_t> block_size) {
            return to_array(self.find_cached_prefix(
                BlockHashesArg(block_hashes).span(), max_num_blocks,
                block_size.value_or(self.hash_block_size()), kv_cache_group_id));
          },
          py::arg("block_hashes"), py::arg("max_num_blocks").noconvert(),
          py::arg("kv_cache_group_id") = GroupId(0), py::arg("block_size").noconvert() = py::none(),
          R"(Ids of the cached blocks of a prefix, from the left up to the first miss.

Args:
    block_hashes: A `BlockHashList` (not copied) or an iterable of bytes.
    max_num_blocks: Look no further. A request must compute its last token itself, so this is at
        most (num_tokens - 1) // block_size.
    kv_cache_group_id: Group of layers to look in.
    block_size: Tokens per block, a multiple of `hash_block_size`. Default: the same.

Returns:
    int32 array. The blocks are not held yet: `touch` them before the next `get_new_blocks`.
)")
      .def(
          "evict_blocks",
          [](BlockPool& self, const BlockIdsArg& block_ids) {
            self.evict_blocks(block_ids.in(self.blocks()));
          },
          py::arg("block_ids"),
          "Remove blocks from the prefix cache; holders and queue positions stay.")
      .def("reset_prefix_cache", &BlockPool::reset_prefix_cache,
           "Empty the prefix cache. False, and no change, while any block is held.");
}

void bind_block_pool(py::module_& m) {
  py::class_<BlockPool, PoolPtr> pool(
      m, "BlockPool",
      R"(Hands out blocks, counts their holders, and finds full blocks again by their content.

Args:
    num_gpu_blocks: Number of blocks, including block 0, the null block, which is never handed out.
    enable_caching: Whether full blocks can be found again.
    hash_block_size: Tokens that one block hash of a request covers.
    eviction_policy: Called for each block that becomes free, with a copy of it; says whether it is
        reused next or last. None: the least recently used first, and before it what cannot be found.
        If it raises, `sys.unraisablehook` is told and the block goes where None would put it.

Methods that take blocks accept an iterable of `KVCacheBlock` or of ids, or an int32 or int64 array
of ids. All cost O(1) per block. A call that raises changes nothing.

Source:
    vLLM 0.32 v1/core/block_pool.py::BlockPool.

Example:
    >>> pool = BlockPool(num_gpu_blocks=11, enable_caching=True, hash_block_size=16)
    >>> blocks = pool.get_new_blocks(2)
    >>> [block.block_id for block in blocks], pool.get_num_free_blocks()
    ([1, 2], 8)
    >>> pool.free_blocks(reversed(blocks))
)");
  pool.def(py::init([](std::int32_t num_gpu_blocks, bool enable_caching,
                       std::int32_t hash_block_size, std::optional<PlaceFunction> eviction_policy) {
             return std::make_shared<BlockPool>(num_gpu_blocks, enable_caching, hash_block_size,
                                                /*enable_kv_cache_events=*/false,
                                                /*metrics_collector=*/nullptr,
                                                to_eviction_policy(std::move(eviction_policy)),
                                                /*num_remembered_evictions=*/0, process_contents());
           }),
           py::arg("num_gpu_blocks").noconvert(), py::arg("enable_caching").noconvert(),
           py::arg("hash_block_size").noconvert(), py::arg("eviction_policy") = py::none());
  bind_queries(pool);
  bind_allocation(pool);
  bind_prefix_cache(pool);
}

// Blocks of one pool or queue stay where they are; blocks that stand alone are moved together.
BlocksOfStorage make_kv_cache_blocks(const std::vector<std::vector<BlockHandle*>>& groups) {
  std::vector<BlockHandle*> all;
  for (const auto& group : groups) all.insert(all.end(), group.begin(), group.end());
  for (const BlockHandle* handle : all) {
    if (handle == nullptr) throw py::type_error("blocks must not contain None");
  }
  BlocksOfStorage result;
  if (!all.empty()) {
    result.storage = all.front()->is_alone ? move_to_one_storage(all) : all.front()->storage;
  }
  for (const auto& group : groups) {
    std::vector<BlockId>& ids = result.blocks.block_ids.emplace_back();
    for (const BlockHandle* handle : group) {
      PAGED_KV_CHECK(handle->storage->blocks().data() == result.storage->blocks().data(),
                     "the blocks belong to several pools or queues");
      ids.push_back(handle->position);
    }
  }
  return result;
}

std::vector<int> ids_of(const BlocksOfStorage& self, std::span<const BlockId> positions) {
  std::vector<int> ids;
  ids.reserve(positions.size());
  for (const BlockId position : positions) {
    ids.push_back(self.storage->blocks()[position.index()].block_id.value());
  }
  return ids;
}

py::typing::Optional<IdTuple> get_block_ids(const BlocksOfStorage& self, bool allow_none) {
  const auto& groups = self.blocks.block_ids;
  if (allow_none && std::ranges::all_of(groups, [](const auto& ids) { return ids.empty(); })) {
    return py::none();
  }
  py::tuple result(groups.size());
  for (std::size_t i = 0; i < groups.size(); ++i) result[i] = py::cast(ids_of(self, groups[i]));
  return result;
}

BlockTuple get_blocks(const BlocksOfStorage& self) {
  py::tuple result(self.blocks.block_ids.size());
  for (std::size_t i = 0; i < result.size(); ++i) {
    std::vector<BlockHandle> handles;
    for (const BlockId position : self.blocks.block_ids[i]) {
      handles.push_back({self.storage, position});
    }
    result[i] = py::cast(std::move(handles));
  }
  return result;
}

BlocksOfStorage add(const BlocksOfStorage& a, const BlocksOfStorage& b) {
  PAGED_KV_CHECK(
      !a.storage || !b.storage || a.storage->blocks().data() == b.storage->blocks().data(),
      "the blocks belong to several pools or queues");
  return {a.storage ? a.storage : b.storage, a.blocks + b.blocks};
}

void bind_kv_cache_blocks(py::module_& m) {
  py::class_<BlocksOfStorage>(m, "KVCacheBlocks",
                              R"(The blocks of one request: ``blocks[g][i]`` is block i of group g.

All blocks must be of one pool.

Source:
    vLLM 0.32 v1/core/kv_cache_manager.py::KVCacheBlocks.

Example:
    >>> pool = BlockPool(8, False, 16)
    >>> held = KVCacheBlocks((pool.get_new_blocks(2),)) + KVCacheBlocks((pool.get_new_blocks(1),))
    >>> held.get_block_ids()
    ([1, 2, 3],)
)")
      .def(py::init(&make_kv_cache_blocks), py::arg("blocks"))
      .def_property_readonly("blocks", &get_blocks, "A tuple with one list of blocks a group.")
      .def("get_block_ids", &get_block_ids, py::arg("allow_none").noconvert() = false,
           "The ids, as a tuple of lists; with `allow_none`, None if there are no blocks at all.")
      .def(
          "get_unhashed_block_ids",
          [](const BlocksOfStorage& self) {
            const auto blocks =
                self.storage ? self.storage->blocks() : std::span<const KVCacheBlock>();
            return ids_of(self, get_unhashed_block_ids(self.blocks, blocks));
          },
          "Ids of the only group's blocks that are not in the prefix cache.")
      .def(
          "new_empty",
          [](const BlocksOfStorage& self) {
            return BlocksOfStorage{nullptr, self.blocks.new_empty()};
          },
          "As many groups, without blocks.")
      .def("__add__", &add, py::arg("other"), py::is_operator(),
           "Group by group, these blocks and then the others.")
      .def("__repr__", [](const BlocksOfStorage& self) {
        return "KVCacheBlocks(" + std::string(py::repr(get_block_ids(self, false))) + ")";
      });
}

}  // namespace

void bind_pool(py::module_& m) {
  bind_block_pool(m);
  bind_kv_cache_blocks(m);
}

}  // namespace paged_kv::bindings
