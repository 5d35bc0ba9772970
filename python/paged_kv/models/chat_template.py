# SPDX-License-Identifier: Apache-2.0
"""Renders a model's chat template, a Jinja program that comes with the model, in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from paged_kv.models.optional import import_optional

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ChatTemplate"]


class ChatTemplate:
    """One compiled chat template.

    The template is untrusted code: it runs in Jinja's immutable sandbox, with the helpers that
    transformers offers (`raise_exception`, `strftime_now`, a plain `tojson`, loop controls and the
    ``generation`` block, which only marks text).

    Args:
        source: the Jinja source.
        special_tokens: text of the special tokens a template may name, e.g. ``bos_token``.

    Raises:
        ImportError: jinja2 is not installed.
        ValueError: the source isn't a valid template.

    Source:
        transformers 5 utils/chat_template_utils.py (the environment, so that the same templates
        give the same text).

    Example:
        >>> template = ChatTemplate("{% for m in messages %}[{{ m.role }}]{% endfor %}", {})
        >>> template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False)
        '[user]'
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._jinja2 = import_optional("jinja2", "to apply a chat template")
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment(self._jinja2).from_string(source)
        except (self._jinja2.TemplateError, RecursionError) as error:
            msg = f"chat template: {error}"
            raise ValueError(msg) from None

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Turn messages into the prompt's text.

        Args:
            messages: dicts with ``role`` and ``content``, oldest first.
            add_generation_prompt: end with the start of the assistant's turn.

        Raises:
            ValueError: the template refuses the messages or fails.
        """
        variables = {
            **self._special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return str(self._template.render(variables))
        except Exception as error:  # noqa: BLE001  (a program we didn't write may raise anything)
            msg = f"chat template: {error}"
            raise ValueError(msg) from None


def _environment(jinja2: Any) -> Any:  # noqa: ANN401  (jinja2 is optional: no types without it)
    import_optional("jinja2.sandbox", "to apply a chat template")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_extension()],
    )
    # Jinja's own filter escapes HTML, which no model was trained on.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _generation_extension() -> type:
    extension = import_optional("jinja2.ext", "to apply a chat template").Extension

    class GenerationBlock(extension):  # type: ignore[misc, valid-type]
        """``{% generation %}...{% endgeneration %}`` gives what is inside."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:  # noqa: ANN401
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationBlock


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)
