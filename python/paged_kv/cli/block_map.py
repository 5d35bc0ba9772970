# SPDX-License-Identifier: Apache-2.0
"""Draws a block pool and block tables for people to read."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

    from paged_kv.engine.stats import BlockMap, RequestBlocks

__all__ = ["draw_block_map"]

_BLOCKS_PER_ROW = 16
_MAX_PROMPT_CHARACTERS = 26
_OWNER_NAMES = string.ascii_uppercase + string.ascii_lowercase
_UNNAMED_OWNER = "+"
_OWNER_STYLES = ("cyan", "green", "yellow", "blue", "red")
_SHARED_STYLE = "bold magenta"
_IDLE_STYLE = "dim"


@dataclass(frozen=True, slots=True)
class _Glyphs:
    """Characters of the drawing; ``fill`` goes from nearly empty to full."""

    fill: str
    idle_cached: str
    free: str
    null: str


_UNICODE = _Glyphs(fill="▁▂▃▄▅▆▇█", idle_cached="░░", free="··", null="∅ ")
_ASCII = _Glyphs(fill="1234567#", idle_cached="~~", free="..", null="0 ")


def draw_block_map(block_map: BlockMap, prompts: Mapping[str, str], console: Console) -> None:
    """Print who holds which block and the block table of each request.

    It reads without colour and fits into 80 columns.

    Args:
        block_map: What to draw.
        prompts: Text of each request, by request id; shown shortened.
        console: Where to print. ASCII is used where it cannot print block characters.
    """
    glyphs = _UNICODE if console.encoding.lower().startswith("utf") else _ASCII
    prompts = {
        request_id: _shorten(prompt, console.encoding) for request_id, prompt in prompts.items()
    }
    drawing = _Drawing(block_map, glyphs)
    num_usable = block_map.num_blocks - 1
    console.print()
    console.print(
        f"KV pool: {num_usable} blocks of {block_map.block_size} tokens, at its fullest",
        style="bold",
        markup=False,
    )
    drawing.print_pool(console)
    drawing.print_legend(console)
    console.print()
    console.print(drawing.block_tables(prompts))


class _Drawing:
    def __init__(self, block_map: BlockMap, glyphs: _Glyphs) -> None:
        self._map = block_map
        self._glyphs = glyphs
        self._owners = block_map.owners()
        self._names = {
            request.request_id: _OWNER_NAMES[i] if i < len(_OWNER_NAMES) else _UNNAMED_OWNER
            for i, request in enumerate(block_map.requests)
        }
        self._styles = {
            request.request_id: _OWNER_STYLES[i % len(_OWNER_STYLES)]
            for i, request in enumerate(block_map.requests)
        }
        self._num_tokens = {
            block_id: num_tokens
            for request in block_map.requests
            for block_id, num_tokens in self._fill_levels(request)
        }

    def print_pool(self, console: Console) -> None:
        """One cell for each block; rows in which all blocks are free are only counted."""
        num_skipped = 0
        for start in range(0, self._map.num_blocks, _BLOCKS_PER_ROW):
            row = range(start, min(start + _BLOCKS_PER_ROW, self._map.num_blocks))
            if not any(self._is_interesting(block_id) for block_id in row):
                num_skipped += len(row)
                continue
            self._print_skipped(console, num_skipped)
            num_skipped = 0
            line = Text(f"{start:>6}  ")
            for block_id in row:
                line.append_text(self._cell(block_id)).append(" ")
            console.print(line)
        self._print_skipped(console, num_skipped)

    def print_legend(self, console: Console) -> None:
        """What the cells and the tables below mean."""
        glyphs = self._glyphs
        fill, null = glyphs.fill, glyphs.null.strip()
        size = self._map.block_size
        console.print(
            "A, B: held by that request   2: shared by 2 requests   "
            f"{fill[0]} to {fill[-1]}: how full",
            f"{glyphs.free}: free   {glyphs.idle_cached}: free, content still cached   "
            f"{null}: never handed out",
            f"7*: block 7 is shared   7:1/{size}: block 7 holds 1 of {size} tokens",
            sep="\n",
            style=_IDLE_STYLE,
            markup=False,
        )

    def block_tables(self, prompts: Mapping[str, str]) -> Table:
        """One line for each request: its blocks in the order of its tokens."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        table.add_column("request")
        table.add_column("prompt", no_wrap=True, overflow="crop")
        table.add_column("tokens", justify="right")
        table.add_column("block table")
        for request in self._map.requests:
            request_id = request.request_id
            table.add_row(
                Text(self._names[request_id], style=self._styles[request_id]),
                Text(prompts.get(request_id, "")),
                str(request.num_tokens),
                self._block_table(request),
            )
        return table

    def _block_table(self, request: RequestBlocks) -> Text:
        line = Text()
        for block_id, num_tokens in self._fill_levels(request):
            if len(self._owners[block_id]) > 1:
                line.append(f"{block_id}* ", style=_SHARED_STYLE)
            elif num_tokens < self._map.block_size:
                line.append(f"{block_id}:{num_tokens}/{self._map.block_size} ")
            else:
                line.append(f"{block_id} ")
        return line

    def _cell(self, block_id: int) -> Text:
        """Two characters: who holds the block and how full it is."""
        if block_id == 0:
            return Text(self._glyphs.null, style=_IDLE_STYLE)
        owners = self._owners.get(block_id, [])
        if not owners:
            is_cached = block_id in self._map.idle_cached_block_ids
            text = self._glyphs.idle_cached if is_cached else self._glyphs.free
            return Text(text, style=_IDLE_STYLE)
        fill = self._glyphs.fill
        # Rounded up: a block with one token does not look empty.
        level = -(-self._num_tokens[block_id] * len(fill) // self._map.block_size)
        bar = fill[max(level, 1) - 1]
        if len(owners) > 1:
            count = str(len(owners)) if len(owners) < 10 else _UNNAMED_OWNER
            return Text(count + bar, style=_SHARED_STYLE)
        return Text(self._names[owners[0]] + bar, style=self._styles[owners[0]])

    def _fill_levels(self, request: RequestBlocks) -> list[tuple[int, int]]:
        size = self._map.block_size
        return [
            (block_id, max(min(request.num_tokens - i * size, size), 0))
            for block_ids in request.block_ids
            for i, block_id in enumerate(block_ids)
            if block_id != 0
        ]

    def _is_interesting(self, block_id: int) -> bool:
        return block_id in self._owners or block_id in self._map.idle_cached_block_ids

    def _print_skipped(self, console: Console, num_blocks: int) -> None:
        if num_blocks:
            console.print(f"{'...':>6}  {num_blocks} free blocks", style=_IDLE_STYLE)


def _shorten(prompt: str, encoding: str) -> str:
    text = " ".join(prompt.split())
    if len(text) > _MAX_PROMPT_CHARACTERS:
        text = text[: _MAX_PROMPT_CHARACTERS - 3] + "..."
    return text.encode(encoding, errors="replace").decode(encoding)
