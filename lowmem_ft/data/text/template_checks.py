"""Checks of how examples become text: whether all that is said arrives, and answers begin and end as in generation.

A chat template is checked on a copy of each kind of chat that the data holds, in which every message says one word of
ours: whatever a template does to real contents (trimming, escaping, cutting out reasoning), such a word is in the text
or it is not. Nothing is reported that the data does not contain: a template without system messages is fine for chats
that have none.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.config import LossOn
from lowmem_ft.data.text.chat_templates import Message, Renderer
from lowmem_ft.data.text.examples import Chat, Completion, Document, Row, TextExample, Tokens
from lowmem_ft.data.text.masking import MarkedText, is_excluded, mark_learnt
from lowmem_ft.data.text.tokenizing import Tokenization
from lowmem_ft.foundation.errors import DataError

logger = logging.getLogger(__name__)

NUM_CHECKED_EXAMPLES = 1000
"""First examples of a source whose kinds of chats, and whose strings, are checked."""

MOST_KINDS = 64
"""Kinds of chats that are rendered, the first ones: where calls of tools differ, nearly each chat is a kind."""

MUCH = 0.05
"""Share of strings that may be cut inside a token without a warning: some answers begin with a line break."""

_WORD = "Zebra"
_WORDS = re.compile(rf"{_WORD}\d+s")
_END_OF_THOUGHT = "</think>"
"""End of the reasoning in an answer: templates treat an answer with one otherwise than an answer without."""

_CONTEXT_CHARS = 400
"""Characters on each side of a border between strings that decide where its tokens end."""


@dataclass(frozen=True)
class _Problem:
    """A way in which examples become wrong text.

    Args:
        check: name of the check, such as ``end_of_turn``.
        words: what is wrong, and what to do about it.
    """

    check: str
    words: str


def log_template_problems(
    tokenization: Tokenization, rows: Iterable[Row], end_token_ids: Collection[int] | None
) -> None:
    """Log a warning for each problem of :func:`_problems`; the record's ``check`` has its name.

    Args:
        tokenization: tokenizes the rows.
        rows: raw rows of the data; no more than the first :data:`NUM_CHECKED_EXAMPLES` are read.
        end_token_ids: see :func:`_problems`.
    """
    examples: list[TextExample] = []
    for row in islice(rows, NUM_CHECKED_EXAMPLES):
        try:
            example = tokenization.example_format.read(row)
        except DataError:
            continue  # tokenizing it raises the same error, with the row's number
        if example is not None and not isinstance(example, Tokens):
            examples.append(example)
    found = _problems(examples, tokenization.tokenizer, tokenization.loss_on, end_token_ids)
    for problem in found:
        logger.warning("%s: %s", tokenization.source, problem.words, extra={"check": problem.check})


def _problems(
    examples: Collection[TextExample],
    tokenizer: PreTrainedTokenizerBase,
    loss_on: LossOn,
    end_token_ids: Collection[int] | None = None,
) -> list[_Problem]:
    """Return what is wrong with the text that examples become, each problem once.

    Args:
        examples: some of the data.
        tokenizer: has a chat template if any of them is a chat.
        loss_on: the tokens to learn.
        end_token_ids: tokens at which the model's generation stops, in addition to the tokenizer's EOS; None: unknown,
            then any special token ends an answer.

    Returns:
        The problems, in the order of the checks.
    """
    check = _Check(tokenizer, loss_on, end_token_ids)
    kinds = {_kind_of(example): example for example in examples if isinstance(example, Chat)}
    found = [problem for chat in islice(kinds.values(), MOST_KINDS) for problem in check.chat(chat)]
    found += check.strings([example for example in examples if not isinstance(example, Chat)])
    first: dict[str, _Problem] = {}
    for problem in found:
        first.setdefault(problem.check, problem)
    return list(first.values())


def _kind_of(chat: Chat) -> tuple[Any, ...]:
    """Return what a template may decide by, apart from the words: two chats alike in it are checked once."""
    turns = (
        (
            message["role"],
            bool(message["content"].strip()),
            _END_OF_THOUGHT in message["content"],
            *sorted(message),
        )
        for message in chat.messages
    )
    return chat.num_prompt_messages, tuple(turns)


@dataclass(frozen=True)
class _Check:
    """The checks of one tokenizer and its template."""

    tokenizer: PreTrainedTokenizerBase
    loss_on: LossOn
    end_token_ids: Collection[int] | None

    def chat(self, chat: Chat) -> Iterator[_Problem]:
        """Yield what is wrong with chats of one kind."""
        answers = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not answers or answers[-1] < (chat.num_prompt_messages or 0):
            return  # it is left out, and counted as such
        messages = [
            _saying(message, number) for number, message in enumerate(chat.messages[: answers[-1] + 1])
        ]
        try:
            marked = mark_learnt(replace(chat, messages=messages), self.tokenizer, self.loss_on)
        except DataError:
            return  # of these words alone: tokenizing the chat itself raised no error
        yield from self._unsaid(messages, marked)
        yield from self._mask(messages, chat.num_prompt_messages, marked)
        yield from self._two_begins(marked.text, templated=True)
        if _says(_learnt(marked), messages[-1], len(messages) - 1):
            yield from self._end(messages[-1], marked)
        asked = answers[-1] if chat.num_prompt_messages is None else chat.num_prompt_messages
        if asked > 0:
            yield from self._generation_prompt(
                Renderer(self.tokenizer, chat.tools), messages[:asked], marked.text
            )

    def strings(self, examples: Collection[Completion | Document]) -> Iterator[_Problem]:
        """Yield the problems of raw texts and of prompts with completions, to which no chat template is applied."""
        for example in examples:
            begin = example.text if isinstance(example, Document) else example.prompt
            if problem := next(self._two_begins(begin[:_CONTEXT_CHARS], templated=False), None):
                yield problem
                break
        pairs = [example for example in examples if isinstance(example, Completion)]
        split = sum(map(self._is_border_in_a_token, pairs))
        if pairs and split > MUCH * len(pairs):
            yield _Problem(
                "prompt_border",
                f"{split} of the first {len(pairs)} prompts end inside a token of prompt and completion together, so "
                "the prompt of a generation has other tokens than the prompts learnt. Move the blank at the end of the "
                "prompts to the beginning of the completions, or set data.format=alpaca to wrap both in the chat "
                "template.",
            )

    def _unsaid(self, messages: list[Message], marked: MarkedText) -> Iterator[_Problem]:
        lost = [
            message["role"]
            for number, message in enumerate(messages)
            if message["role"] in ("system", "developer", "user") and not _says(marked.text, message, number)
        ]
        if lost:
            roles = " and ".join(dict.fromkeys(lost))
            instead = "" if "user" in lost else ", or move its words into the first user message"
            yield _Problem(
                "message_lost",
                f"The chat template leaves out the {roles} message of some chats: the model does not see it. Set "
                f"data.chat_template to a template that writes it{instead}.",
            )

    def _mask(
        self, messages: list[Message], num_prompt_messages: int | None, marked: MarkedText
    ) -> Iterator[_Problem]:
        learnt = _learnt(marked)
        answers = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and not is_excluded(message)
        ]
        if answers and not any(_says(learnt, messages[number], number) for number in answers):
            is_written = _says(marked.text, messages[answers[-1]], answers[-1])
            yield _Problem(
                "answer_not_learnt",
                f"The chat template {'marks other text than' if is_written else 'does not write'} the content of the "
                "assistant's turns, so no answer is learnt. Check its {% generation %} marks, or set "
                "data.chat_template to another template.",
            )
        if self.loss_on == "all" or num_prompt_messages is not None:
            return
        asked = [number for number, message in enumerate(messages) if message["role"] != "assistant"]
        if any(_word(number) in learnt for number in asked):
            yield _Problem(
                "question_learnt",
                f"The chat template's {{% generation %}} marks hold more than answers, so questions are learnt too "
                f"(data.loss_on={self.loss_on}). Set data.chat_template to a template that marks only answers, or "
                "data.loss_on=all if that is intended.",
            )

    def _two_begins(self, text: str, *, templated: bool) -> Iterator[_Problem]:
        bos: Any = self.tokenizer.bos_token_id
        ids = self._ids(text, add_special_tokens=not templated)
        if bos is None or ids[:2] != [bos, bos]:
            return
        way_out = (
            "The chat template writes it twice. Set data.chat_template to a corrected one."
            if templated
            else "The tokenizer adds one to the text, which has one. Remove it from the text; chats are better given "
            "as messages than as rendered text (data.format=messages)."
        )
        yield _Problem(
            "two_begins",
            f"Examples begin with the beginning-of-text token {self.tokenizer.bos_token!r} twice. {way_out}",
        )

    def _end(self, answer: Message, marked: MarkedText) -> Iterator[_Problem]:
        """Yield whether the last answer, which is learnt, ends without a token at which generation stops."""
        start = max((word.end() for word in _WORDS.finditer(marked.text)), default=0)
        if not answer["content"].strip():  # a call of a tool, which has no words
            start = marked.learnt[-1][0]
        ids = self._ids(
            "".join(marked.text[max(begin, start) : end] for begin, end in marked.learnt if end > start)
        )
        while ids and not str(self.tokenizer.decode(ids[-1:])).strip():
            ids.pop()
        eos: Any = self.tokenizer.eos_token_id
        ends: set[int] = {eos, *(self.end_token_ids or ())} - {None}
        named = ", ".join(repr(self.tokenizer.convert_ids_to_tokens(number)) for number in sorted(ends))
        if not ids or not (self._is_special(ids[-1]) or ids[-1] in ends):
            yield _Problem(
                "end_of_turn",
                "The chat template writes no end-of-turn token that is learnt after an answer, so the model does not "
                f"learn to stop. Set data.chat_template to a template that ends each answer with {named or 'one'}, "
                "inside its {% generation %} marks if it has them.",
            )
        elif self.end_token_ids is not None and ids[-1] not in ends:
            last = self.tokenizer.convert_ids_to_tokens(ids[-1])
            yield _Problem(
                "other_end",
                f"Answers end with {last!r}, and generation stops at {named} (generation_config.json and the "
                f"tokenizer's EOS): the trained model would write on. Add {ids[-1]} to eos_token_id in the model's "
                f"generation_config.json, or set data.chat_template to a template that ends answers with {named}.",
            )

    def _generation_prompt(self, template: Renderer, asked: list[Message], text: str) -> Iterator[_Problem]:
        try:
            prompt = template.text(asked, add_generation_prompt=True)
        except DataError:
            return
        ids = self._ids(prompt)
        if not text.startswith(prompt):
            shared = next(
                (at for at, pair in enumerate(zip(prompt, text, strict=False)) if len({*pair}) > 1), 0
            )
            start = max((word.end() for word in _WORDS.finditer(prompt[:shared])), default=0)
            until = text.find(_WORD, start)
            yield _Problem(
                "generation_prompt",
                f"The chat template's generation prompt ends with {prompt[start:]!r}, and answers are learnt after "
                f"{text[start:until]!r}, a place where generation does not begin. Set data.chat_template to a template "
                "that begins both alike.",
            )
        elif self._ids(text)[: len(ids)] != ids:
            yield _Problem(
                "generation_prompt",
                f"The chat template's generation prompt ends with {prompt[-20:]!r}, inside a token of prompt and "
                "answer together, so generation begins after other tokens than those learnt. Set data.chat_template to "
                "a template whose prompt ends with a whole token: without a blank at its end, for instance.",
            )

    def _is_border_in_a_token(self, pair: Completion) -> bool:
        prompt, completion = pair.prompt[-_CONTEXT_CHARS:], pair.completion[:_CONTEXT_CHARS]
        ids = self._ids(prompt)
        return self._ids(prompt + completion)[: len(ids)] != ids

    def _is_special(self, token_id: int) -> bool:
        """Return whether a token is a marker rather than text: special, or added to the vocabulary."""
        return token_id in self.tokenizer.all_special_ids or token_id in self.tokenizer.added_tokens_decoder

    def _ids(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]


def _learnt(marked: MarkedText) -> str:
    return "".join(marked.text[start:end] for start, end in marked.learnt)


def _word(number: int) -> str:
    """Return what message ``number`` says; no such word is part of another."""
    return f"{_WORD}{number}s"


def _saying(message: Message, number: int) -> Message:
    """Return a message with a word of ours as its content, if it has any; reasoning before an answer stays."""
    if not message["content"].strip():
        return message
    thought, end, _ = message["content"].rpartition(_END_OF_THOUGHT)
    return {**message, "content": f"{thought}{end}\n\n{_word(number)}" if end else _word(number)}


def _says(text: str, message: Message, number: int) -> bool:
    """Return whether a text has the word of a message; True if the message has no words."""
    return not message["content"].strip() or _word(number) in text
