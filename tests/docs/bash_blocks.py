# SPDX-License-Identifier: Apache-2.0
"""The commands of a document's bash blocks."""

from __future__ import annotations

import re


def bash_commands(text: str) -> list[str]:
    """The command lines of all blocks, in order, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (line.partition(" #")[0].strip() for block in blocks for line in block.splitlines())
    return [line for line in lines if line]
