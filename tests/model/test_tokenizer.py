# SPDX-License-Identifier: Apache-2.0
"""Encoding, decoding and chat templates, whatever file the tokenizer came from."""

from __future__ import annotations

import random

import pytest

from paged_kv.models.chat_template import ChatTemplate


def test_random_bytes_decode_like_utf8(smollm2):
    """Any id sequence decodes; invalid UTF-8 becomes U+FFFD as Python makes it."""
    tokenizer = smollm2.tokenizer
    byte_of = {tokenizer.encode(chr(b))[0]: b for b in range(32, 127)}
    rng = random.Random(3)
    for _ in range(50):
        ids = rng.choices(list(byte_of), k=20)
        assert tokenizer.decode(ids) == bytes(byte_of[i] for i in ids).decode()
    crab = tokenizer.encode("🦀")
    assert len(crab) > 1
    assert tokenizer.decode(crab) == "🦀"
    assert set(tokenizer.decode(crab[:-1])) == {"\ufffd"}


def test_lone_surrogate_is_refused(smollm2):
    with pytest.raises(ValueError, match="text is not valid Unicode"):
        smollm2.tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("bad_id", [-1, 2**32])
def test_decode_refuses_impossible_ids(smollm2, bad_id):
    with pytest.raises(ValueError, match=f"token id {bad_id} is outside"):
        smollm2.tokenizer.decode([1, bad_id])


def test_ids_past_the_vocabulary_decode_to_nothing(smollm2):
    ids = smollm2.tokenizer.encode("fox")
    assert smollm2.tokenizer.decode([*ids, 60000]) == "fox"


class TestChatTemplate:
    MESSAGES = ({"role": "user", "content": "a <b>\u00e9"},)

    def _render(self, source, **special_tokens):
        template = ChatTemplate(source, special_tokens)
        return template.render(self.MESSAGES, add_generation_prompt=True)

    def test_helpers_of_transformers(self):
        assert self._render("{{ messages[0] | tojson }}") == (
            '{"role": "user", "content": "a <b>\u00e9"}'
        )
        assert self._render("{{ strftime_now('%Y') }}").isdigit()
        assert self._render("{{ bos_token }}|{{ tools is none }}", bos_token="<s>") == "<s>|True"
        assert self._render("{% generation %}x{% endgeneration %}y") == "xy"
        assert (
            self._render(
                "{% for i in range(9) %}{% if i > 1 %}{% break %}{% endif %}{{ i }}{% endfor %}"
            )
            == "01"
        )

    def test_blocks_leave_no_blank_lines(self):
        assert self._render("  {% if true %}\na\n  {% endif %}\nb") == "a\nb"

    def test_refusal_of_the_template(self):
        with pytest.raises(ValueError, match="chat template: roles must alternate"):
            self._render("{{ raise_exception('roles must alternate') }}")

    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'x'}) }}",
            "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
            "{% for i in range(10 ** 9) %}{% endfor %}",
        ],
    )
    def test_the_sandbox_holds(self, source):
        with pytest.raises(ValueError, match="chat template: "):
            ChatTemplate(source, {}).render([{"role": "user"}], add_generation_prompt=True)

    def test_bad_syntax(self):
        with pytest.raises(ValueError, match="chat template: "):
            ChatTemplate("{% if %}", {})


def test_no_chat_template():
    import tokenizers

    from paged_kv.models import Tokenizer

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = Tokenizer(backend, bos_token_id=None, eos_token_ids=frozenset())
    assert not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="the model has no chat template"):
        tokenizer.apply_chat_template([])
