// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/block_table.h"

#include <memory>
#include <optional>
#include <string>

namespace paged_kv::bindings {
namespace {

template <class T>
using ContiguousArray = py::array_t<T, py::array::c_style>;

// A NumPy array on `values`, which belong to the Python object `owner`.
template <class T>
py::array_t<T> view(std::span<T> values, std::vector<py::ssize_t> shape, py::handle owner) {
  return py::array_t<T>(std::move(shape), values.data(), owner);
}

template <class T>
std::span<const T> as_span(const ContiguousArray<T>& array, const char* name) {
  PAGED_KV_CHECK(array.ndim() == 1, name, " must have one dimension, got ", array.ndim());
  return {array.data(), static_cast<std::size_t>(array.size())};
}

std::span<std::int32_t> as_mutable_span(ContiguousArray<std::int32_t>& array) {
  return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

std::unique_ptr<BlockTable> make_block_table(std::int64_t block_size, std::int64_t max_num_reqs,
                                             std::int64_t max_num_blocks_per_req,
                                             std::int64_t max_num_batched_tokens,
                                             std::optional<std::int64_t> kernel_block_size,
                                             std::optional<ContiguousArray<std::int32_t>> memory) {
  const BlockTableOptions options{.block_size = block_size,
                                  .max_num_reqs = max_num_reqs,
                                  .max_num_blocks_per_req = max_num_blocks_per_req,
                                  .max_num_batched_tokens = max_num_batched_tokens,
                                  .kernel_block_size = kernel_block_size.value_or(block_size)};
  if (!memory) return std::make_unique<BlockTable>(options);
  return std::make_unique<BlockTable>(options, as_mutable_span(*memory));
}

void bind_rows(py::class_<BlockTable>& table) {
  table
      .def(
          "append_row",
          [](BlockTable& self, const BlockIdsArg& block_ids, std::int64_t row_idx) {
            self.append_row(block_ids.block_ids(), row_idx);
          },
          py::arg("block_ids"), py::arg("row_idx").noconvert(), "Add blocks at the end of a row.")
      .def(
          "add_row",
          [](BlockTable& self, const BlockIdsArg& block_ids, std::int64_t row_idx) {
            self.add_row(block_ids.block_ids(), row_idx);
          },
          py::arg("block_ids"), py::arg("row_idx").noconvert(), "Make `block_ids` the row.")
      .def(
          "check_append_row",
          [](const BlockTable& self, const BlockIdsArg& block_ids, std::int64_t row_idx) {
            self.check_append_row(block_ids.block_ids(), row_idx);
          },
          py::arg("block_ids"), py::arg("row_idx").noconvert(),
          "Raise what `append_row` would raise, and change nothing.")
      .def(
          "check_add_row",
          [](const BlockTable& self, const BlockIdsArg& block_ids, std::int64_t row_idx) {
            self.check_add_row(block_ids.block_ids(), row_idx);
          },
          py::arg("block_ids"), py::arg("row_idx").noconvert(),
          "Raise what `add_row` would raise, and change nothing.")
      .def(
          "replace_blocks",
          [](BlockTable& self, const BlockIdsArg& block_ids, std::int64_t row_idx,
             std::int64_t start) { self.replace_blocks(block_ids.block_ids(), row_idx, start); },
          py::arg("block_ids"), py::arg("row_idx").noconvert(), py::arg("start").noconvert(),
          R"(Put `block_ids` in the place of as many blocks of a row, from block `start` on.

For a block that was copied before a write, or null blocks for those that have left a window.
)")
      .def("clear_row", &BlockTable::clear_row, py::arg("row_idx").noconvert(), "Empty a row.")
      .def("clear", &BlockTable::clear, "Empty all rows.")
      .def("move_row", &BlockTable::move_row, py::arg("src").noconvert(),
           py::arg("tgt").noconvert(), "Make row `tgt` what row `src` is, and empty `src`.")
      .def("swap_row", &BlockTable::swap_row, py::arg("src").noconvert(),
           py::arg("tgt").noconvert(), "Exchange two rows.");
}

void bind_diffs(py::class_<BlockTable>& table) {
  table
      .def(
          "dirty",
          [](const BlockTable& self, std::int64_t num_reqs) {
            const DirtyBlockTable size = self.dirty(num_reqs);
            return std::pair(size.num_rows, size.num_entries);
          },
          py::arg("num_reqs").noconvert(),
          R"(What has changed in the first `num_reqs` rows since `mark_clean`.

Returns:
    (rows, entries in them). Entries written through `get_numpy_array` are not tracked.
)")
      .def(
          "read_dirty",
          [](const BlockTable& self, std::int64_t num_reqs, ContiguousArray<std::int32_t> out) {
            self.read_dirty(num_reqs, as_mutable_span(out));
          },
          py::arg("num_reqs").noconvert(), py::arg("out").noconvert(),
          R"(Read what has changed, in the form that `ops.apply_block_table_writes` takes.

Args:
    num_reqs: Rows to look at.
    out: int32 ``[3 * rows + entries]``, as `dirty` counts them: the rows, the first changed column
        of each, the running sum of the lengths, the entries. Mutated.
)")
      .def("mark_clean", &BlockTable::mark_clean, py::arg("num_reqs").noconvert(),
           "Forget what has changed in the first `num_reqs` rows: the copy elsewhere has it.")
      .def(
          "commit_dirty",
          [](BlockTable& self, std::int64_t num_reqs, ContiguousArray<std::int32_t> out) {
            return self.commit_dirty(num_reqs, as_mutable_span(out));
          },
          py::arg("num_reqs").noconvert(), py::arg("out").noconvert(),
          R"(Bring the first `num_reqs` rows of a copy on the host up to date: `dirty`, `read_dirty`,
the writes and `mark_clean` in one call.

Args:
    num_reqs: Rows to look at.
    out: int32 ``[max_num_reqs, width]``, contiguous. Mutated where rows have changed.

Returns:
    Whether anything had changed.
)");
}

void bind_output(py::class_<BlockTable>& table) {
  table
      .def(
          "compute_slot_mapping",
          [](BlockTable& self, std::int64_t num_reqs,
             const ContiguousArray<std::int32_t>& query_start_loc,
             const ContiguousArray<std::int64_t>& positions) {
            self.compute_slot_mapping(num_reqs, as_span(query_start_loc, "query_start_loc"),
                                      as_span(positions, "positions"));
          },
          py::arg("num_reqs").noconvert(), py::arg("query_start_loc").noconvert(),
          py::arg("positions").noconvert(),
          R"(Write the slots of a batch to `slot_mapping`, and -1 after its last token.

Args:
    num_reqs: Row r of the table is request r of the batch.
    query_start_loc: int32 ``[num_reqs + 1]``, contiguous: tokens of request r are
        ``query_start_loc[r] .. query_start_loc[r + 1]``.
    positions: int64 ``[num_tokens]``, contiguous: position of each token in its sequence.

Raises:
    ValueError: a position that the row's blocks do not cover. Nothing has changed.
)")
      .def(
          "commit_block_table",
          [](const BlockTable& self, std::int64_t num_reqs, ContiguousArray<std::int32_t> out) {
            PAGED_KV_CHECK(out.ndim() == 2 && out.shape(1) == self.width(),
                           "out: expected shape (num_rows, ", self.width(), "), got ",
                           std::string(py::str(out.attr("shape"))));
            self.commit_block_table(num_reqs, as_mutable_span(out));
          },
          py::arg("num_reqs").noconvert(), py::arg("out").noconvert(),
          R"(Copy the first `num_reqs` rows, over the full width, to `out`.

Args:
    num_reqs: Number of rows.
    out: int32 ``[>= num_reqs, width]``, contiguous; e.g. pinned memory. Mutated.
)")
      .def(
          "get_numpy_array",
          [](const py::object& self) {
            auto& block_table = self.cast<BlockTable&>();
            return view(block_table.table(),
                        {block_table.options().max_num_reqs, block_table.width()}, self);
          },
          "The rows: int32 ``[max_num_reqs, width]`` of kernel blocks. A view, not a copy.")
      .def_property_readonly(
          "slot_mapping",
          [](const py::object& self) {
            auto& block_table = self.cast<BlockTable&>();
            return view(block_table.slot_mapping(), {block_table.options().max_num_batched_tokens},
                        self);
          },
          "int64 ``[max_num_batched_tokens]``, from `compute_slot_mapping`. A view, not a copy.")
      .def_property_readonly(
          "num_blocks_per_row",
          [](const BlockTable& self) {
            const auto counts = self.num_blocks_per_row();
            return py::array_t<std::int32_t>(static_cast<py::ssize_t>(counts.size()),
                                             counts.data());
          },
          "int32 ``[max_num_reqs]``, in kernel blocks. A copy.")
      .def("check_integrity", &BlockTable::check_integrity,
           "Raise InvariantError if the rows are inconsistent, for tests.");
}

}  // namespace

void bind_block_table(py::module_& m) {
  m.def("get_block_table_width", &get_block_table_width, py::arg("max_num_blocks").noconvert(),
        py::arg("block_size").noconvert(), py::kw_only(),
        py::arg("token_alignment").noconvert() = 128,
        R"(Blocks of a row, rounded up to hold a multiple of `token_alignment` tokens (None: not).

Example:
    >>> get_block_table_width(5, 16)
    8
)");
  py::class_<BlockTable> table(
      m, "BlockTable",
      R"(The block tables of a batch, one row a request, in one int32 buffer.

Where kernels work on smaller blocks than the pool hands out, block b of the pool is split into
``ratio = block_size / kernel_block_size`` kernel blocks ``b * ratio + j``. Methods take blocks of
the pool; rows hold kernel blocks. Entries after a row's blocks are 0, the null block.

Args:
    block_size: Tokens per block of the pool.
    max_num_reqs: Number of rows.
    max_num_blocks_per_req: Blocks of the pool that fit in a row.
    max_num_batched_tokens: Length of `slot_mapping`.
    kernel_block_size: Tokens per kernel block; divides `block_size`. Default: the same.
    memory: int32 ``[max_num_reqs, width]``, contiguous: where the rows lie, e.g. pinned memory. Kept
        alive and set to 0. Default: the table's own.

Raises:
    ValueError: blocks that do not fit in a row, or an id out of range. Nothing has changed.
    IndexError: no such row.

Source:
    vLLM 0.32 v1/worker/block_table.py::BlockTable.

Example:
    >>> table = BlockTable(16, max_num_reqs=2, max_num_blocks_per_req=4, max_num_batched_tokens=8)
    >>> table.append_row([3, 7], row_idx=1)
    >>> table.get_numpy_array()[1].tolist()
    [3, 7, 0, 0]
)");
  table
      .def(py::init(&make_block_table), py::arg("block_size").noconvert(),
           py::arg("max_num_reqs").noconvert(), py::arg("max_num_blocks_per_req").noconvert(),
           py::arg("max_num_batched_tokens").noconvert(),
           py::arg("kernel_block_size").noconvert() = py::none(),
           py::arg("memory").noconvert() = py::none(), py::keep_alive<1, 7>())
      .def_property_readonly(
          "block_size", [](const BlockTable& self) { return self.options().block_size; },
          "Tokens per block of the pool.")
      .def_property_readonly(
          "kernel_block_size",
          [](const BlockTable& self) { return self.options().kernel_block_size; },
          "Tokens per kernel block.")
      .def_property_readonly(
          "max_num_reqs", [](const BlockTable& self) { return self.options().max_num_reqs; },
          "Number of rows.")
      .def_property_readonly(
          "max_num_blocks_per_req",
          [](const BlockTable& self) { return self.options().max_num_blocks_per_req; },
          "Blocks of the pool that fit in a row.")
      .def_property_readonly("width", &BlockTable::width, "Kernel blocks that fit in a row.");
  bind_rows(table);
  bind_diffs(table);
  bind_output(table);
}

}  // namespace paged_kv::bindings
