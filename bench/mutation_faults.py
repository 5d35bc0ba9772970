# SPDX-License-Identifier: Apache-2.0
"""The faults that mutation_check.py plants in the host core, by part.

None is in a header: after a change there most of the core would be compiled again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CPP = Path(__file__).resolve().parents[1] / "cpp"


@dataclass(frozen=True, slots=True)
class Fault:
    """`old`, which is once in `file`, a path in cpp/, becomes `new`."""

    name: str
    file: str
    old: str
    new: str

    def plant(self, text: str) -> str:
        """`text`, the content of `file`, with the fault.

        Raises:
            ValueError: `old` is not in the text, or more than once.
        """
        if text.count(self.old) != 1:
            msg = f"{self.name}: {self.file} has {self.old!r} {text.count(self.old)} times"
            raise ValueError(msg)
        return text.replace(self.old, self.new)


POOL = (
    Fault("cached blocks are freed to the front", "src/block_pool.cpp",
          "place(at(id)) == FreePlace::kFront", "place(at(id)) == FreePlace::kBack"),
    Fault("a policy's answer is ignored", "src/block_pool.cpp",
          "return eviction_policy_->place(block);",
          "static_cast<void>(eviction_policy_->place(block)); return lru_place(block);"),
    Fault("a reused block keeps its number of hits", "src/block_pool.cpp",
          "    block.num_hits = 0;", ""),
    Fault("blocks for the front of the queue go to its back", "src/free_queue.cpp",
          "link_between(kNoBlock, blocks, front_);", "link_between(back_, blocks, kNoBlock);"),
    Fault("the neighbour of prepended blocks keeps its link", "src/free_queue.cpp",
          "(next.valid() ? at(next).prev_free_block : back_) = blocks.back();",
          "if (!next.valid()) back_ = blocks.back();"),
    Fault("a touched block stays in the free queue", "src/block_pool.cpp",
          "if (block.ref_cnt == 0) free_block_queue_.remove(id);", ""),
    Fault("a reused block keeps its hash", "src/block_pool.cpp",
          "    remove_from_cache(block);\n    block.ref_cnt = 1;", "    block.ref_cnt = 1;"),
    Fault("a failed free is not taken back", "src/block_pool.cpp",
          "if (freed != kNullBlockId) ++at(freed).ref_cnt;",
          "if (freed == kNullBlockId) ++at(freed).ref_cnt;"),
    Fault("the cache is reset while blocks are held", "src/block_pool.cpp",
          "if (get_num_free_blocks() != num_gpu_blocks() - 1) return false;", ""),
    Fault("reset leaves the blocks' hashes", "src/block_pool.cpp",
          "for (KVCacheBlock& block : blocks_) block.reset_hash();", ""),
    Fault("usage counts the null block", "src/block_pool.cpp",
          "num_usable_blocks = num_gpu_blocks() - 1", "num_usable_blocks = num_gpu_blocks()"),
    Fault("blocks behind a miss count as found", "src/block_pool.cpp",
          "    if (!block) break;\n    cached_blocks",
          "    if (!block) continue;\n    cached_blocks"),
    Fault("the last of equal blocks is found, not the next", "src/block_hash_map.cpp",
          "first_by_key_.replace(hash_of(key), entry, next)",
          "first_by_key_.replace(hash_of(key), entry, at(entry).previous)"),
)  # fmt: skip

HASHES = (
    Fault("the seed is left out of NONE_HASH", "src/block_hash.cpp",
          "write_text(seed)", 'write_text(seed.empty() ? seed : "vllm-none-hash")'),
    Fault("a block's parent is left out of its hash", "src/request_hash.cpp",
          "previous = hash_block(previous, block_tokens",
          "previous = hash_block(parent, block_tokens"),
    Fault("equal hashes are taken for equal contents", "src/prefix_contents.cpp",
          "std::ranges::equal(entry.block, block)",
          "(entry.hash == hash || std::ranges::equal(entry.block, block))"),
    Fault("the prefix before a block is not compared", "src/prefix_contents.cpp",
          "return entry.parent == parent &&",
          "return (entry.hash == hash || entry.parent == parent) &&"),
    Fault("a content is its digest", "src/block_hash.cpp",
          ".subspan(block_begin_)", ".subspan(message_.size())"),
    Fault("a content begins with its block", "src/block_hash.cpp",
          "parent.is_xxh3() ? parent.content() : ContentId()",
          "parent.is_xxh3() ? ContentId() : ContentId()"),
    Fault("a cached block does not hold its content", "src/block_pool.cpp",
          "prefix_contents_->retain(key.key.hash.content());", ""),
    Fault("a reset does not release contents", "src/block_pool.cpp",
          "  release_contents();\n  cached", "  cached"),
    Fault("appended tokens are hashed from the prompt's start", "src/request.cpp",
          "const std::int64_t start = num_hashed_blocks * hash_block_size;",
          "const std::int64_t start = 0;"),
    Fault("a coarse block is named by a fine one's hash", "src/block_hash.cpp",
          "scale_ = block_size / hash_block_size;", ""),
    Fault("the salt is left out of the key", "src/request_hash.cpp",
          "if (start_token_idx == 0 && !request.cache_salt.empty())", "if (false)"),
    Fault("the adapter's path is left out of the key", "src/request_hash.cpp",
          'keys.push_back({"lora", request.lora->name, request.lora->path});',
          'keys.push_back({"lora", request.lora->name});'),
    Fault("media are keyed without their place", "src/request_hash.cpp",
          'keys.push_back({"mm", feature.identifier, feature.offset - start});',
          'keys.push_back({"mm", feature.identifier, std::int64_t{0}});'),
    Fault("only the first medium of a block counts", "src/request_hash.cpp",
          "if (feature_end <= start) continue;",
          "if (feature_end <= start || !keys.empty()) continue;"),
    Fault("a medium that ends with a block is not looked past", "src/request_hash.cpp",
          "if (feature_end > end) next_mm_idx", "if (feature_end > end + 1) next_mm_idx"),
    Fault("embeddings are hashed from the prompt's start", "src/request_hash.cpp",
          "std::min(start * embeds.bytes_per_token, num_bytes)", "std::min(start * 0, num_bytes)"),
)  # fmt: skip

GROUPS = (
    Fault("a request's blocks are freed first block first", "src/managers/single_type.cpp",
          "std::ranges::reverse(request.blocks);", ""),
    Fault("blocks that left a window are freed in order", "src/managers/single_type.cpp",
          "std::ranges::reverse(freed);", ""),
    Fault("a block too many counts as full", "src/managers/single_type.cpp",
          "std::min(num_tokens / block_size_, std::ssize(held.blocks))",
          "std::min(ceil_div(num_tokens, block_size_), std::ssize(held.blocks))"),
    Fault("a hit is not held", "src/managers/single_type.cpp",
          "block_pool_.touch(adopted);", ""),
    Fault("free hits are not counted", "src/managers/single_type.cpp",
          "if (block.ref_cnt == 0 && !block.is_null) ++num_blocks;",
          "if (block.ref_cnt < 0 && !block.is_null) ++num_blocks;"),
    Fault("a block leaves a window a token early", "src/managers/sliding_window.cpp",
          "spec->sliding_window() - 1 + spec", "spec->sliding_window() - 2 + spec"),
    Fault("a window needs a block less", "src/managers/sliding_window.cpp",
          "return ceil_div(sliding_window_ - 1, block_size())",
          "return (sliding_window_ - 1) / block_size()"),
    Fault("the end of a shared prefix is not retained", "src/managers/sliding_window.cpp",
          "if (shared > 0) mark_tail", "if (shared < 0) mark_tail"),
    Fault("a prompt that goes on is not retained", "src/managers/sliding_window.cpp",
          "    mark_tail_of_boundary(replay.extension, start_block, mask);\n", ""),
    Fault("EAGLE drops no block of a window", "src/managers/sliding_window.cpp",
          "num_dropped = query.drop_eagle_block ? 1 : 0", "num_dropped = 0"),
    Fault("EAGLE drops no block of full attention", "src/managers/full_attention.cpp",
          "if (query.drop_eagle_block && hit_length > 0) {",
          "if (query.drop_eagle_block && hit_length < 0) {"),
    Fault("groups need not agree on a hit", "src/coordinators/hybrid.cpp",
          "if (candidate >= hit_length) break;", "break;"),
    Fault("three groups agree in one round", "src/coordinators/hybrid.cpp",
          "groups.size() == 2 && groups[0].is_full_attention", "groups[0].is_full_attention"),
    Fault("a group that dropped a block need not look again", "src/coordinators/hybrid.cpp",
          "for (SpecGroupHit& other : hits_) other.is_eagle_block_dropped = false;", ""),
    Fault("EAGLE does not look for the block that it drops", "src/coordinators/hybrid.cpp",
          "std::min(candidate + manager.block_size(),", "std::min(candidate,"),
    Fault("the block that EAGLE drops is not cached", "src/coordinators/hybrid.cpp",
          "align_cacheable(num_finalized) + manager(group).block_size()",
          "align_cacheable(num_finalized)"),
    Fault("tokens from outside may evict the next group's hit", "src/kv_cache_coordinator.cpp",
          "add_local_computed_blocks(request_idx, blocks, num_tokens);",
          "add_local_computed_blocks(request_idx, blocks, num_tokens);\n"
          "    if (num_external_computed_tokens > 0)"
          " managers_[group]->allocate_new_blocks(request_idx, num_tokens);"),
)  # fmt: skip

MANAGER = (
    Fault("the whole prompt may be a hit", "src/kv_cache_manager.cpp",
          "request.block_hashes(), request.num_tokens() - 1)",
          "request.block_hashes(), request.num_tokens())"),
    Fault("drafts are cached", "src/kv_cache_manager.cpp",
          "args.num_new_tokens,\n               request.num_tokens());",
          "args.num_new_tokens,\n               request.num_tokens() + 1);"),
    Fault("slots do not end at max_model_len", "src/kv_cache_manager.cpp",
          "args.num_lookahead_tokens,\n               options_.max_model_len);",
          "args.num_lookahead_tokens,\n               kMaxTokens);"),
    Fault("blocks of steps under way are given back", "src/kv_cache_manager.cpp",
          "total_computed_tokens - request.progress.num_in_flight_tokens", "total_computed_tokens"),
    Fault("the watermark counts for a request alone", "src/kv_cache_manager.cpp",
          "args.has_scheduled_reqs && is_admission", "is_admission"),
    Fault("reserved blocks are given away", "src/kv_cache_manager.cpp",
          "block_pool().get_num_free_blocks() - args.reserved_blocks -",
          "block_pool().get_num_free_blocks() -"),
    Fault("tokens are cached before they arrive", "src/kv_cache_manager.cpp",
          "  if (!args.delay_cache_blocks) {\n    coordinator_", "  {\n    coordinator_"),
)  # fmt: skip

FORKS = (
    Fault("a part-filled block is shared", "src/kv_cache_fork.cpp",
          "first(to_size(tokens.num_final_tokens / block_size_))",
          "first(to_size(ceil_div(tokens.num_final_tokens, block_size_)))"),
    Fault("a fork does not hold what it shares", "src/kv_cache_fork.cpp",
          "block_pool_.touch(shared);", ""),
    Fault("a copy counts as cached", "src/kv_cache_fork.cpp",
          "std::min(parent.num_cached_blocks, std::ssize(shared))",
          "std::min(parent.num_cached_blocks, std::ssize(child.blocks))"),
    Fault("a fork takes slots after the computed tokens", "src/kv_cache_fork.cpp",
          "      .first(to_size(ceil_div(tokens.num_tokens, block_size_)))\n", ""),
    Fault("a failed fork leaves its row", "src/kv_cache_fork.cpp",
          "if (!is_known) request_table_", "if (is_known) request_table_"),
)  # fmt: skip

EVENTS = (
    Fault("removals are not reported", "src/block_pool.cpp",
          "if (kv_events_) kv_events_->push(BlockRemoved{key.hash, key.group_id});", ""),
    Fault("a reset is not reported", "src/block_pool.cpp",
          "if (kv_events_) kv_events_->push(AllBlocksCleared{});", ""),
    Fault("blocks that were left out are reported", "src/stored_event.cpp",
          "is_left_out[position] != 0) continue;", "is_left_out[position] > 1) continue;"),
    Fault("the parent of reported blocks is the first of them", "src/stored_event.cpp",
          "event.parent_block_hash = hashes[stored.start_block - 1]",
          "event.parent_block_hash = hashes[stored.start_block]"),
)  # fmt: skip

WHY_NO_HIT = (
    Fault("the token that must be computed is no reason", "src/no_hit_report.cpp",
          "if (next > max_length_) return rest(NoHitReason::kLastToken);", ""),
    Fault("evictions are looked for in the first group", "src/no_hit_report.cpp",
          "pool_.was_evicted({hash, to_group_id(block.group)})",
          "pool_.was_evicted({hash, to_group_id(0)})"),
    Fault("the salt is never the reason", "src/no_hit_report.cpp",
          "k.cache_salt.clear(); }", "k.lora.reset(); }"),
    Fault("a window needs all blocks", "src/no_hit_report.cpp",
          "manager.get_num_skipped_tokens(num_tokens) / block_size", "0"),
    Fault("what was evicted is remembered for ever", "src/evicted_keys.cpp",
          "if (entry.group_id.valid()) places_.pop(entry, place);", ""),
)  # fmt: skip

SEQUENCES = (
    Fault("a fork does not hold its blocks", "src/block_space_manager.cpp",
          "touch(forked->second.blocks)", "touch({})"),
    Fault("a block of two sequences is written", "src/block_space_manager.cpp",
          "blocks()[last.index()].ref_cnt > 1", "blocks()[last.index()].ref_cnt > 2"),
    Fault("the last of those that share a block copies it too", "src/block_space_manager.cpp",
          "ref_cnt - scratch_[last] > 1", "ref_cnt > 1"),
    Fault("a shared block is swapped twice", "src/block_space_manager.cpp",
          "std::exchange(scratch_[block.index()], 1) == 0",
          "std::exchange(scratch_[block.index()], 1) < 2"),
    Fault("swapped blocks have a holder too many", "src/block_space_manager.cpp",
          "pool(target).free_blocks(new_blocks);", ""),
    Fault("swapping in leaves no room for copies", "src/block_space_manager.cpp",
          "if (num_new_tokens > 0) num_blocks += num_copies_once_alone(sequences);", ""),
)  # fmt: skip

ROWS = (
    Fault("the row of a refused request is not written", "src/request_batch.cpp",
          "    write_row(rows[i]);", "    if (refused.empty()) write_row(rows[i]);"),
    Fault("a row remembers the request before", "src/request_batch.cpp",
          "written(row_idx, group) = {};", ""),
    Fault("null blocks are written at the row's start", "src/request_batch.cpp",
          "replace_blocks(left, row_idx, row.num_skipped_blocks)",
          "replace_blocks(left, row_idx, 0)"),
    Fault("each row of a batch gets the first tokens", "src/request_batch.cpp",
          "token_ids = token_ids.subspan(n);", ""),
    Fault("a failed batch keeps the tokens of its first requests", "src/request_batch.cpp",
          "request_of(rows[i]).rewind(marks_[i]);", ""),
    Fault("slots are written down without room for them", "src/kv_cache_coordinator.cpp",
          "managers_[group]->reserve(demand);", ""),
    Fault("a refused request stays known", "src/kv_cache_manager.cpp",
          "request_table_.remove(request_idx);\n}\n\nstd::optional", "return;\n}\n\nstd::optional"),
    Fault("blocks are popped without room for them", "src/kv_cache_coordinator.cpp",
          "blocks.reserve(num_blocks);", "if (blocks.capacity() > num_blocks) return;"),
    Fault("only the last change of a row is staged", "src/block_table.cpp",
          "{std::min(dirty.begin, columns.begin), std::max(dirty.end, columns.end)}",
          "{columns.begin, columns.end}"),
    Fault("a cleared row is not staged", "src/block_table.cpp",
          "  mark_dirty(row_idx, {0, num_blocks(row_idx)});\n", ""),
    Fault("rows that were not sent are clean", "src/block_table.cpp",
          "if (row_idx >= num_reqs) return false;", ""),
    Fault("slots after the last token keep old values", "src/slot_mapping.cpp",
          "for (; token < p.slot_mapping.size; ++token)", "for (; token < 0; ++token)"),
)  # fmt: skip

FAULTS = (*POOL, *HASHES, *GROUPS, *MANAGER, *FORKS, *EVENTS, *WHY_NO_HIT, *SEQUENCES, *ROWS)
