"""The results of a rehearsal, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.category import Phase
from lowmem_ft.foundation.memory.comparison import estimated_peaks
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, Verdict
from lowmem_ft.planning.rehearsal.records import Saved
from lowmem_ft.planning.rehearsal.window_shapes import WindowShape
from lowmem_ft.recipe import Recipe, recipe_to_yaml

SCHEMA = 1

DISK_BYTES_PER_SECOND = 1e9
"""Assumed rate of reading and writing files: an NVMe drive takes a second for 1 to 3 GB, a network disk several."""

NETWORK_BYTES_PER_SECOND = 125e6
"""Assumed rate of a download: 1 Gbit/s."""


@dataclass(frozen=True, kw_only=True)
class TracedShape:
    """The micro-batches, or the held-out batches, of one shape.

    Args:
        shape: shape of their data; in vertical order, that of all micro-batches of a step.
        at_step: the first step with it, counted from 1.
        times: number of times in the rehearsed steps.
        seconds: mean seconds of one, forward and backward, by the GPU's timing model. Without the update, unless that
            is part of the backward pass or all of a step's micro-batches pass together.
        peak_bytes: peak bytes of tensors in its step, or in its evaluation.
        is_exact: whether it was traced in its original shape, and not padded to another.
        waits: number of times the host waits for the device in one, by the line of code.
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
    """The place where memory runs out first.

    Args:
        phase: what the program was doing.
        module: the module that asked for memory; empty if outside any.
        requested_bytes: bytes that could not be allocated.
        at_step: the step, from 1; None: before the first.
        shape: shape of the data; None: there was no data.
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
    """Seconds of the whole run, by part."""

    loading: float
    steps: float
    evaluations: float
    saving: float

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return self.loading + self.steps + self.evaluations + self.saving


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """The results of a run without its values.

    Args:
        recipe: the rehearsed one.
        gpu: the GPU it was rehearsed for.
        estimate: the estimate from the real batches; its step is their mean.
        worst: the estimate of the recipe's worst batch.
        num_steps: steps of the whole run, or those left of a resumed one.
        rehearsed_steps: number of these that were rehearsed.
        tokens: tokens of the whole run, without padding.
        label_tokens: label tokens, likewise.
        padded_tokens: tokens of the rehearsed steps, padding included.
        rounded_tokens: tokens of the shapes that they count as.
        interpolation_error: largest error at a traced shape of the line through the others, as a share of its seconds;
            seconds of data padded up to shapes are read off that line. 0 if too few shapes were traced to tell.
        steps: the shapes that were traced, the largest first.
        update_seconds: mean seconds per step outside its micro-batches; with theirs, the time of the rehearsed steps.
        evaluations: traced shapes of held-out batches, likewise.
        num_evaluations: evaluations of the whole run.
        checkpoints: the rehearsed ones.
        num_checkpoints: checkpoints of the whole run.
        kept_checkpoints: most checkpoints on the disk at once.
        model: the finished one.
        time: seconds of the whole run.
        download_bytes: the model's files on the hub, whose download is in no number; 0: it is a local folder.
        failure: where memory runs out; None: nowhere.
        warnings: warnings that the run would give.
        seconds: seconds that the rehearsal took.
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
    download_bytes: int
    failure: Failure | None
    warnings: tuple[str, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """True if no allocation fails, and the upper end of the range stays within the budget."""
        return self.estimate.fits and self.failure is None

    @property
    def verdict(self) -> Verdict:
        """The estimate's verdict; "does not fit" if memory runs out although its range is within the limits."""
        return "does not fit" if self.estimate.fits and not self.fits else self.estimate.verdict

    @property
    def cost_usd(self) -> float | None:
        """Cost of the whole run at the catalogue's price; None: it has none."""
        price = self.gpu.cheapest_price
        return None if price is None else price.usd_per_hour * self.time.seconds / 3600

    @property
    def download_seconds(self) -> float:
        """Seconds to download the model's files, at :data:`NETWORK_BYTES_PER_SECOND`."""
        return self.download_bytes / NETWORK_BYTES_PER_SECOND

    @property
    def rounding(self) -> float:
        """Share by which the shapes have more tokens than the data that counts as them."""
        return self.rounded_tokens / max(self.padded_tokens, 1) - 1

    @property
    def longest(self) -> TracedShape:
        """The largest shape, which was traced exactly."""
        return next(step for step in self.steps if step.is_exact)

    def save_seconds(self, saved: Saved) -> float:
        """Return the seconds to write it, at :data:`DISK_BYTES_PER_SECOND`."""
        return saved.total_bytes / DISK_BYTES_PER_SECOND

    def to_json(self) -> dict[str, Any]:
        """Return the estimate's own fields, and those of the run."""
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
                "download_bytes": self.download_bytes,
                "download_seconds": self.download_seconds,
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
