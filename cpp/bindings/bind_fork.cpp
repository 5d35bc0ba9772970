// SPDX-License-Identifier: Apache-2.0
#include "casters.h"
#include "python_manager.h"

#include <optional>
#include <tuple>
#include <vector>

namespace paged_kv::bindings {
namespace {

using CopyTuple = std::tuple<std::int32_t, std::int32_t, std::int32_t>;

std::optional<std::vector<CopyTuple>> fork(const PythonManager& self, const Request& parent,
                                           Request& child) {
  const auto copies = self.manager().fork(parent, child);
  if (!copies) return std::nullopt;
  std::vector<CopyTuple> result;
  for (const GroupBlockCopy& copy : *copies) {
    result.emplace_back(copy.group_id.value(), copy.src.value(), copy.dst.value());
  }
  return result;
}

}  // namespace

void bind_fork(py::class_<PythonManager>& manager) {
  manager.def("fork", &fork, py::arg("parent"), py::arg("child"),
              R"(Let a request go on where another is, for parallel sampling and beam search.

In every group the child shares the parent's blocks. A block that will be written again, as a rule the
last if it is filled in part, is not shared: the child takes a new one, and its content is to be copied.
Blocks after the computed tokens stay the parent's.

Args:
    parent: Holds the blocks of its `num_computed_tokens` tokens; these must be final, no drafts.
    child: Holds no blocks, and begins with those tokens; without caching, it is for the caller to see
        that adapter and inputs are the parent's too. Its `num_computed_tokens` becomes the parent's.

Returns:
    The copies, each ``(group, source block, destination block)``, at most one a group unless a draft
    model looks ahead (`num_prefill_lookahead`). They must run after the parent's steps under way and
    before the next step of either, in the layers of their group, e.g. with `ops.copy_blocks`. None,
    and no change, if too few blocks are free; the watermark does not count.

Raises:
    ValueError: the parent has no computed tokens or lacks their blocks, the child holds blocks or
        differs from the parent in those tokens, or with caching in what else names their blocks.
        Nothing has changed.

Notes:
    Cost: linear in the blocks of the computed tokens, which are compared. For metrics and eviction
    policies the shared blocks have been used once more; no event tells of them.

Example:
    >>> spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
    >>> manager = KVCacheManager(config, 64, 4, 4, enable_caching=False)
    >>> first, second = Request("a", range(6)), Request("b", range(6))
    >>> _ = manager.allocate_slots(first, 6)
    >>> first.num_computed_tokens = 6
    >>> manager.fork(first, second)
    [(0, 2, 3)]
    >>> manager.get_block_ids("a"), manager.get_block_ids("b")
    (([1, 2],), ([1, 3],))
)");
}

}  // namespace paged_kv::bindings
