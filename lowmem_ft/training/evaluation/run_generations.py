"""Answers at a run's evaluations: to the same prompts each time, greedily, one prompt after the other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.data.text.prompts import Prompt, prompts_of_examples, read_prompts
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.units import counted
from lowmem_ft.models.hf_config import max_positions
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.training.folder.generations_file import (
    BeforeAndAfter,
    Generation,
    append_generations,
    before_and_after,
    read_generations,
)
from lowmem_ft.training.out_of_memory.error import NotRetried, is_out_of_memory
from lowmem_ft.training.out_of_memory.retry import abandon, give_memory_back
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.greedy import end_tokens
from lowmem_ft.training.step.session import Session

logger = logging.getLogger(__name__)

MOST_IN_LOG, SHOWN_CHARACTERS = 3, 100
"""Answers of a step that the log shows, and the characters of each text."""


class RunGenerations:
    """The answers of one run, in every process of it.

    Args:
        recipe: its ``training.eval_generations`` and the keys around it.
        runtime: knows the other processes, and generates; in a rehearsal without answers.
        folder: the run's folder.
        prompts: the prompts; empty: nothing is generated.
        tokenizer: decodes the answers.
    """

    def __init__(
        self,
        recipe: Recipe,
        runtime: Runtime,
        folder: Path,
        prompts: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._recipe, self._runtime, self._folder = recipe, runtime, folder
        self._prompts, self._tokenizer = prompts, tokenizer
        self._has_said_slow = False

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        runtime: Runtime,
        folder: Path,
        data: PreparedData,
        tokenizer: PreTrainedTokenizerBase,
    ) -> RunGenerations:
        """Read the prompts of a recipe, all processes together.

        Raises:
            DataError: if there are fewer held-out rows than prompts, or the file of prompts cannot be used.
        """
        with runtime.ranks.failing_together():
            prompts = _prompts(recipe, data, tokenizer)
        return cls(recipe, runtime, folder, prompts, tokenizer)

    def __bool__(self) -> bool:
        """Return whether the run has prompts to answer."""
        return bool(self._prompts)

    def answers(
        self, session: Session, step: int, interrupted: Callable[[], bool]
    ) -> list[Generation] | None:
        """Answer all prompts with the present weights, which stay as they are, like everything else in the run.

        Args:
            session: the model; its training mode is restored.
            step: optimizer steps taken.
            interrupted: called after each prompt.

        Returns:
            The answers, only in the main process, for :meth:`write`; none in a rehearsal. None: interrupted.

        Raises:
            NotRetried: if memory ran out where several processes share the weights, which wait for each other.
        """
        if not self:
            return []
        in_all = session.techniques.find(FullySharded) is not None
        end_ids = end_tokens(session.unwrapped_model, self._tokenizer)
        if not self._has_said_slow:
            self._say_if_slow()
        found = []
        session.techniques.flush()
        session.model.eval()
        try:
            for index, prompt in enumerate(self._prompts if in_all or self._runtime.ranks.is_main else ()):
                if not in_all and interrupted():
                    break
                ids = self._answer(session, prompt, end_ids, in_all=in_all)
                if ids is not None:
                    found.append(self._generation(step, index, prompt, ids, end_ids))
        finally:
            session.model.train()
        if self._runtime.ranks.max(interrupted()):
            return None
        return found if self._runtime.ranks.is_main else []

    def write(self, answers: Sequence[Generation]) -> None:
        """Append a step's answers to the run's file, show them to the trackers, and a few in the log."""
        if not answers:
            return
        append_generations(self._folder, answers)
        texts = {f"generation/{one.index}": f"{one.prompt}\n\n---\n\n{one.answer}" for one in answers}
        self._runtime.files.log({"step": answers[0].step, **texts})
        for one in answers[:MOST_IN_LOG]:
            logger.info("Step %d: %r is answered by %s.", one.step, _end_of(one.prompt), _shown(one.answer))

    def before_and_after(self, best_step: int | None) -> list[BeforeAndAfter]:
        """Return the first answer to each prompt, and that of the best step, or else the last; empty in a rehearsal."""
        return before_and_after(read_generations(self._folder), best_step=best_step) if self else []

    def _answer(
        self, session: Session, prompt: Prompt, end_ids: Sequence[int], *, in_all: bool
    ) -> list[int] | None:
        """Return the tokens of an answer: none if memory ran out, None in a rehearsal."""
        max_new_tokens = self._recipe.training.max_new_tokens
        if (limit := max_positions(session.unwrapped_model.config)) is not None:
            max_new_tokens = min(max_new_tokens, limit - len(prompt.input_ids))
        try:
            return self._runtime.values.generate(session, prompt.input_ids, max_new_tokens, end_ids)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if in_all:
                raise NotRetried(
                    "It ran out while the model answered prompts (training.eval_generations), in processes that share "
                    "its weights and wait for each other."
                ) from error
        # Outside the except block: until here the error has kept the tensors of all its frames alive.
        abandon(session)
        give_memory_back(session.runtime.machine.device)
        logger.warning(
            "Device memory ran out while the model answered a prompt of %d tokens, which stays without an answer at "
            "this step; training is not affected. A lower training.max_new_tokens or a shorter prompt needs less.",
            len(prompt.input_ids),
        )
        return []

    def _generation(
        self, step: int, index: int, prompt: Prompt, ids: Sequence[int], end_ids: Sequence[int]
    ) -> Generation:
        """Return the record of an answer; special tokens other than the one that ends it are shown."""
        answer = None
        if ids:  # an answer has a token, if only the one that ends it
            text: Any = self._tokenizer.decode(list(ids[:-1] if ids[-1] in end_ids else ids))
            answer = text.strip()
        return Generation(
            step=step, index=index, prompt=prompt.text, answer=answer, reference=prompt.reference
        )

    def _say_if_slow(self) -> None:
        self._has_said_slow = True
        if (key := key_with(self._recipe, "weights on host")) is not None:
            logger.info(
                "%s answered at each evaluation (training.eval_generations): with %s all weights cross to the device "
                "for each token of an answer, so that they take their time. training.max_new_tokens limits it.",
                f"{counted(len(self._prompts), 'prompt')} {'is' if len(self._prompts) == 1 else 'are'}",
                key.setting_in(self._recipe),
            )


def _prompts(recipe: Recipe, data: PreparedData, tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
    training, count = recipe.training, recipe.training.eval_generations
    if training.generation_prompts is not None:
        return read_prompts(
            training.generation_prompts,
            tokenizer,
            count=count,
            max_length=recipe.data.max_length,
            system_prompt=recipe.data.system_prompt,
        )
    if count is None:
        return ()
    assert data.evaluation is not None, "a rule requires held-out rows or a file of prompts"
    examples = data.evaluation.head(count)
    if len(examples) < count:
        raise DataError(
            f"training.eval_generations={count} takes its prompts from as many held-out examples, but there are "
            f"{len(examples)}. Set it to {len(examples)}, or hold out more."
        )
    return prompts_of_examples(examples, tokenizer)


def _end_of(prompt: str) -> str:
    """Return the end of a prompt, which is where chats have the question."""
    return prompt if len(prompt) <= SHOWN_CHARACTERS else f"...{prompt[-SHOWN_CHARACTERS:]}"


def _shown(answer: str | None) -> str:
    if answer is None:
        return "nothing, as memory ran out"
    return repr(answer if len(answer) <= SHOWN_CHARACTERS else f"{answer[:SHOWN_CHARACTERS]}...")
