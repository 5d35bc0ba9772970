# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

import pytest
from rich.console import Console

from paged_kv.cli.block_map import draw_block_map
from paged_kv.engine.stats import BlockMap, RequestBlocks

TWO_REQUESTS = BlockMap(
    num_blocks=40,
    block_size=16,
    requests=(RequestBlocks("7", ((3, 1, 4),), 37), RequestBlocks("8", ((3, 1, 5),), 33)),
    idle_cached_block_ids=frozenset({9}),
)


def draw(block_map, encoding="utf-8", prompts=None):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    console = Console(file=file, width=80, color_system=None, highlight=False)
    draw_block_map(block_map, prompts or {"7": "once upon a time", "8": "once more"}, console)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_cells_say_who_holds_a_block_and_how_full_it_is():
    row = next(line for line in draw(TWO_REQUESTS).splitlines() if line.startswith("     0"))
    #                       null shared free shared A:5/16 B:1/16 free... 9 cached
    assert row.split()[1:7] == ["∅", "2█", "··", "2█", "A▃", "B▁"]
    assert row.split()[10] == "░░"


def test_rows_of_free_blocks_are_counted_not_drawn():
    assert "24 free blocks" in draw(TWO_REQUESTS)


def test_block_tables_list_blocks_in_order_with_shared_and_partial_marks():
    lines = draw(TWO_REQUESTS).splitlines()
    table = [line.split() for line in lines if line.startswith(("A ", "B "))]
    assert table == [
        ["A", "once", "upon", "a", "time", "37", "3*", "1*", "4:5/16"],
        ["B", "once", "more", "33", "3*", "1*", "5:1/16"],
    ]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_drawing_fits_into_80_columns_in_any_encoding(encoding):
    many = BlockMap(
        num_blocks=300,
        block_size=16,
        requests=tuple(
            RequestBlocks(str(i), (tuple(range(1 + 4 * i, 5 + 4 * i)),), 50 + i % 14)
            for i in range(60)
        ),
        idle_cached_block_ids=frozenset(range(280, 300)),
    )
    prompts = {str(i): "né " + "a long prompt " * 10 for i in range(60)}
    text = draw(many, encoding, prompts)
    assert max(len(line) for line in text.splitlines()) <= 80


def test_prompt_text_is_not_taken_for_markup():
    assert "[bold]x[/]" in draw(TWO_REQUESTS, prompts={"7": "[bold]x[/]"})
