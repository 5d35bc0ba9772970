// SPDX-License-Identifier: Apache-2.0
//
// How values of the core cross into Python: ids as int, hashes as bytes, many ids as a list or a
// NumPy array.
#pragma once

#include "block_handle.h"
#include "paged_kv/block_hash.h"
#include "paged_kv/check.h"
#include "paged_kv/ids.h"
#include "paged_kv/math.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace paged_kv::bindings {

namespace py = pybind11;

[[nodiscard]] inline std::span<const std::uint8_t> as_byte_span(const py::bytes& bytes) {
  const std::string_view view(bytes);
  return {reinterpret_cast<const std::uint8_t*>(view.data()), view.size()};
}

[[nodiscard]] inline py::bytes to_bytes(std::span<const std::uint8_t> bytes) {
  return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

[[nodiscard]] inline BlockHash to_block_hash(py::handle value) {
  if (!py::isinstance<py::bytes>(value)) {
    throw py::type_error("a block hash must be bytes, got " +
                         std::string(py::str(py::type::of(value).attr("__name__"))));
  }
  return paged_kv::to_block_hash(as_byte_span(py::reinterpret_borrow<py::bytes>(value)));
}

// Calls `visit` with each element of a NumPy array of int32 or int64. False for anything else.
template <class Visit>
bool visit_int_array(py::handle source, Visit visit) {
  const auto visit_as = [&]<class T>(T) {
    const auto array = py::reinterpret_borrow<py::array_t<T>>(source);
    if (array.ndim() != 1) throw py::value_error("expected a one-dimensional array of ids");
    const auto values = array.template unchecked<1>();
    for (py::ssize_t i = 0; i < values.shape(0); ++i) visit(values(i));
    return true;
  };
  if (py::isinstance<py::array_t<std::int32_t>>(source)) return visit_as(std::int32_t{});
  if (py::isinstance<py::array_t<std::int64_t>>(source)) return visit_as(std::int64_t{});
  return false;
}

// Blocks as an argument: an iterable of KVCacheBlock or int, or an int32 or int64 array.
struct BlockIdsArg {
  std::vector<BlockId> ids;
  // Where the blocks lie, if they came as KVCacheBlock.
  const KVCacheBlock* storage = nullptr;

  [[nodiscard]] std::span<const BlockId> in(std::span<const KVCacheBlock> blocks) const {
    PAGED_KV_CHECK(storage == nullptr || storage == blocks.data(),
                   "the blocks belong to another pool or queue");
    return ids;
  }

  // For tables, which hold block ids whatever pool they are from.
  [[nodiscard]] std::vector<BlockId> block_ids() const {
    if (storage == nullptr) return ids;
    std::vector<BlockId> result;
    result.reserve(ids.size());
    for (const BlockId position : ids) result.push_back(storage[position.index()].block_id);
    return result;
  }

  void push_back(py::handle item) {
    if (!py::isinstance<BlockHandle>(item)) {
      ids.push_back(BlockId(narrow<std::int32_t>(to_int64(item), "block id")));
      return;
    }
    const auto& handle = item.cast<const BlockHandle&>();
    const KVCacheBlock* base = handle.storage->blocks().data();
    PAGED_KV_CHECK(storage == nullptr || storage == base,
                   "the blocks belong to several pools or queues");
    storage = base;
    ids.push_back(handle.position);
  }

 private:
  [[nodiscard]] static std::int64_t to_int64(py::handle item) {
    py::detail::make_caster<std::int64_t> caster;
    if (!caster.load(item, /*convert=*/false)) {
      throw py::type_error("blocks must be KVCacheBlock or int, got " +
                           std::string(py::str(py::type::of(item).attr("__name__"))));
    }
    return py::detail::cast_op<std::int64_t>(caster);
  }
};

// An int32 array with a copy of `ids`.
[[nodiscard]] inline py::array_t<std::int32_t> to_array(std::span<const BlockId> ids) {
  py::array_t<std::int32_t> array(static_cast<py::ssize_t>(ids.size()));
  std::ranges::transform(ids, array.mutable_data(), [](BlockId id) { return id.value(); });
  return array;
}

}  // namespace paged_kv::bindings

namespace pybind11::detail {

template <class Tag, class T>
struct type_caster<paged_kv::StrongId<Tag, T>> {
  PYBIND11_TYPE_CASTER(PYBIND11_TYPE(paged_kv::StrongId<Tag, T>), const_name("int"));

  bool load(handle source, bool /*convert*/) {
    make_caster<T> caster;
    if (!caster.load(source, /*convert=*/false)) return false;
    value = paged_kv::StrongId<Tag, T>(cast_op<T>(caster));
    return true;
  }
  static handle cast(paged_kv::StrongId<Tag, T> id, return_value_policy, handle) {
    return int_(id.value()).release();
  }
};

template <>
struct type_caster<paged_kv::BlockHash> {
  PYBIND11_TYPE_CASTER(paged_kv::BlockHash, const_name("bytes"));

  bool load(handle source, bool /*convert*/) {
    if (!isinstance<bytes>(source)) return false;
    value = paged_kv::bindings::to_block_hash(source);
    return true;
  }
  static handle cast(const paged_kv::BlockHash& hash, return_value_policy, handle) {
    return paged_kv::bindings::to_bytes(hash.digest()).release();
  }
};

template <>
struct type_caster<paged_kv::BlockHashWithGroupId> {
  PYBIND11_TYPE_CASTER(paged_kv::BlockHashWithGroupId, const_name("bytes"));

  bool load(handle source, bool /*convert*/) {
    if (!isinstance<bytes>(source)) return false;
    value = paged_kv::unpack(paged_kv::bindings::as_byte_span(reinterpret_borrow<bytes>(source)));
    return true;
  }
  static handle cast(const paged_kv::BlockHashWithGroupId& key, return_value_policy, handle) {
    return paged_kv::bindings::to_bytes(paged_kv::pack(key)).release();
  }
};

template <>
struct type_caster<paged_kv::bindings::BlockIdsArg> {
  PYBIND11_TYPE_CASTER(paged_kv::bindings::BlockIdsArg,
                       const_name("collections.abc.Iterable[paged_kv._core.KVCacheBlock] | "
                                  "collections.abc.Iterable[int]"));

  bool load(handle source, bool /*convert*/) {
    value = {};
    const bool is_int_array = paged_kv::bindings::visit_int_array(source, [this](std::int64_t id) {
      value.ids.emplace_back(paged_kv::narrow<std::int32_t>(id, "block id"));
    });
    if (is_int_array) return true;
    if (isinstance<array>(source)) throw type_error("an array of block ids must be int32 or int64");
    if (!isinstance<iterable>(source) || isinstance<str>(source)) return false;
    for (const handle item : reinterpret_borrow<iterable>(source)) value.push_back(item);
    return true;
  }
  static handle cast(const paged_kv::bindings::BlockIdsArg&, return_value_policy, handle) = delete;
};

}  // namespace pybind11::detail
