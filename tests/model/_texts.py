# SPDX-License-Identifier: Apache-2.0
"""Texts that tokenizers get wrong."""

from __future__ import annotations

import random

_PIECES = [
    "Hello", " world", "don't", " I'LL", "naïve café", "Grüße aus Köln", "日本語のテキスト",
    "한국어", "Привет, мир", "مرحبا", "हिन्दी", "👩‍👩‍👧‍👦", "🙂🙃", "e\u0301", "ﬁ", "Ⅷ½²", "٣٤",
    "0", "7", "42", "1234567", "3.14159", "1,000,000", " 5", "  99", "\t8", "x1y22z333",
    " ", "  ", "   ", "        ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n ", "\u00a0", "\u3000",
    "!", "?!", "...", "—", "«»", "#include <vector>", "def f(x):\n    return x**2\n",
    "if (a&&b) { c[i]++; }", "https://example.org/a?b=c&d=%20", "__init__", "snake_case_name",
    "CamelCaseName", "<b>bold</b>", "\\n", "\x00", "\x7f", "a\u200bb", "\ufeff", "\ufffd",
]  # fmt: skip


def diverse_texts(count: int, special_tokens: tuple[str, ...] = ()) -> list[str]:
    """`count` different texts: each piece alone, then random mixtures with special tokens."""
    rng = random.Random(7)
    pieces = [*_PIECES, *special_tokens]
    texts = list(dict.fromkeys(pieces))
    while len(texts) < count:
        texts.append("".join(rng.choices(pieces, k=rng.randint(2, 12))))
    return texts[:count]
