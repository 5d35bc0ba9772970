// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "hash_args.h"
#include "paged_kv/request_batch.h"
#include "python_manager.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paged_kv::bindings {
namespace {

using Int32Array = py::array_t<std::int32_t, py::array::c_style>;

std::span<const std::int32_t> as_span(const Int32Array& array, const char* name) {
  PAGED_KV_CHECK(array.ndim() == 1, name, " must have one dimension, got ", array.ndim());
  return {array.data(), static_cast<std::size_t>(array.size())};
}

// The Python object of a native one that came from Python.
template <class T>
py::object object_of(T* native) {
  return py::cast(native, py::return_value_policy::reference);
}

// Tables as Python gives them; a type of its own, so that the stub can name what is accepted.
class TablesObject : public py::object {
  PYBIND11_OBJECT_DEFAULT(TablesObject, py::object, is_any_object)
};

// The native table, of itself or of a table whose rows it is.
BlockTable* to_native(const py::object& table) {
  const py::object native =
      py::isinstance<BlockTable>(table) ? table : py::getattr(table, "host_table", py::none());
  if (!py::isinstance<BlockTable>(native)) {
    throw py::type_error("block_tables: expected a BlockTable, got " +
                         std::string(py::str(py::type::of(table).attr("__name__"))));
  }
  return native.cast<BlockTable*>();
}

// The batch, with what it refers to: the objects of Python, whose hashers may need all of them.
class PythonBatch {
 public:
  PythonBatch(const PythonManager& manager, const TablesObject& block_tables)
      : pool_(manager.pool()) {
    std::vector<BlockTable*> natives;
    for (const py::handle item : block_tables) {
      const auto table = py::reinterpret_borrow<py::object>(item);
      natives.push_back(to_native(table));
      block_tables_.push_back(object_of(natives.back()));
    }
    batch_ = std::make_unique<RequestBatch>(manager.manager(), std::move(natives));
    requests_.resize(static_cast<std::size_t>(batch_->max_num_reqs()));
  }

  [[nodiscard]] const RequestBatch& batch() const { return *batch_; }

  void add(Request& request, std::int64_t row_idx) {
    batch_->add(request, row_idx);
    requests_[static_cast<std::size_t>(row_idx)] = object_of(&request);
  }
  void remove(std::int64_t row_idx) {
    batch_->remove(row_idx);
    requests_[static_cast<std::size_t>(row_idx)] = py::object();
  }
  void free(const Int32Array& rows) {
    batch_->free(as_span(rows, "rows"));
    for (const std::int32_t row_idx : as_span(rows, "rows")) {
      requests_[static_cast<std::size_t>(row_idx)] = py::object();
    }
  }

  void append_output_token_ids(const Int32Array& rows, const Int32Array& token_ids,
                               const std::optional<Int32Array>& num_tokens) {
    batch_->append_output_token_ids(
        as_span(rows, "rows"), as_span(token_ids, "token_ids"),
        num_tokens ? as_span(*num_tokens, "num_tokens") : std::span<const std::int32_t>());
  }

  Int32Array allocate_slots(const Int32Array& rows, std::span<const std::int32_t> num_new_tokens,
                            const BatchAllocationArgs& args) {
    batch_->allocate_slots(as_span(rows, "rows"), num_new_tokens, args, refused_);
    return Int32Array(static_cast<py::ssize_t>(refused_.size()), refused_.data());
  }
  Int32Array allocate_slots_of_each(const Int32Array& rows, std::int32_t num_new_tokens,
                                    const BatchAllocationArgs& args) {
    num_new_tokens_.assign(as_span(rows, "rows").size(), num_new_tokens);
    return allocate_slots(rows, num_new_tokens_, args);
  }

 private:
  PoolPtr pool_;  // keeps the manager alive
  std::vector<py::object> block_tables_;
  std::vector<py::object> requests_;  // by row
  std::unique_ptr<RequestBatch> batch_;
  std::vector<std::int32_t> num_new_tokens_;
  std::vector<std::int32_t> refused_;
};

void bind_step(py::class_<PythonBatch>& batch) {
  batch
      .def("append_output_token_ids", &PythonBatch::append_output_token_ids,
           py::arg("rows").noconvert(), py::arg("token_ids").noconvert(),
           py::arg("num_tokens").noconvert() = py::none(),
           R"(Append tokens to the requests of `rows`, and hash the blocks that they fill.

Args:
    rows: int32 ``[n]``, contiguous.
    token_ids: int32 ``[n]``, or those of all requests one after the other.
    num_tokens: int32 ``[n]``: how many are each request's. Default: one.

Raises:
    IndexError: no such row. Nothing has changed.
    ValueError: a row without a request or named twice, or lengths that do not fit. Nothing has
        changed.
)")
      .def(
          "allocate_slots",
          [](PythonBatch& self, const Int32Array& rows, const Int32Array& num_new_tokens,
             std::int64_t num_lookahead_tokens, std::int64_t reserved_blocks,
             bool stop_at_refusal) {
            return self.allocate_slots(rows, as_span(num_new_tokens, "num_new_tokens"),
                                       {num_lookahead_tokens, reserved_blocks, stop_at_refusal});
          },
          py::arg("rows").noconvert(), py::arg("num_new_tokens").noconvert(),
          py::arg("num_lookahead_tokens").noconvert() = 0,
          py::arg("reserved_blocks").noconvert() = 0,
          py::arg("stop_at_refusal").noconvert() = false,
          "`num_new_tokens`: int32 ``[n]``, contiguous.")
      .def(
          "allocate_slots",
          [](PythonBatch& self, const Int32Array& rows, std::int32_t num_new_tokens,
             std::int64_t num_lookahead_tokens, std::int64_t reserved_blocks,
             bool stop_at_refusal) {
            return self.allocate_slots_of_each(
                rows, num_new_tokens, {num_lookahead_tokens, reserved_blocks, stop_at_refusal});
          },
          py::arg("rows").noconvert(), py::arg("num_new_tokens").noconvert(),
          py::arg("num_lookahead_tokens").noconvert() = 0,
          py::arg("reserved_blocks").noconvert() = 0,
          py::arg("stop_at_refusal").noconvert() = false,
          R"(Do what `KVCacheManager.allocate_slots` does, for the requests of `rows` in this order.

The new tokens count as computed from then on (`num_computed_tokens`), blocks that they fill become
findable, and the new blocks are in the requests' rows of all tables.

Args:
    rows: int32 ``[n]``, contiguous.
    num_new_tokens: Tokens to compute, drafts included: of every request.
    num_lookahead_tokens: Slots for drafts to come, for each.
    reserved_blocks: Blocks that stay free for others.
    stop_at_refusal: Leave the requests after the first refused one alone: a scheduler that makes
        room and goes on with ``rows[refused[0]:]`` takes the decisions that it would take request
        by request.

Returns:
    int32: the places in `rows` of the requests that got no slots, ascending. They keep their blocks
    and tokens; blocks that had left their windows were given back.

Raises:
    IndexError: no such row. Nothing has changed.
    ValueError: a row without a request or named twice, or what `KVCacheManager.allocate_slots`
        raises for any of the requests. Nothing has changed.

Notes:
    Cost: O(n), and the blocks taken, cached or given back. The GIL is held: a step is shorter than
    it takes to get it back.
)")
      .def(
          "free", &PythonBatch::free, py::arg("rows").noconvert(),
          R"(Do what `KVCacheManager.free` and `remove` do, for the requests of `rows` in this order.

Raises:
    IndexError: no such row. Nothing has changed.
    ValueError: a row without a request or named twice. Nothing has changed.
)");
}

}  // namespace
}  // namespace paged_kv::bindings

namespace pybind11::detail {

template <>
struct handle_type_name<paged_kv::bindings::TablesObject> {
  static constexpr auto name = const_name(
      "collections.abc.Iterable[paged_kv._core.BlockTable | paged_kv.block_table.BlockTable]");
};

}  // namespace pybind11::detail

namespace paged_kv::bindings {

void bind_request_batch(py::module_& m) {
  py::class_<PythonBatch> batch(
      m, "RequestBatch",
      R"(The requests that an engine runs, each with a row of the block tables: a step is one call.

A request has its row from `add` to `remove` or `free`, the same in the table of every cache group.
Meanwhile its blocks are given back, and its rows written, through the batch only; slots may be
allocated through the manager too, the rows follow with the next `allocate_slots`. Blocks that have
left a sliding window are null blocks (0) in the rows. A call that raises changes no request and no
row, also if it is for want of memory or by a hasher of Python.

Args:
    kv_cache_manager: The manager of all requests.
    block_tables: One table per cache group, with its block size and rows for `max_model_len` tokens:
        tables of this module, or of `paged_kv.block_table`, a `MultiGroupBlockTable` or the
        `host_tables` of a `BlockTables`. The ids of a step are then in the rows that the next commit
        sends to the device.

Raises:
    ValueError: tables that do not fit the groups.
    TypeError: something else than tables.

Example:
    >>> import numpy as np
    >>> spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
    >>> manager = KVCacheManager(config, 64, 4, 4, enable_caching=False)
    >>> table = BlockTable(4, max_num_reqs=8, max_num_blocks_per_req=16, max_num_batched_tokens=8)
    >>> batch = RequestBatch(manager, [table])
    >>> batch.add(Request("a", [1, 2, 3]), row_idx=5)
    >>> rows = np.array([5], np.int32)
    >>> batch.allocate_slots(rows, 3)
    array([], dtype=int32)
    >>> batch.append_output_token_ids(rows, np.array([7], np.int32))
    >>> table.get_numpy_array()[5, :2].tolist()
    [1, 0]
    >>> batch.free(rows)
    >>> manager.usage
    0.0
)");
  batch
      .def(py::init<const PythonManager&, const TablesObject&>(), py::arg("kv_cache_manager"),
           py::arg("block_tables"))
      .def("add", &PythonBatch::add, py::arg("request"), py::arg("row_idx").noconvert(),
           R"(Give a request an empty row, and write the blocks that it holds there.

Raises:
    IndexError: no such row. Nothing has changed.
    ValueError: a row that is not empty, or a request that is in the batch. Nothing has changed.
)")
      .def("remove", &PythonBatch::remove, py::arg("row_idx").noconvert(),
           "Take a request out and empty its row. It keeps its blocks.")
      .def_property_readonly(
          "num_reqs", [](const PythonBatch& self) { return self.batch().num_reqs(); },
          "Requests in the batch.")
      .def_property_readonly(
          "max_num_reqs", [](const PythonBatch& self) { return self.batch().max_num_reqs(); },
          "Number of rows.")
      .def(
          "check_integrity", [](const PythonBatch& self) { self.batch().check_integrity(); },
          "Raise InvariantError if the rows are inconsistent, for tests.");
  bind_step(batch);
}

}  // namespace paged_kv::bindings
