"""``generations.jsonl`` of a run's folder: each line is an answer with its step and its prompt. Read without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.system.atomic_write import write_whole_file
from lowmem_ft.training.folder.checkpoint_folders import Progress, not_written

GENERATIONS_FILE = "generations.jsonl"


@dataclass(frozen=True, kw_only=True)
class Generation:
    """An answer of the model.

    Args:
        step: optimizer steps taken before it; 0: it is the untrained model's.
        index: the number of the prompt, from 0.
        prompt: the text that the model read, special tokens written out.
        answer: without the token that ends it; None: device memory ran out.
        reference: the answer in the data, if it has one.
    """

    step: int
    index: int
    prompt: str
    answer: str | None
    reference: str | None = None


@dataclass(frozen=True, kw_only=True)
class BeforeAndAfter:
    """The first answer to a prompt, and that of the finished model.

    Args:
        prompt: the prompt.
        before: the answer at the first step that has one.
        after: that of the finished model, or so far; equal to ``before`` if there is one step alone.
        steps: these two steps.
        reference: the answer in the data, if it has one.
    """

    prompt: str
    before: str | None
    after: str | None
    steps: tuple[int, int]
    reference: str | None


def before_and_after(
    generations: Iterable[Generation], *, best_step: int | None = None
) -> list[BeforeAndAfter]:
    """Return the first and the last answer to each prompt, in the order of the prompts.

    Args:
        generations: the answers of a run, in its order.
        best_step: the step whose weights are the finished model, where that is not the last: later answers are another
            model's, and left out.
    """
    by_index: dict[int, list[Generation]] = {}
    for one in generations:
        if best_step is None or one.step <= best_step:
            by_index.setdefault(one.index, []).append(one)
    return [
        BeforeAndAfter(
            prompt=of_prompt[-1].prompt,
            before=of_prompt[0].answer,
            after=of_prompt[-1].answer,
            steps=(of_prompt[0].step, of_prompt[-1].step),
            reference=of_prompt[-1].reference,
        )
        for _, of_prompt in sorted(by_index.items())
    ]


def read_generations(run: Path) -> list[Generation]:
    """Return the answers in a run's folder, except for a last line that a killed process left half-written.

    Raises:
        CheckpointError: if no run of lowmem_ft wrote a line.
    """
    file = run / GENERATIONS_FILE
    lines = file.read_text("utf-8").splitlines(keepends=True) if file.is_file() else []
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.endswith("\n"):
            break
        try:
            found.append(_of_json(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise CheckpointError(
                f"{file}, line {number}, is not an answer of a run: {line.strip()[:80]!r}. Correct or delete that line."
            ) from error
    return found


def _of_json(values: Mapping[str, object]) -> Generation:
    fields: dict[str, object] = dict(values)
    found = Generation(**fields)  # type: ignore[arg-type]  # TypeError for other names
    if (
        not isinstance(found.step, int)
        or not isinstance(found.index, int)
        or not isinstance(found.prompt, str)
    ):
        raise TypeError(fields)
    return found


def keep_generations_before(run: Path, progress: Progress | None) -> None:
    """Drop the answers that a resumed run will give again; None: all of them, as the run starts over."""
    file = run / GENERATIONS_FILE
    if not file.is_file():
        return
    kept = [] if progress is None else [one for one in read_generations(run) if _is_before(one, progress)]
    if kept:
        write_whole_file(file, _lines(kept))
    else:
        file.unlink()


def _is_before(one: Generation, progress: Progress) -> bool:
    return one.step < progress.step or (one.step == progress.step == progress.evaluated_step)


def append_generations(run: Path, generations: Iterable[Generation]) -> None:
    """Append the answers of one step.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    file = run / GENERATIONS_FILE
    try:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(_lines(generations))
    except OSError as error:
        raise not_written(file, error) from error


def _lines(generations: Iterable[Generation]) -> str:
    return "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in generations)
