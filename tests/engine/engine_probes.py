# SPDX-License-Identifier: Apache-2.0
"""What is put into an engine's cache before it runs, and what is seen of it while it does."""

from __future__ import annotations

import torch


def poison(llm):
    """NaN in every slot: only what a request has written may be read."""
    for kv_cache in llm.engine.cache_engine.kv_caches.values():
        kv_cache.key.fill_(torch.nan)
        kv_cache.value.fill_(torch.nan)


def record_swaps(llm):
    """``{"out": [...], "in": [...]}``: lists that fill with the copies that the engine makes."""
    made = {"out": [], "in": []}
    cache_engine = llm.engine.cache_engine
    for name, copies_made in made.items():
        swap = getattr(cache_engine, f"swap_{name}")

        def record(copies, copies_made=copies_made, swap=swap):
            copies_made += copies
            swap(copies)

        setattr(cache_engine, f"swap_{name}", record)
    return made


def assert_made_room(llm, swaps):
    """Requests were preempted, and blocks copied out and back exactly where the engine swaps."""
    assert llm.engine.stats.num_preemptions > 0, "the pool is not tight"
    does_swap = llm.engine.config.preemption_mode == "swap"
    assert bool(swaps["out"]) == bool(swaps["in"]) == does_swap
    assert llm.engine.scheduler.swap_space.num_used_blocks == 0


def assert_no_prompt_is_cut(engine):
    """For ``on_step``: who has run has all of its prompt computed."""
    for request in engine.scheduler.running:
        assert request.num_computed_tokens >= request.num_prompt_tokens, "a part of a prompt"
