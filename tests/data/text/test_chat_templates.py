"""A template that writes without an end is stopped, wherever its loop is; others write what they wrote before."""

from __future__ import annotations

import jinja2
import pytest

from lowmem_ft.data.text import chat_templates
from lowmem_ft.data.text.chat_templates import Renderer
from lowmem_ft.foundation.errors import DataError

LOOP = "{% for _ in range(300) %}four{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    "template",
    [
        LOOP,
        f"{{% set text %}}{LOOP}{{% endset %}}{{{{ text | length }}}}",
        f"{{% macro text() %}}{LOOP}{{% endmacro %}}{{{{ text() | length }}}}",
        f"{{% generation %}}{LOOP}{{% endgeneration %}}",
        f"{{% generation %}}Hi{{% endgeneration %}}{LOOP}",
    ],
)
@pytest.mark.parametrize("most", [1199, 1200])
def test_a_loop_ends_at_the_limit(make_tokenizer, monkeypatch, template, most):
    monkeypatch.setattr(chat_templates, "MOST_CHARS", most)
    monkeypatch.setattr(chat_templates, "CHARS_OF_PIECE", 0)
    renderer = Renderer(make_tokenizer(chat_template=template))
    for render in (renderer.text, renderer.marked_text) if "generation" in template else (renderer.text,):
        if most == 1200 and not template.startswith("{% generation %}Hi"):
            render(MESSAGES)
            continue
        with pytest.raises(DataError, match=f"user, assistant: it has written more than {most:,} characters"):
            render(MESSAGES)


def test_a_loop_that_writes_nothing_ends_too(make_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_templates, "MOST_CHARS", 1000)
    nothing = "{% for _ in range(300) %}{{ '' if messages else 'x' }}{% endfor %}"
    with pytest.raises(DataError, match="it has written more than 1,000 characters"):
        Renderer(make_tokenizer(chat_template=nothing)).text(MESSAGES)


def test_jinja_is_as_before(make_tokenizer, monkeypatch):
    monkeypatch.setattr(chat_templates, "MOST_CHARS", 10)
    with pytest.raises(DataError):
        Renderer(make_tokenizer(chat_template=LOOP)).text(MESSAGES)
    assert len(jinja2.Template(LOOP).render()) == 1200
    assert len("".join(jinja2.Template(LOOP).generate())) == 1200


def test_an_error_without_words_is_named(make_tokenizer):
    template = "{{ 'x' * 2 ** 60 }}"
    with pytest.raises(
        DataError, match=r"rejects a conversation with the roles user, assistant: MemoryError\."
    ):
        Renderer(make_tokenizer(chat_template=template)).text(MESSAGES)
