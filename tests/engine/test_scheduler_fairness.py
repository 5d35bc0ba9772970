# SPDX-License-Identifier: Apache-2.0
"""A large request is served in a bounded number of steps, however many small ones keep coming."""

from __future__ import annotations

import pytest
from engine.scheduler_steps import add, finish_step, tokens_of

NUM_USABLE_BLOCKS = 9
ARRIVAL_STEP = 4
LARGE_TOKENS = 96  # 6 blocks of 16, 8 in the end
LARGE_MAX_TOKENS = 20
SMALL_TOKENS = 16  # a block, and a second one from the first new token on
SMALL_MAX_TOKENS = 6


def serve_beside_small_ones(scheduler, make_request, num_arrivals):
    """Let small requests arrive before each step and the large one once, until that is done.

    Returns:
        The steps in which the large one had a share, and how many requests had to make room.
    """
    large = make_request(
        range(1000, 1000 + LARGE_TOKENS),
        request_id="large",
        max_tokens=LARGE_MAX_TOKENS,
        arrival_time=float(ARRIVAL_STEP),
    )
    steps, num_preempted, firsts = [], 0, iter(range(2000, 8000, SMALL_TOKENS))
    for i in range(100):
        if i == ARRIVAL_STEP:
            add(scheduler, large)
        for j in range(num_arrivals):
            first = next(firsts)
            small = make_request(
                range(first, first + SMALL_TOKENS),
                request_id=f"a small one, {i}.{j}",  # before "large", should ids decide
                max_tokens=SMALL_MAX_TOKENS,
                arrival_time=i + 0.5 + j / 10,
            )
            add(scheduler, small)
        output = scheduler.schedule()
        num_preempted += len(output.preempted)
        if "large" in tokens_of(output):
            steps.append(i)
        if large in finish_step(scheduler, output):
            break
    return steps, num_preempted


@pytest.mark.parametrize("num_swap_blocks", [0, 40], ids=["recompute", "swap"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_arrivals", [1, 2])
def test_a_large_request_is_not_starved_by_small_ones(
    make_scheduler, make_request, num_arrivals, policy, num_swap_blocks
):
    scheduler = make_scheduler(
        num_blocks=NUM_USABLE_BLOCKS + 1, policy=policy, num_swap_blocks=num_swap_blocks
    )
    steps, num_preempted = serve_beside_small_ones(scheduler, make_request, num_arrivals)
    # It waits for those that came before it, of which four fit at once, and for nobody else.
    num_rounds = -(-ARRIVAL_STEP * num_arrivals // 4)
    assert steps[0] <= ARRIVAL_STEP + (num_rounds + 1) * SMALL_MAX_TOKENS
    assert steps == list(range(steps[0], steps[0] + LARGE_MAX_TOKENS)), "it made room for others"
    assert num_preempted > 0, "the pool is not tight"
    assert len(scheduler.waiting) > 0, "nobody else wanted its blocks"
