"""The characters of an example that are learnt.

Masks are determined on text, then transferred to tokens by their character ranges (tokenizing.py): a token that merges
characters from both sides of a border is learnt. A tokenizer therefore always sees the text as a whole, as it will
when the model is used.

In a chat, the learnt part of an assistant turn is what the model has to produce after its generation prompt: the
answer and the end-of-turn token, without the line break that a template writes after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.config import LossOn
from lowmem_ft.data.text.chat_templates import Message, has_generation_marks, render, render_with_marks
from lowmem_ft.data.text.formats import Chat, Completion, Document, Example
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


def mark_learnt(example: Example, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> MarkedText:
    """Return the text of an example with its learnt parts.

    Args:
        example: of any format.
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
    return _mark_chat(example, tokenizer, loss_on)


def _mark_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, loss_on: LossOn) -> MarkedText:
    _refuse_unwritten_tool_calls(chat, tokenizer)
    if loss_on == "all":
        text = render(tokenizer, chat.messages)
        return MarkedText(text, ((0, len(text)),), holds_special_tokens=True)
    earliest = chat.num_prompt_messages or 0 if loss_on == "completion" else 0
    answers = [i for i in range(earliest, len(chat.messages)) if chat.messages[i]["role"] == "assistant"]
    if not answers:
        return MarkedText(render(tokenizer, chat.messages), (), holds_special_tokens=True)
    messages = chat.messages[: answers[-1] + 1]  # nothing after the last answer is learnt or seen by what is
    if loss_on == "completion":
        text = render(tokenizer, messages)
        first = answers[-1] if chat.num_prompt_messages is None else chat.num_prompt_messages
        learnt = [(_answer_start(tokenizer, messages, first, text), len(text.rstrip()))]
    elif has_generation_marks(tokenizer):
        text, marks = render_with_marks(tokenizer, messages)
        learnt = [_with_eos(text, mark, tokenizer) for mark in marks]
    else:
        text = render(tokenizer, messages)
        learnt = [_turn(tokenizer, messages, index, text) for index in answers]
    if not any(start < end for start, end in learnt):
        raise DataError(
            "The chat template marks no answer, although the chat has an assistant turn. Check its {% generation %} "
            "marks, or set data.chat_template to another template."
        )
    return MarkedText(text, tuple(learnt), holds_special_tokens=True)


def _refuse_unwritten_tool_calls(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Reject tool calls if the template ignores them: it would write empty answers, and those would be learnt."""
    template = tokenizer.get_chat_template()
    for message in chat.messages:
        if message.get("tool_calls") and "tool_calls" not in template:
            raise DataError(
                "The chat template does not write the tool calls of an assistant turn, so they would not be learnt. "
                "Set data.chat_template to a template that writes message.tool_calls, or write the calls into the "
                "content."
            )
        if message.get("function_call") and "function_call" not in template:
            raise DataError(
                "The chat template does not write the function_call of an assistant turn, so it would not be learnt. "
                "It is the older form of tool_calls: replace 'function_call': {...} by 'tool_calls': [{'type': "
                "'function', 'function': {...}}], and the role `function` by `tool`."
            )


def _with_eos(text: str, mark: tuple[int, int], tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the marked range with the EOS that directly follows: some templates close the mark before it.

    A model that never learns its EOS does not stop.
    """
    start, end = mark
    eos = tokenizer.eos_token
    return (start, end + len(eos)) if isinstance(eos, str) and text.startswith(eos, end) else (start, end)


def _turn(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], index: int, text: str
) -> tuple[int, int]:
    """Return the range of assistant turn ``index`` in the rendered chat."""
    start = _answer_start(tokenizer, messages, index, text)
    is_last = index == len(messages) - 1
    until_turn = (text if is_last else render(tokenizer, messages[: index + 1])).rstrip()
    if text.startswith(until_turn):
        return start, len(until_turn)
    # Some templates write a turn differently once others follow. Then the turn is found by its content.
    said = messages[index]["content"].strip()
    if said not in until_turn[start:]:
        raise _rewritten(index)
    end = until_turn.rfind(said) + len(said)
    if text.startswith(until_turn[:end]):
        # gpt-oss ends an answer by <|return|>, and by <|end|> in history, where no model stops.
        return start, end
    closing = until_turn[end:]
    if not text.startswith(said + closing, start):  # Qwen3 gives only the last answer an empty <think> part
        raise _rewritten(index)
    return start, start + len(said + closing)


def _answer_start(tokenizer: PreTrainedTokenizerBase, messages: list[Message], index: int, text: str) -> int:
    """Return where the answer begins after ``messages[:index]`` and the generation prompt."""
    if index == 0:  # most templates cannot render an empty chat, so compare two first answers
        role = messages[0]["role"]
        first, second = (render(tokenizer, [{"role": role, "content": content}]) for content in ("a", "b"))
        return _common_length(first[: _common_length(first, second)], text)
    prompted = render(tokenizer, messages[:index], add_generation_prompt=True)
    if text.startswith(prompted):
        return len(prompted)
    # A generation prompt need not be in the chat as a whole: DeepSeek-R1's opens a <think> that a plain answer lacks.
    if not text.startswith(render(tokenizer, messages[:index]).rstrip()):
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
