"""The record of a run, read from its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.comparison import Peaks, compared, peaks_in
from lowmem_ft.monitoring.profiling.step_profile import StepProfile
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.training.folder.generations_file import (
    BeforeAndAfter,
    Generation,
    before_and_after,
    read_generations,
)
from lowmem_ft.training.folder.replaced_run import METRICS_FILE, PROFILE_FILE, RECIPE_FILE, REHEARSAL_FILE
from lowmem_ft.training.folder.run_folder import RunFolder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run's folder.

    Args:
        path: the folder.
        recipe: the recipe of the run.
        metrics: the lines of its ``metrics.jsonl``.
        is_finished: whether it holds the run's model.
        rehearsal: ``peaks``, ``run`` and ``recipe`` of its rehearsal; None: it was not rehearsed.
        profile: where the time of its steps went; None: none was profiled (``training.profile_steps``).
        answers: the answers to its prompts, of every step.
    """

    path: Path
    recipe: Recipe
    metrics: Sequence[Mapping[str, Any]]
    is_finished: bool
    rehearsal: Mapping[str, Any] | None = None
    profile: StepProfile | None = None
    answers: Sequence[Generation] = ()

    @property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of optimizer steps."""
        return [record for record in self.metrics if "loss" in record]

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """The lines of evaluations; the last one is the finished model's, whichever step that is from."""
        lines = [record for record in self.metrics if "eval_loss" in record]
        of_model = [line for line in lines if line["step"] == self.last("best_step")]
        return lines + of_model[-1:]

    @property
    def generations(self) -> list[BeforeAndAfter]:
        """The first answers to the prompts, and those of the finished model, whichever step that is from."""
        return before_and_after(self.answers, best_step=self.last("best_step"))

    def last(self, key: str) -> Any:
        """Return the newest value of a key; None: there is no value."""
        return next((record[key] for record in reversed(self.metrics) if key in record), None)

    @property
    def estimated(self) -> Peaks | None:
        """Estimated peaks; None: there was no estimate."""
        return peaks_in(self.metrics)[0]

    @property
    def measured(self) -> Peaks | None:
        """Measured peaks; None: they were not written."""
        return peaks_in(self.metrics)[1]

    def check(self) -> None:
        """Check that the lines are those of a run.

        Raises:
            UserError: if one of them is not.
        """
        of_step = ("loss", "step", "tokens", "tokens_per_second")
        for number, record in enumerate(self.metrics, start=1):
            wanted = of_step if "loss" in record else ("step", *({"eval_loss", "seconds"} & record.keys()))
            if not all(isinstance(record.get(key), (int, float)) for key in wanted):
                raise UserError(
                    f"{self.path}/metrics.jsonl, line {number}, is not a record of a run: {str(record)[:80]!r}."
                )
        try:
            peaks_in(self.metrics)
        except TypeError as error:
            raise UserError(
                f"{self.path}/metrics.jsonl has peaks that this version cannot read: {error}."
            ) from error

    def to_json(self) -> dict[str, Any]:
        """Return plain values, rows of memory among them."""
        (estimated, measured), evaluations = peaks_in(self.metrics), self.evaluations
        return {
            "path": str(self.path),
            "recipe": self.recipe.name,
            "model": self.recipe.model.name_or_path,
            "finished": self.is_finished,
            "steps": self.steps[-1]["step"] if self.steps else 0,
            "loss": _in_json(self.last("loss")),
            "first_eval_loss": _in_json(evaluations[0]["eval_loss"] if evaluations else None),
            "eval_loss": _in_json(evaluations[-1]["eval_loss"] if evaluations else None),
            **{key: self.last(key) for key in ("best_step", "stopped", "seconds", "device", "num_processes")},
            "estimated": estimated and estimated.to_json(),
            "measured": measured and measured.to_json(),
            "rehearsed": self.rehearsal and {name: self.rehearsal[name] for name in ("peaks", "run")},
            "generations": [asdict(one) for one in self.generations],
            "profile": self.profile and self.profile.to_json(),
            "errors": {row.name: row.error for row in compared(estimated, measured)},
        }


def _in_json(number: float | None) -> float | None:
    """Return a number that JSON can hold; None for NaN and infinity, which it cannot."""
    return number if number is not None and math.isfinite(number) else None


def read_run(path: Path) -> RunRecord:
    """Return the record of the run in a folder.

    Raises:
        UserError: if it is not the folder of a run, or its files are damaged.
    """
    missing = [name for name in (RECIPE_FILE, METRICS_FILE) if not (path / name).is_file()]
    if missing:
        what = "is not a folder" if not path.is_dir() else f"has no {' and no '.join(missing)}"
        raise UserError(
            f"A report needs the folder of a run (training.output_dir), got {path}, which {what}. Name another."
        )
    folder = RunFolder(path, resume_from=None, overwrite=False)
    run = RunRecord(
        path=path,
        recipe=load_recipe(str(path / RECIPE_FILE)),
        metrics=folder.read_metrics(),
        is_finished=folder.model_folder.is_dir(),
        rehearsal=_rehearsal_in(path),
        profile=_profile_in(path),
        answers=read_generations(path),
    )
    run.check()
    return run


def _rehearsal_in(path: Path) -> dict[str, Any] | None:
    """Return what ``lowmem-ft rehearse`` has written for this report; None: it was not rehearsed."""

    def read(values: Any) -> dict[str, Any]:
        return {key: values[key] for key in ("peaks", "run", "recipe")}

    return _read_file(
        path / REHEARSAL_FILE,
        read,
        "the result of a rehearsal. Delete it, or rehearse the run again with `lowmem-ft rehearse`.",
    )


def _profile_in(path: Path) -> StepProfile | None:
    """Return what ``training.profile_steps`` has written; None: no step was profiled."""
    return _read_file(
        path / PROFILE_FILE,
        StepProfile.from_json,
        "the profile of a run. Delete it, or profile the run again with training.profile_steps.",
    )


def _read_file(file: Path, read: Callable[[Any], T], what: str) -> T | None:
    """Return what a file of JSON holds; None: it does not exist.

    Raises:
        UserError: if this package did not write the file.
    """
    if not file.is_file():
        return None
    try:
        return read(json.loads(file.read_text("utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not {what}") from error
