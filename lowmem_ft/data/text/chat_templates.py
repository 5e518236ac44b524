"""Conversations rendered by the tokenizer's chat template, with a limit on its output; tokenizers for training."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lowmem_ft.data.files.files import read_chat_template
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.upstream.patches import replace, wrap

logger = logging.getLogger(__name__)

Message: TypeAlias = dict[str, Any]
"""One turn: at least ``role`` and ``content``, and possibly keys such as ``tool_calls``, which the template knows."""

_NAMES_OF_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names by which chats have an answer's reasoning; the first one with a value counts."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}"
    "{% if message['role'] == 'assistant' and eos_token and eos_token != '<|im_end|>' %}{{ eos_token }}{% endif %}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Template for tokenizers without one.

Its markers are plain text to a tokenizer that does not know them, so an answer also ends with the tokenizer's own EOS:
that is the token at which ``generate`` stops.
"""


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
    """Give a tokenizer, in place, what training needs and what should be saved with the model.

    A missing pad token becomes the EOS token. That hides no label: padding is known by the length of an example,
    never by its id, so an EOS at the end of an answer is still learnt.

    Args:
        tokenizer: any fast tokenizer.
        chat_template: path of a Jinja file that replaces the tokenizer's template, or None.

    Raises:
        DataError: if the tokenizer has neither a pad nor an EOS token, cannot map tokens to positions in the text, or
            the template file cannot be read.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"Training needs a tokenizer that maps each token to its place in the text; {type(tokenizer).__name__} "
            "does not. Use one with a tokenizer.json (model.tokenizer_name_or_path)."
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise DataError(
                "Training needs a pad or an EOS token; the tokenizer has pad_token=None and eos_token=None. "
                "Set one in its tokenizer_config.json, or name another with model.tokenizer_name_or_path."
            )
        tokenizer.pad_token = tokenizer.eos_token
        logger.info(
            ("Padding with the EOS token %r, because the tokenizer has no pad token."), tokenizer.eos_token
        )
    if tokenizer.eos_token_id is None:
        logger.warning("The tokenizer has no EOS token, so raw text and completions end without an EOS.")
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(chat_template)
        logger.info("Chat template: %s (data.chat_template).", chat_template)


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer without a chat template ChatML, in place, and log it."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
        logger.warning(
            "Chat template: ChatML, because the tokenizer has no template. Its markers are tokenized as plain text "
            "and answers end with %r. Set data.chat_template to use another.",
            tokenizer.eos_token,
        )


@dataclass(frozen=True)
class Renderer:
    """The chat template of a tokenizer, with the tools of one chat.

    Args:
        tokenizer: has a chat template.
        tools: the tools that the template is given; empty: none.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[dict[str, Any]] = field(default_factory=list)

    def text(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """Render a conversation.

        Args:
            messages: the turns.
            add_generation_prompt: whether to end with the prompt for the model's answer.

        Returns:
            The text, with special tokens written out.

        Raises:
            DataError: if the template rejects these turns.
        """
        return self._render(messages, add_generation_prompt=add_generation_prompt)[0]

    def marked_text(self, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Render a conversation, and return the character ranges that the template marks with ``{% generation %}``.

        Raises:
            DataError: if the template rejects these turns.
        """
        text, ranges = self._render(messages, return_assistant_tokens_mask=True)
        return text, [(start, end) for start, end in ranges]

    def _render(self, messages: list[Message], **options: bool) -> tuple[str, Any]:
        # apply_chat_template calls this too, but returns the marks only as a token mask; we need characters.
        try:
            special_tokens: dict[str, Any] = self.tokenizer.special_tokens_map
            with _bounded_templates():
                texts, ranges = render_jinja_template(
                    conversations=[[_with_names_of_reasoning(message) for message in messages]],
                    tools=[*self.tools] or None,
                    chat_template=self.tokenizer.get_chat_template(),
                    **options,
                    **special_tokens,
                )
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"The chat template is not valid Jinja, line {error.lineno}: {error.message} Correct it, or set "
                "data.chat_template to another one."
            ) from error
        except Exception as error:  # a template is a program, and raises whatever its expressions raise
            roles = ", ".join(str(message.get("role")) for message in messages)
            words = str(error) or type(error).__name__  # a MemoryError has no words
            raise DataError(
                f"The chat template rejects a conversation with the roles {roles}: {words}. Change the data to fit the "
                "template, or set data.chat_template to a template that allows these roles."
            ) from error
        return texts[0], ranges[0] if ranges else []


def _with_names_of_reasoning(message: Message) -> Message:
    """Return a message whose reasoning has the names that templates read; transformers does so from 5.21 on."""
    reasoning = next((message[name] for name in _NAMES_OF_REASONING if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


def has_generation_marks(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template marks the assistant's text with ``{% generation %}``."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


MOST_CHARS = 2**27
"""Characters of one conversation: more than a hundred novels, and less than 1 GiB as Python keeps them."""

CHARS_OF_PIECE = 8
"""Characters that each piece of the text counts for in addition: a loop may write empty ones without an end."""

_patching = threading.RLock()
"""Held while a template is rendered: the limit is a patch of jinja's classes."""


@contextlib.contextmanager
def _bounded_templates() -> Iterator[None]:
    """Raise a ``TemplateError`` once a template has written more than :data:`MOST_CHARS` characters.

    A whole template and its parts that are kept in a variable, macros and ``{% generation %}`` blocks count each for
    themselves. Strings that one expression multiplies are not looked at.
    """
    with _patching, contextlib.ExitStack() as undo:
        replace(undo, jinja2.Environment, "concat", staticmethod(_joined))
        wrap(undo, jinja2.Template, "generate", _generated)
        yield


def _joined(pieces: Iterable[str]) -> str:
    return "".join(_bounded(pieces))


def _generated(generate: Callable[..., Iterator[str]], *args: Any, **kwargs: Any) -> Iterator[str]:
    return _bounded(generate(*args, **kwargs))


def _bounded(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece) + CHARS_OF_PIECE
        if length > MOST_CHARS:
            raise jinja2.TemplateError(
                f"it has written more than {MOST_CHARS:,} characters, as a loop without an end would"
            )
        if piece:
            yield piece
