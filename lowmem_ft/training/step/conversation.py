"""A conversation with a model: turns rendered by its chat template, answers streamed as they come.

transformers' ``generate`` and ``TextIteratorStreamer`` do the work; a thread generates, so that the caller can stop it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Generator, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

from lowmem_ft.data.text.chat_templates import Message, Renderer, require_chat_template
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.models.files.sources import first_line
from lowmem_ft.models.hf_config import max_positions
from lowmem_ft.training.step.greedy import end_tokens, generating
from lowmem_ft.training.step.session import ForwardSession


class Conversation:
    """The turns so far, and the model that answers.

    Args:
        session: the model, in eval mode.
        tokenizer: its tokenizer; without a chat template it gets ChatML, with a warning.
        system: the system message; None: the template's own.
        generation: arguments of ``generate`` such as ``temperature``; what is left out is the model's own.
    """

    def __init__(
        self,
        session: ForwardSession,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        require_chat_template(tokenizer)
        self._session, self._tokenizer = session, tokenizer
        self._generation = dict(generation or {})
        self._begin: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._end_ids = end_tokens(session.unwrapped_model, tokenizer)
        self.messages: list[Message] = list(self._begin)
        self._stop = threading.Event()
        self._limit = max_positions(session.unwrapped_model.config)

    def clear(self) -> None:
        """Forget all turns but the system message."""
        self.messages = list(self._begin)

    def stop(self) -> None:
        """End the present answer after its next token."""
        self._stop.set()

    def ask(self, text: str) -> Generator[str, None, None]:
        """Yield the answer to a user's turn piece by piece; both turns join the conversation, an answer cut short too.

        Raises:
            UserError: if the conversation has as many tokens as the model takes, or none, if the text is not Unicode,
                or if ``generate`` refuses its settings.
            StoppedTwice: after a Ctrl-C while the answer that a first one stopped ends.
            Exception: whatever else ``generate`` raises.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        input_ids_BT = self._tokens(asked)
        streamer: Any = TextIteratorStreamer(self._tokenizer, skip_prompt=True)  # type: ignore[arg-type]
        errors: list[BaseException] = []
        ended = threading.Event()
        self._stop.clear()
        arguments = (input_ids_BT, streamer, errors, ended)
        thread = threading.Thread(target=self._generate, args=arguments, daemon=True)
        thread.start()
        pieces: list[str] = []
        try:
            for piece in streamer:
                shown = self._without_end(piece)
                pieces.append(shown)
                yield shown
        finally:
            self.stop()
            _wait_for(ended)
            if not errors:
                self.messages = [*asked, {"role": "assistant", "content": "".join(pieces).strip()}]
        if errors:
            raise errors[0]

    def _tokens(self, messages: list[Message]) -> torch.Tensor:
        text = Renderer(self._tokenizer).text(messages, add_generation_prompt=True)
        if (half := re.search("[\ud800-\udfff]", text)) is not None:
            raise UserError(
                f"A conversation is Unicode text, got {half[0]!r}, which is half a character, or a byte that is not "
                "UTF-8. Write it in UTF-8."
            )
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
        if encoded["input_ids"].shape[1] == 0:
            raise UserError(
                "The chat template writes nothing for this conversation, so that there is nothing to answer. Set "
                "data.chat_template to another template."
            )
        limit = self._limit
        if limit is not None and encoded["input_ids"].shape[1] >= limit:
            raise UserError(
                f"The conversation has {encoded['input_ids'].shape[1]:,} tokens, and the model takes {limit:,}. Start "
                "over with /clear."
            )
        return encoded["input_ids"].to(self._session.runtime.machine.device)

    def _generate(
        self, input_ids_BT: torch.Tensor, streamer: Any, errors: list[BaseException], ended: threading.Event
    ) -> None:
        model: Any = self._session.unwrapped_model
        settings = dict(self._generation)
        if self._limit is not None:  # beyond its positions a model writes nonsense, or fails
            most = self._limit - input_ids_BT.shape[1]
            settings["max_new_tokens"] = min(settings.get("max_new_tokens", most), most)
        try:
            with generating(self._session):
                model.generate(
                    input_ids=input_ids_BT,
                    attention_mask=torch.ones_like(input_ids_BT),
                    streamer=streamer,
                    stopping_criteria=StoppingCriteriaList([_Stopped(self._stop)]),
                    eos_token_id=self._end_ids,
                    pad_token_id=self._end_ids[0],
                    **settings,
                )
        except ValueError as error:  # of a setting that is out of its range
            errors.append(
                UserError(
                    f"The model's generate() refuses its settings: {first_line(error)} Correct the model's "
                    "generation_config.json."
                )
            )
            streamer.end()
        except BaseException as error:
            errors.append(error)
            with contextlib.suppress(Exception):
                streamer.end()
        finally:
            ended.set()

    def _without_end(self, piece: str) -> str:
        """Return a piece of text without the token that ends the answer; other special tokens are shown."""
        ends: Any = self._tokenizer.convert_ids_to_tokens(self._end_ids)
        for end in ends:
            piece = piece.removesuffix(end)
        return piece


class StoppedTwice(KeyboardInterrupt):
    """A Ctrl-C that came while an answer was ending."""


def _wait_for(ended: threading.Event) -> None:
    """Wait until a thread has ended, also after a Ctrl-C: a process that ends while a thread computes would abort.

    It is an event because ``Thread.join`` takes a thread for ended once it was interrupted (Python 3.10 to 3.12).
    """
    try:
        ended.wait()
    except KeyboardInterrupt:
        ended.wait()
        raise StoppedTwice("while it answered.") from None


class _Stopped(StoppingCriteria):
    """True for every row once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self._event.is_set(), device=input_ids.device)
