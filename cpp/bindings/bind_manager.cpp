// SPDX-License-Identifier: Apache-2.0
#include "bindings.h"
#include "casters.h"
#include "eviction_policy_arg.h"
#include "kv_event.h"
#include "process_contents.h"
#include "python_manager.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace paged_kv::bindings {
namespace {

using IdList = py::typing::List<py::int_>;
using IdTuple = py::typing::Tuple<IdList, py::ellipsis>;
using ManagerClass = py::class_<PythonManager>;

IdList to_list(std::span<const BlockId> ids) {
  IdList list(ids.size());
  for (std::size_t i = 0; i < ids.size(); ++i) list[i] = py::int_(ids[i].value());
  return list;
}

IdTuple to_id_tuple(const KVCacheBlocks& blocks) {
  py::tuple result(blocks.block_ids.size());
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = to_list(blocks.block_ids[i]);
  return IdTuple(result);
}

std::optional<BlocksOfStorage> allocate_slots(
    const PythonManager& self, const Request& request, std::int64_t num_new_tokens,
    std::int64_t num_new_computed_tokens, const BlocksOfStorage* new_computed_blocks,
    std::int64_t num_lookahead_tokens, std::int64_t num_external_computed_tokens,
    bool delay_cache_blocks, bool full_sequence_must_fit, std::int64_t reserved_blocks,
    bool has_scheduled_reqs) {
  auto blocks = self.manager().allocate_slots(
      request,
      {.num_new_tokens = num_new_tokens,
       .num_new_computed_tokens = num_new_computed_tokens,
       .new_computed_blocks =
           new_computed_blocks != nullptr ? &self.from_python(*new_computed_blocks) : nullptr,
       .num_lookahead_tokens = num_lookahead_tokens,
       .num_external_computed_tokens = num_external_computed_tokens,
       .delay_cache_blocks = delay_cache_blocks,
       .full_sequence_must_fit = full_sequence_must_fit,
       .reserved_blocks = reserved_blocks,
       .has_scheduled_reqs = has_scheduled_reqs});
  if (!blocks) return std::nullopt;
  return self.to_python(std::move(*blocks));
}

void bind_allocation(ManagerClass& manager) {
  manager
      .def(
          "get_computed_blocks",
          [](const PythonManager& self, const Request& request) {
            ComputedBlocks computed = self.manager().get_computed_blocks(request);
            return py::typing::Tuple<BlocksOfStorage, py::int_, py::int_>(
                py::make_tuple(self.to_python(std::move(computed.blocks)), computed.num_tokens,
                               computed.shared_prefix_boundary));
          },
          py::arg("request"),
          R"(The longest cached prefix of a request that holds no blocks.

At least one token is left to compute. Nothing changes, so `allocate_slots` must come before the
next allocation.

Returns:
    (blocks, num_tokens, shared_prefix_boundary): the blocks of the hit, null blocks where none is
    needed; its tokens; and where a prefix ends that others share but a sliding-window group has not
    kept, to be stored in the request (0: none).

Notes:
    Cost: one lookup per block of the hit; with sliding windows, per block of the request at most.
)")
      .def("allocate_slots", &allocate_slots, py::arg("request"),
           py::arg("num_new_tokens").noconvert(),
           py::arg("num_new_computed_tokens").noconvert() = 0,
           py::arg("new_computed_blocks") = py::none(),
           py::arg("num_lookahead_tokens").noconvert() = 0,
           py::arg("num_external_computed_tokens").noconvert() = 0,
           py::arg("delay_cache_blocks").noconvert() = false,
           py::arg("full_sequence_must_fit").noconvert() = false,
           py::arg("reserved_blocks").noconvert() = 0,
           py::arg("has_scheduled_reqs").noconvert() = true,
           R"(Give a request slots for its next tokens.

The hit is taken over before blocks are taken, so that taking blocks cannot evict it. Blocks that the
tokens fill become findable at once, as far as the request's tokens are known: drafts are not cached.

Args:
    request: `num_computed_tokens`, `num_in_flight_tokens` and `status` are read.
    num_new_tokens: Tokens to compute, drafts included.
    num_new_computed_tokens: Tokens of `new_computed_blocks`.
    new_computed_blocks: From `get_computed_blocks`, for a request that holds no blocks.
    num_lookahead_tokens: Slots for drafts to come.
    num_external_computed_tokens: Tokens computed elsewhere, to be loaded into blocks.
    delay_cache_blocks: Do not cache yet: `cache_blocks` follows when the tokens have arrived.
    full_sequence_must_fit: Refuse unless all tokens that the request has now would fit.
    reserved_blocks: Blocks that stay free for others.
    has_scheduled_reqs: Whether others run in this step: the watermark counts.

Returns:
    The blocks that were taken for the new tokens, possibly none; None if too few are free. Then
    nothing has changed, except that blocks which the request no longer needs were given back.

Raises:
    ValueError: nothing to allocate, a number out of range, a hit for a request that holds blocks, or
        a request without hashes to cache it by. Nothing has changed.

Notes:
    Cost: linear in the blocks taken, adopted, cached or given back.
)")
      .def(
          "cache_blocks",
          [](const PythonManager& self, const Request& request, std::int64_t num_computed_tokens) {
            self.manager().cache_blocks(request, num_computed_tokens);
          },
          py::arg("request"), py::arg("num_computed_tokens").noconvert(),
          "Make the full blocks of the first `num_computed_tokens` tokens findable.");
}

void bind_release(ManagerClass& manager) {
  manager
      .def(
          "free",
          [](const PythonManager& self, const Request& request) { self.manager().free(request); },
          py::arg("request"),
          "Give back a request's blocks, the last first. One without blocks is left alone.")
      .def(
          "pop_blocks_for_free",
          [](const PythonManager& self, const Request& request) {
            return to_handles(self.pool(), self.manager().pop_blocks_for_free(request));
          },
          py::arg("request"),
          R"(Forget a request, whose blocks stay held.

Returns:
    Its blocks, group after group. ``block_pool.free_blocks(reversed(blocks))`` must follow.
)")
      .def(
          "remove_skipped_blocks",
          [](const PythonManager& self, const std::string& request_id,
             std::int64_t processed_computed_tokens) {
            self.manager().remove_skipped_blocks(request_id, processed_computed_tokens);
          },
          py::arg("request_id"), py::arg("processed_computed_tokens").noconvert(),
          "Give back blocks that no token after the first `processed_computed_tokens` needs.")
      .def(
          "evict_blocks",
          [](const PythonManager& self, const BlockIdsArg& block_ids) {
            self.manager().evict_blocks(block_ids.in(self.manager().block_pool().blocks()));
          },
          py::arg("block_ids"), "Remove blocks from the prefix cache; holders keep them.")
      .def(
          "reset_prefix_cache",
          [](const PythonManager& self) { return self.manager().reset_prefix_cache(); },
          "Empty the prefix cache. False, and no change, while any block is held.");
}

void bind_queries(ManagerClass& manager) {
  manager
      .def(
          "why_no_hit",
          [](const PythonManager& self, const Request& request) {
            return self.manager().why_no_hit(request);
          },
          py::arg("request"),
          R"(Why `get_computed_blocks` finds no more than it does.

Names the first block that the next longer hit lacks, and the reason. The next longer hit is that
which all groups with full attention have, or else one block more than the hit. Nothing changes:
no holders, statistics or events.

Returns:
    The report.

Notes:
    For operators: do not show a report to the request's sender, for it may tell what requests with
    another salt have computed. A block is said to be cached without an adapter, salt, medium or
    embedding if hashing the request without it (needs the native hasher) gives a hit; what is cached
    with *another* one cannot be told from what is not cached.
    Cost: the lookups of `get_computed_blocks`, once more for each group; and at most five times the
    hashing of the tokens up to the missing block.
)")
      .def(
          "get_blocks",
          [](const PythonManager& self, const std::string& request_id) {
            return self.to_python(self.manager().get_blocks(request_id));
          },
          py::arg("request_id"), "A request's blocks; none if it is unknown.")
      .def(
          "get_block_ids",
          [](const PythonManager& self, const std::string& request_id) {
            return to_id_tuple(self.manager().get_blocks(request_id));
          },
          py::arg("request_id"), "A request's block ids: a tuple with one list a group.")
      .def(
          "get_block_ids_for_computed_tokens",
          [](const PythonManager& self, const std::string& request_id,
             std::int64_t num_computed_tokens) {
            return to_id_tuple(
                self.manager().get_blocks_for_computed_tokens(request_id, num_computed_tokens));
          },
          py::arg("request_id"), py::arg("num_computed_tokens").noconvert(),
          "`get_block_ids` of the first `num_computed_tokens` tokens.")
      .def(
          "estimate_cached_tokens",
          [](const PythonManager& self, const Request& request) {
            return self.manager().estimate_cached_tokens(request);
          },
          py::arg("request"), "Tokens of the request that all groups have in the cache. O(blocks).")
      .def(
          "truncate_computed_blocks",
          [](const PythonManager& self, const BlocksOfStorage& blocks,
             std::int64_t num_computed_tokens) {
            return self.to_python(self.manager().truncate_computed_blocks(self.from_python(blocks),
                                                                          num_computed_tokens));
          },
          py::arg("blocks"), py::arg("num_computed_tokens").noconvert(),
          "The first blocks of a hit, for `num_computed_tokens` tokens: a multiple of every block "
          "size.")
      .def_property_readonly("empty_kv_cache_blocks", &PythonManager::empty_blocks,
                             "No blocks in any group.")
      .def_property_readonly("block_pool", &PythonManager::pool, "The pool of all groups.")
      .def_property_readonly(
          "usage", [](const PythonManager& self) { return self.manager().usage(); },
          "Share of the pool that requests hold: 0.0 .. 1.0.")
      .def_property_readonly(
          "max_model_len",
          [](const PythonManager& self) { return self.manager().options().max_model_len; },
          "No request gets slots past this many tokens.")
      .def_property_readonly(
          "enable_caching",
          [](const PythonManager& self) { return self.manager().options().enable_caching; },
          "Whether full blocks can be found again.")
      .def_property_readonly(
          "num_kv_cache_groups",
          [](const PythonManager& self) { return self.manager().num_kv_cache_groups(); },
          "Number of cache groups.")
      .def_property_readonly(
          "kv_cache_config",
          [](const PythonManager& self) { return self.manager().kv_cache_config(); },
          "The groups. A copy.")
      .def(
          "check_integrity", [](const PythonManager& self) { self.manager().check_integrity(); },
          "Raise InvariantError if the state is inconsistent. O(num_blocks), for tests.");
}

void bind_reports(ManagerClass& manager) {
  manager
      .def(
          "take_events",
          [](const PythonManager& self) {
            return to_python(self.manager().take_events(), self.use_int_block_hashes());
          },
          "What happened to the prefix cache since the last call, in order: `BlockStored`, "
          "`BlockRemoved`, `AllBlocksCleared`.")
      .def(
          "prefix_cache_lookup_enabled",
          [](const PythonManager& self, const Request& request) {
            return self.manager().prefix_cache_lookup_enabled(request);
          },
          py::arg("request"), "Whether cached blocks may be reused for the request.")
      .def(
          "record_prefix_cache_stats",
          [](const PythonManager& self, const Request& request, std::int64_t num_hits) {
            self.manager().record_prefix_cache_stats(request, num_hits);
          },
          py::arg("request"), py::arg("num_hits").noconvert(),
          "Count a lookup, with `log_stats`: tokens asked for and found.")
      .def(
          "make_prefix_cache_stats",
          [](const PythonManager& self) { return self.manager().make_prefix_cache_stats(); },
          "The counts since the last call; None without `log_stats`.");
}

}  // namespace

void bind_manager(py::module_& m) {
  ManagerClass manager(
      m, "KVCacheManager",
      R"(Which blocks each request holds: prefix hits, allocation, caching, release.

It holds ids and counters, never tensors. A request is known by its id. A call that raises changes
nothing, `MemoryError` of the core included. Where there is no memory for an event, `take_events`
gives `AllBlocksCleared` in place of all before it: who follows the events never believes in a block
that is gone.

Args:
    kv_cache_config: Blocks and cache groups.
    max_model_len: No request gets slots past this many tokens.
    scheduler_block_size: Every hit is a multiple of this many tokens: a multiple of every group's
        block size.
    hash_block_size: Tokens that one block hash of a request covers: a divisor of every group's block
        size.
    max_in_flight_tokens: Tokens that are scheduled and not processed yet, at most; None:
        `max_model_len`.
    enable_caching: Whether full blocks can be found again.
    use_eagle: Whether hits drop their last block: in the groups that say so, or in all if none does.
    num_prefill_lookahead: Tokens after a chunk of a prompt that the draft model looks at.
    log_stats: Whether `record_prefix_cache_stats` counts.
    enable_kv_cache_events: Whether `take_events` has something to give.
    metrics_collector: Watches a sample of the blocks.
    watermark: Share of the blocks that stays free when a request is admitted beside others.
    use_int_block_hashes: Whether events show the low 64 bits of hashes as integers, or all bytes.
    eviction_policy: Called for each block that becomes free, with a copy of it; says whether it is
        reused next or last. None: the least recently used first, and before it what cannot be found.
        If it raises, `sys.unraisablehook` is told and the block goes where None would put it.
    num_remembered_evictions: So many keys that left the cache last are known to `why_no_hit`; about
        150 bytes each.

Raises:
    ValueError: arguments that do not fit together.

Source:
    vLLM 0.32 v1/core/kv_cache_manager.py::KVCacheManager.

Example:
    >>> spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    >>> config = KVCacheConfig(10, [], [KVCacheGroupSpec(["layer.0"], spec)])
    >>> manager = KVCacheManager(config, 64, scheduler_block_size=4, hash_block_size=4)
    >>> manager.usage
    0.0
)");
  manager.def(
      py::init([](const KVCacheConfig& config, std::int64_t max_model_len,
                  std::int64_t scheduler_block_size, std::int64_t hash_block_size,
                  std::optional<std::int64_t> max_in_flight_tokens, bool enable_caching,
                  bool use_eagle, std::int64_t num_prefill_lookahead, bool log_stats,
                  bool enable_kv_cache_events,
                  std::shared_ptr<KVCacheMetricsCollector> metrics_collector, double watermark,
                  bool use_int_block_hashes, std::optional<PlaceFunction> eviction_policy,
                  std::int64_t num_remembered_evictions) {
        return std::make_unique<PythonManager>(
            config,
            KVCacheManagerOptions{.max_model_len = max_model_len,
                                  .scheduler_block_size = scheduler_block_size,
                                  .hash_block_size = hash_block_size,
                                  .max_in_flight_tokens = max_in_flight_tokens,
                                  .enable_caching = enable_caching,
                                  .use_eagle = use_eagle,
                                  .num_prefill_lookahead = num_prefill_lookahead,
                                  .log_stats = log_stats,
                                  .enable_kv_cache_events = enable_kv_cache_events,
                                  .metrics_collector = std::move(metrics_collector),
                                  .watermark = watermark,
                                  .eviction_policy = to_eviction_policy(std::move(eviction_policy)),
                                  .num_remembered_evictions = num_remembered_evictions,
                                  .prefix_contents = process_contents()},
            use_int_block_hashes);
      }),
      py::arg("kv_cache_config"), py::arg("max_model_len").noconvert(),
      py::arg("scheduler_block_size").noconvert(), py::arg("hash_block_size").noconvert(),
      py::arg("max_in_flight_tokens").noconvert() = py::none(),
      py::arg("enable_caching").noconvert() = true, py::arg("use_eagle").noconvert() = false,
      py::arg("num_prefill_lookahead").noconvert() = 0, py::arg("log_stats").noconvert() = false,
      py::arg("enable_kv_cache_events").noconvert() = false,
      py::arg("metrics_collector") = py::none(), py::arg("watermark") = 0.0,
      py::arg("use_int_block_hashes").noconvert() = true, py::arg("eviction_policy") = py::none(),
      py::arg("num_remembered_evictions").noconvert() = 0);
  bind_allocation(manager);
  bind_fork(manager);
  bind_release(manager);
  bind_queries(manager);
  bind_reports(manager);
}

}  // namespace paged_kv::bindings
