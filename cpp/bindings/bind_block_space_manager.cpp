// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "paged_kv/block_space_manager.h"

#include <memory>
#include <vector>

#include <pybind11/native_enum.h>
#include <pybind11/typing.h>

namespace paged_kv::bindings {
namespace {

using Manager = BlockSpaceManager;
using SeqIds = std::vector<SeqId>;

// int64 [n, 2], as copy_blocks and swap_blocks take it.
py::array_t<std::int64_t> to_block_mapping(std::span<const BlockCopy> copies) {
  py::array_t<std::int64_t> mapping({static_cast<py::ssize_t>(copies.size()), py::ssize_t{2}});
  auto rows = mapping.mutable_unchecked<2>();
  for (std::size_t i = 0; i < copies.size(); ++i) {
    rows(static_cast<py::ssize_t>(i), 0) = copies[i].src.value();
    rows(static_cast<py::ssize_t>(i), 1) = copies[i].dst.value();
  }
  return mapping;
}

void bind_allocation(py::class_<Manager>& manager) {
  manager
      .def("can_allocate", &Manager::can_allocate, py::arg("num_tokens").noconvert(),
           R"(Whether a prompt of `num_tokens` fits, whatever the number of sequences that share it.

Returns:
    OK, LATER (when others have freed blocks) or NEVER (not even into an empty pool).
)")
      .def(
          "allocate",
          [](Manager& self, const SeqIds& seq_ids, std::int64_t num_tokens) {
            self.allocate(seq_ids, num_tokens);
          },
          py::arg("seq_ids"), py::arg("num_tokens").noconvert(),
          R"(New sequences that share one prompt, e.g. the n samples of a request.

Raises:
    ValueError: a sequence that exists already. Nothing has changed.
    OutOfBlocksError: too few blocks. Nothing has changed. The watermark is not enforced here.
)")
      .def(
          "can_append_slots",
          [](const Manager& self, const SeqIds& seq_ids, std::int64_t num_new_tokens) {
            return self.can_append_slots(seq_ids, num_new_tokens);
          },
          py::arg("seq_ids"), py::arg("num_new_tokens").noconvert() = 1,
          "Whether `append_slots` would succeed. Exact, copies on write included.")
      .def(
          "append_slots",
          [](Manager& self, const SeqIds& seq_ids, std::int64_t num_new_tokens) {
            return to_block_mapping(self.append_slots(seq_ids, num_new_tokens));
          },
          py::arg("seq_ids"), py::arg("num_new_tokens").noconvert() = 1,
          R"(Room for `num_new_tokens` more tokens of each sequence.

A part-filled last block that others hold too is replaced by a new block of the sequence's own.

Returns:
    The copies that must run before the tokens are written: int64 ``[n, 2]`` of (source,
    destination), as `ops.copy_blocks` takes it.

Raises:
    OutOfBlocksError: too few blocks. Nothing has changed.
)")
      .def("fork", &Manager::fork, py::arg("parent"), py::arg("child"),
           "`child` becomes a sequence with the tokens and blocks of `parent`. O(blocks of it).")
      .def("free", &Manager::free, py::arg("seq_id"),
           R"(Forget a sequence. One that does not exist is no error.

Blocks that nobody else holds are handed out next, those of the end of the sequence first.
)")
      .def("reset", &Manager::reset, "Forget all sequences.");
}

void bind_swapping(py::class_<Manager>& manager) {
  manager
      .def(
          "can_swap_out",
          [](const Manager& self, const SeqIds& seq_ids) { return self.can_swap_out(seq_ids); },
          py::arg("seq_ids"), "Whether `swap_out` would succeed.")
      .def(
          "swap_out",
          [](Manager& self, const SeqIds& seq_ids) {
            return to_block_mapping(self.swap_out(seq_ids));
          },
          py::arg("seq_ids"),
          R"(Move sequences to blocks of the CPU.

Those that share blocks go on sharing them with each other, not with sequences that stay.

Returns:
    int64 ``[n, 2]`` of (gpu block, cpu block), as `ops.swap_blocks` takes it. Run it before
    anything else is written to the cache: the blocks may be handed out again at once.

Raises:
    OutOfBlocksError: too few blocks. Nothing has changed.
)")
      .def(
          "can_swap_in",
          [](const Manager& self, const SeqIds& seq_ids, std::int64_t num_new_tokens) {
            return self.can_swap_in(seq_ids, num_new_tokens);
          },
          py::arg("seq_ids"), py::arg("num_new_tokens").noconvert() = 1,
          "Whether `swap_in` and then `append_slots` would succeed: OK, LATER or NEVER.")
      .def(
          "swap_in",
          [](Manager& self, const SeqIds& seq_ids) {
            return to_block_mapping(self.swap_in(seq_ids));
          },
          py::arg("seq_ids"),
          R"(Move sequences back to blocks of the GPU.

Returns:
    int64 ``[n, 2]`` of (cpu block, gpu block), as `ops.swap_blocks` takes it.

Raises:
    OutOfBlocksError: too few blocks. Nothing has changed.
)");
}

void bind_queries(py::class_<Manager>& manager) {
  manager
      .def_property_readonly(
          "block_size", [](const Manager& self) { return self.options().block_size; },
          "Tokens per block.")
      .def("get_num_free_gpu_blocks", &Manager::get_num_free_gpu_blocks,
           "Blocks of the GPU that nobody holds.")
      .def("get_num_free_cpu_blocks", &Manager::get_num_free_cpu_blocks,
           "Blocks of the CPU that nobody holds.")
      .def("__contains__", &Manager::contains, py::arg("seq_id"))
      .def("get_num_tokens", &Manager::get_num_tokens, py::arg("seq_id"),
           "Tokens that a sequence has room for.")
      .def("get_device", &Manager::get_device, py::arg("seq_id"), "Whose blocks a sequence holds.")
      .def(
          "get_block_table",
          [](const Manager& self, SeqId seq_id) { return to_array(self.get_block_table(seq_id)); },
          py::arg("seq_id"), "The blocks of a sequence in order: int32 array, a copy.")
      .def("get_seq_ids", &Manager::get_seq_ids, "All sequences, in no order.")
      .def("check_integrity", &Manager::check_integrity,
           "Raise InvariantError if the state is inconsistent. O(all blocks), for tests.");
}

}  // namespace

void bind_block_space_manager(py::module_& m) {
  py::native_enum<AllocStatus>(
      m, "AllocStatus", "enum.Enum",
      "Whether something fits.\n\n"
      "OK: now. LATER: once others have freed blocks. NEVER: not even into "
      "an empty pool.\n")
      .value("OK", AllocStatus::kOk)
      .value("LATER", AllocStatus::kLater)
      .value("NEVER", AllocStatus::kNever)
      .finalize();
  py::native_enum<BlockDevice>(m, "BlockDevice", "enum.Enum",
                               "Whose blocks a sequence holds.\n\nSee BlockSpaceManager.\n")
      .value("GPU", BlockDevice::kGpu)
      .value("CPU", BlockDevice::kCpu)
      .finalize();
  py::class_<Manager> manager(
      m, "BlockSpaceManager",
      R"(Who holds which block, for sequences that branch: parallel sampling and beam search.

Forked sequences share their blocks. Full blocks are shared for good; a block that is filled in part is
copied before the first write by a sequence that is not its only holder (copy-on-write). Nothing here
touches tensors: methods return the copies that the caller must run, before anything is written to the
cache for a later call. The copies of one call are independent of each other.

Sequences have numbers of the caller's choice. Methods that take several work as if called for one
after the other, but change all or nothing.

Args:
    block_size: Tokens per block.
    num_gpu_blocks: Blocks of the cache, block 0 (the null block, never handed out) included.
    num_cpu_blocks: Likewise of the swap space. 1: none.
    watermark: Share of `num_gpu_blocks` that `can_allocate` and `can_swap_in` leave free.

Raises:
    ValueError: a sequence that does not exist, is given twice or lies on the wrong device. Nothing
        has changed.

Source:
    vLLM 0.5 core/block_manager_v1.py::BlockSpaceManagerV1.

Example:
    >>> manager = BlockSpaceManager(block_size=4, num_gpu_blocks=8)
    >>> manager.allocate([0], num_tokens=6)
    >>> manager.fork(0, 1)
    >>> manager.append_slots([0, 1]).tolist()
    [[2, 3]]
    >>> manager.get_block_table(0).tolist(), manager.get_block_table(1).tolist()
    ([1, 3], [1, 2])
)");
  manager.def(
      py::init([](std::int64_t block_size, std::int32_t num_gpu_blocks, std::int32_t num_cpu_blocks,
                  double watermark) {
        return std::make_unique<Manager>(BlockSpaceManagerOptions{.block_size = block_size,
                                                                  .num_gpu_blocks = num_gpu_blocks,
                                                                  .num_cpu_blocks = num_cpu_blocks,
                                                                  .watermark = watermark});
      }),
      py::arg("block_size").noconvert(), py::arg("num_gpu_blocks").noconvert(),
      py::arg("num_cpu_blocks").noconvert() = 1, py::arg("watermark") = 0.01);
  bind_allocation(manager);
  bind_swapping(manager);
  bind_queries(manager);
}

}  // namespace paged_kv::bindings
