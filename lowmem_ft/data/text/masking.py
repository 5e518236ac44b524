"""The characters of an example that are learnt.

Masks are determined on text, then transferred to tokens by their character ranges (tokenizing.py): a token that merges
characters from both sides of a border is learnt. A tokenizer therefore always sees the text as a whole, as it will
when the model is used.

In a chat, the learnt part of an assistant turn is what the model has to produce after its generation prompt: the
answer and the end-of-turn token, without the line break that a template writes after it. A turn that its data excludes
(``weight: 0`` of OpenAI and Mistral, ``train: false`` of axolotl, ``loss: false`` of ms-swift) is read and not learnt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.config import LossOn
from lowmem_ft.data.text.chat_templates import Message, Renderer, has_generation_marks
from lowmem_ft.data.text.examples import Chat, Completion, Document, TextExample
from lowmem_ft.data.text.tool_calls import names_of, with_arguments_as_text, with_unique_names, writes_python
from lowmem_ft.foundation.errors import DataError


@dataclass(frozen=True)
class MarkedText:
    """A text and the parts of it that are learnt.

    Args:
        text: the text that the model reads.
        learnt: character ranges, ascending; empty if the example holds no answer.
        holds_special_tokens: a template wrote the special tokens; else the tokenizer adds its own, and EOS ends the
            text and is learnt.
    """

    text: str
    learnt: tuple[tuple[int, int], ...]
    holds_special_tokens: bool


def mark_learnt(example: TextExample, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> MarkedText:
    """Return the text of an example with its learnt parts.

    Args:
        example: an example in any format of text.
        tokenizer: has a chat template if the example is a chat.
        loss_on: completion (for a chat without a named prompt: the last assistant turn), assistant, or all.

    Returns:
        The marked text; no part of it is marked if a chat has no assistant turn.

    Raises:
        DataError: if assistant turns are requested of strings, the template rejects the chat, or it does not show where
            an assistant turn begins and ends.
    """
    if isinstance(example, Document):
        return MarkedText(example.text, ((0, len(example.text)),), holds_special_tokens=False)
    if isinstance(example, Completion):
        if loss_on == "assistant":
            raise DataError(
                "data.loss_on=assistant needs chats, got a prompt and a completion that are strings. "
                "Set data.loss_on=completion."
            )
        text = example.prompt + example.completion
        start = 0 if loss_on == "all" else len(example.prompt)
        return MarkedText(text, ((start, len(text)),), holds_special_tokens=False)
    if not any(message.get("tool_calls") for message in example.messages):
        return _mark_chat(example, tokenizer, loss_on)
    return _mark_calls(example, tokenizer, loss_on)


def _mark_calls(chat: Chat, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> MarkedText:
    """Mark a chat with tool calls, whose arguments some templates take as a mapping, and others as JSON text."""
    as_text = replace(chat, messages=with_arguments_as_text(chat.messages))
    try:
        marked = _mark_chat(chat, tokenizer, loss_on)
    except DataError:
        try:
            chat, marked = as_text, _mark_chat(as_text, tokenizer, loss_on)
        except DataError:
            marked = None
        if marked is None:
            raise
    else:
        if writes_python(chat.messages, marked.text):
            chat, marked = as_text, _mark_chat(as_text, tokenizer, loss_on)
    _require_calls_written(chat, tokenizer)
    return marked


def _require_calls_written(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject a chat whose calls the template leaves out.

    Functions are renamed for that: a question about the weather has the name ``weather`` without any call.
    """
    renamed = with_unique_names(chat.messages)
    last = max(index for index, message in enumerate(renamed) if message.get("tool_calls"))
    text = Renderer(tokenizer, chat.tools).text(renamed[: last + 1])
    for index, message in enumerate(renamed):
        if any(name not in text for name in names_of(message.get("tool_calls") or [])):
            raise DataError(
                f"The chat template does not write the tool calls of message {index + 1}, so they would not be learnt. "
                "Set data.chat_template to a template that writes message.tool_calls, or write the calls into the "
                "content."
            )


def _mark_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> MarkedText:
    template = Renderer(tokenizer, chat.tools)
    excluded = [index for index, message in enumerate(chat.messages) if is_excluded(message)]
    if loss_on == "all":
        text = template.text(chat.messages)
        turns = [_turn_of_any(template, chat.messages, index, text) for index in excluded]
        return MarkedText(text, _without([(0, len(text))], turns), holds_special_tokens=True)
    earliest = chat.num_prompt_messages or 0 if loss_on == "completion" else 0
    answers = [i for i in range(earliest, len(chat.messages)) if chat.messages[i]["role"] == "assistant"]
    if loss_on == "completion" and chat.num_prompt_messages is None:
        answers = answers[-1:]
    learnt_answers = [index for index in answers if index not in excluded]
    if not learnt_answers:
        return MarkedText(template.text(chat.messages), (), holds_special_tokens=True)
    messages = chat.messages[: learnt_answers[-1] + 1]  # what follows is neither learnt nor seen by what is
    answers = [index for index in answers if index < len(messages)]
    if loss_on == "completion":
        text = template.text(messages)
        first = answers[-1] if chat.num_prompt_messages is None else chat.num_prompt_messages
        turns = [_turn(template, messages, index, text) for index in answers if index in excluded]
        whole = (_answer_start(template, messages, first, text), len(text.rstrip()))
        learnt = _without([whole], turns)
    elif has_generation_marks(tokenizer):
        text, marks = template.marked_text(messages)
        if excluded and len(marks) != len(answers):
            raise DataError(
                f"Message {excluded[0] + 1} is excluded from learning, but the chat template marks {len(marks)} parts "
                f"of a chat of {len(answers)} answers with {{% generation %}}, so that its own mark is not known. "
                "Correct the template, or set data.chat_template to one without such marks."
            )
        kept = (
            [mark for mark, i in zip(marks, answers, strict=True) if i not in excluded] if excluded else marks
        )
        learnt = [_with_eos(text, mark, tokenizer) for mark in kept]
    else:
        text = template.text(messages)
        learnt = [_turn(template, messages, index, text) for index in learnt_answers]
    if not any(start < end for start, end in learnt):
        raise DataError(
            "The chat template marks no answer, although the chat has an assistant turn. Check its {% generation %} "
            "marks, or set data.chat_template to another template."
        )
    return MarkedText(text, tuple(learnt), holds_special_tokens=True)


_TRAINED = ("train", "training", "loss")


def is_excluded(message: Message) -> bool:
    """Return whether a message says that it must not be learnt."""
    weight = message.get("weight")
    is_weightless = isinstance(weight, (int, float)) and weight == 0
    return is_weightless or any(message.get(name) is False for name in _TRAINED)


def _without(ranges: list[tuple[int, int]], holes: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the ranges without the holes in them, all of them ascending."""
    for hole_start, hole_end in holes:
        ranges = [
            part
            for start, end in ranges
            for part in ((start, min(end, hole_start)), (max(start, hole_end), end))
            if part[0] < part[1]
        ]
    return tuple(ranges)


def _turn_of_any(template: Renderer, messages: list[Message], index: int, text: str) -> tuple[int, int]:
    """Return the range of a turn of any role in the rendered chat, an answer's without what prompts it."""
    if messages[index]["role"] == "assistant":
        return _turn(template, messages, index, text)
    start = 0 if index == 0 else _common_length(template.text(messages[:index]), text)
    return start, _common_length(template.text(messages[: index + 1]), text)


def _with_eos(text: str, mark: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the marked range with the EOS that directly follows: some templates close the mark before it.

    A model that never learns its EOS does not stop.
    """
    start, end = mark
    eos = tokenizer.eos_token
    return (start, end + len(eos)) if isinstance(eos, str) and text.startswith(eos, end) else (start, end)


def _turn(template: Renderer, messages: list[Message], index: int, text: str) -> tuple[int, int]:
    """Return the range of assistant turn ``index`` in the rendered chat."""
    start = _answer_start(template, messages, index, text)
    is_last = index == len(messages) - 1
    until_turn = (text if is_last else template.text(messages[: index + 1])).rstrip()
    if text.startswith(until_turn):
        return start, len(until_turn)
    # Some templates write a turn differently once others follow. Then the turn is found by what it says.
    calls = names_of(messages[index].get("tool_calls") or [])
    said = calls[-1] if calls else messages[index]["content"].strip()
    written = until_turn[start:]
    # Qwen3 gives only the last answer a <think> part: what follows that is the same in both.
    cut = next((cut for cut in range(len(written)) if text.startswith(written[cut:], start)), len(written))
    if said in written[cut:]:
        return start, start + len(written) - cut
    end = until_turn.rfind(said) + len(said)
    if not calls and said in written and text.startswith(until_turn[:end]):
        # gpt-oss ends an answer by <|return|>, and by <|end|> in history, where no model stops.
        return start, end
    raise _rewritten(index)


def _answer_start(template: Renderer, messages: list[Message], index: int, text: str) -> int:
    """Return where the answer begins after ``messages[:index]`` and the generation prompt."""
    if index == 0:  # most templates cannot render an empty chat, so compare two first answers
        role = messages[0]["role"]
        first, second = (template.text([{"role": role, "content": content}]) for content in ("a", "b"))
        return _common_length(first[: _common_length(first, second)], text)
    prompted = template.text(messages[:index], add_generation_prompt=True)
    if text.startswith(prompted):
        return len(prompted)
    # A generation prompt need not be in the chat as a whole: DeepSeek-R1's opens a <think> that a plain answer lacks.
    if not text.startswith(template.text(messages[:index]).rstrip()):
        raise _rewritten(index)
    return _common_length(prompted, text)


def _common_length(a: str, b: str) -> int:
    """Return how many leading characters two texts share."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _rewritten(index: int) -> DataError:
    return DataError(
        f"The chat template rewrites the text before or in message {index + 1} when later messages follow, so its "
        "answer cannot be found in the chat. Set data.loss_on=completion to learn the last answer only, "
        "data.loss_on=all, or data.chat_template to a template with {% generation %} marks."
    )
