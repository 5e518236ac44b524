"""What a rehearsal has found, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.memory.category import Phase
from lowmem_ft.memory.comparison import estimated_peaks
from lowmem_ft.memory.memory_estimate import MemoryEstimate, Verdict
from lowmem_ft.recipe import Recipe, recipe_to_yaml
from lowmem_ft.rehearsal.runtime import Saved
from lowmem_ft.rehearsal.window_shapes import WindowShape

SCHEMA = 1

DISK_BYTES_PER_SECOND = 1e9
"""Assumed of reading and writing files: an NVMe drive takes a second for 1 to 3 GB, a network disk several."""


@dataclass(frozen=True, kw_only=True)
class TracedShape:
    """The micro-batches, or the held-out batches, of one shape.

    Args:
        shape: of their data; of all of a step's where they pass through the layers together.
        at_step: where it came first, from 1.
        times: how often the rehearsed steps have it.
        seconds: of one on average, forward and backward, by the clock of the GPU. Without the update, unless it is
            part of the backward pass or all of a step's micro-batches pass together.
        peak_bytes: most tensors in its step, or in its evaluation.
        is_exact: whether it was traced as it came, and not padded to a shape.
        waits: how often the host waits for the device in one, by the line of code.
    """

    shape: WindowShape
    at_step: int
    times: int
    seconds: float
    peak_bytes: int
    is_exact: bool
    waits: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Where memory runs out first.

    Args:
        phase: what the program was doing.
        module: of the request; empty if outside any.
        requested_bytes: that were not to be had.
        at_step: from 1; None: before the first.
        shape: of the data; None: none was there.
        sample_ids: the examples of that data.
    """

    phase: Phase
    module: str
    requested_bytes: int
    at_step: int | None
    shape: WindowShape | None
    sample_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RunTime:
    """Seconds of the whole run, by what they go into."""

    loading: float
    steps: float
    evaluations: float
    saving: float

    @property
    def seconds(self) -> float:
        """In all."""
        return self.loading + self.steps + self.evaluations + self.saving


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """A run without its values.

    Args:
        recipe: what was rehearsed.
        gpu: for which card.
        estimate: of the real batches; its step is the mean of all.
        worst: the estimate of the recipe's worst batch.
        num_steps: of the whole run, or what is left of one that goes on.
        rehearsed_steps: of these.
        tokens: of the whole run, padding left out.
        label_tokens: likewise.
        padded_tokens: of the rehearsed steps, padding included.
        rounded_tokens: of the shapes that they count as.
        interpolation_error: the most by which a traced shape's seconds lie off the line through the others, on which
            the seconds of what is padded up to shapes are read; 0 where too few were traced to say.
        steps: the shapes that were traced, the largest first.
        update_seconds: of a step on average, beside its micro-batches; with theirs, the time of the rehearsed steps.
        evaluations: likewise, of held-out batches.
        num_evaluations: of the whole run.
        checkpoints: as many as were rehearsed.
        num_checkpoints: of the whole run.
        kept_checkpoints: most that lie on the disk together.
        model: the finished one.
        time: of the whole run.
        failure: where memory runs out; None: nowhere.
        warnings: that the run would give.
        seconds: that the rehearsal took.
    """

    recipe: Recipe
    gpu: Gpu
    estimate: MemoryEstimate
    worst: MemoryEstimate
    num_steps: int
    rehearsed_steps: int
    tokens: int
    label_tokens: int
    padded_tokens: int
    rounded_tokens: int
    interpolation_error: float
    steps: tuple[TracedShape, ...]
    update_seconds: float
    evaluations: tuple[TracedShape, ...]
    num_evaluations: int
    checkpoints: tuple[Saved, ...]
    num_checkpoints: int
    kept_checkpoints: int
    model: Saved | None
    time: RunTime
    failure: Failure | None
    warnings: tuple[str, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether no allocation fails, and the upper end of the range stays within the budget."""
        return self.estimate.fits and self.failure is None

    @property
    def verdict(self) -> Verdict:
        """That of the estimate; where memory runs out though its range is within the limits, it does not fit."""
        return "does not fit" if self.estimate.fits and not self.fits else self.estimate.verdict

    @property
    def cost_usd(self) -> float | None:
        """Of the whole run at the catalogue's price; None: it has none."""
        price = self.gpu.cheapest_price
        return None if price is None else price.usd_per_hour * self.time.seconds / 3600

    @property
    def rounding(self) -> float:
        """By which share the shapes have more tokens than the data that counts as them."""
        return self.rounded_tokens / max(self.padded_tokens, 1) - 1

    @property
    def longest(self) -> TracedShape:
        """The largest, which was traced exactly as it comes."""
        return next(step for step in self.steps if step.is_exact)

    def save_seconds(self, saved: Saved) -> float:
        """Of writing it, at :data:`DISK_BYTES_PER_SECOND`."""
        return saved.total_bytes / DISK_BYTES_PER_SECOND

    def to_json(self) -> dict[str, Any]:
        """The estimate's own fields, and what the run adds."""
        checkpoint = self.checkpoints[-1] if self.checkpoints else None
        return {
            **self.estimate.to_json(),
            "fits": self.fits,
            "verdict": self.verdict,
            "worst_case": self.worst.to_json(),
            "recipe": recipe_to_yaml(self.recipe),
            "peaks": estimated_peaks(self.estimate).to_json(),
            "run": {
                "steps": self.num_steps,
                "rehearsed_steps": self.rehearsed_steps,
                "tokens": self.tokens,
                "label_tokens": self.label_tokens,
                "seconds": self.time.seconds,
                "seconds_by_part": asdict(self.time),
                "cost_usd": self.cost_usd,
                "evaluations": self.num_evaluations,
                "checkpoints": self.num_checkpoints,
                "checkpoints_kept": self.kept_checkpoints,
                "checkpoint_bytes": checkpoint and checkpoint.total_bytes,
                "checkpoint_seconds": checkpoint and self.save_seconds(checkpoint),
                "model_bytes": self.model and self.model.total_bytes,
                "model_seconds": self.model and self.save_seconds(self.model),
                "host_waits": sum(self.longest.waits.values()),
                "host_waits_at": dict(self.longest.waits),
                "update_seconds": self.update_seconds,
                "rounding": self.rounding,
                "interpolation_error": self.interpolation_error,
            },
            "shapes": [asdict(shape) for shape in self.steps],
            "evaluation_shapes": [asdict(shape) for shape in self.evaluations],
            "failure": self.failure and asdict(self.failure),
            "races": list(map(str, self.estimate.races)),
            "warnings": list(self.warnings),
            "rehearsal_seconds": self.seconds,
        }
