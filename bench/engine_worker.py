# SPDX-License-Identifier: Apache-2.0
"""How a peer of the engine suite answers: one line with the name of a case, one with seconds."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import torch

from engine_work import CASES, WARM_UP, make_sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from engine_work import Engine

    Sampler = Callable[[], float]


def serve(
    make_engine: Callable[[str, str], Engine],
    extra: Mapping[str, Callable[[Engine], Sampler]] | None = None,
) -> None:
    """Serve samples until standard input ends; ``warm up`` before a case prepares it alone.

    Args:
        make_engine: Called once, with the model's folder and the dtype.
        extra: Further cases by name: a function that makes a case's sampler.
    """
    # What others print must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    engine = make_engine(os.environ["PAGED_KV_BENCH_MODEL"], os.environ["PAGED_KV_BENCH_DTYPE"])
    samplers: dict[str, Sampler] = {}
    for line in sys.stdin:
        name = line.strip()
        case = name.removeprefix(WARM_UP)
        if case not in samplers:
            make = (extra or {}).get(case)
            samplers[case] = make(engine) if make else make_sampler(engine, CASES[case])
        print(0.0 if name != case else samplers[case](), file=answers, flush=True)
