"""Measurements of seconds as programs for the virtual GPU: their work, traced once, and its time on a clock.

A public row's model is traced with two and with three layers, and its seconds at full depth follow from the difference:
a layer's time does not depend on how many there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import pickle
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from measuring.constant_rows import CONSTANT, CUDA_ROWS, kind_of_rows
from measuring.public_runs import PublicRun, train

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import StepTime
from lowmem_ft.foundation.system.atomic_write import whole_file
from lowmem_ft.models.architecture import catalogue_config
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.optimizers.chunked import chunked_optimizer
from lowmem_ft.planning.estimator.estimate import estimate_context_of
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.calls.work import STEP_END, Work
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock, Span, kinds_of_work
from lowmem_ft.virtual_gpu.replay.trace_estimate import allocator_config_of_runs, step_time
from lowmem_ft.virtual_gpu.upstream.host_python import OPERATORS

ROWS = Path(__file__).resolve().parents[2] / "tests" / "data" / "measured" / "seconds-public.json"
LAST_IN_CHUNKS = "2026-11-27"
"""Last day of runs that launched the update kernel for each 2**22 elements, also where the state was on the GPU."""

FEW, MORE = 2, 3
"""Numbers of layers that are traced."""


@dataclass(frozen=True, kw_only=True)
class SecondsRow:
    """A published measurement.

    Args:
        name: its name here.
        url: where it was published.
        date: day of the measurement.
        gpu: name in the catalogue.
        program: what runs on the virtual GPU, and whether it is what was measured.
        settings: fields of ``PublicRun``.
        seconds: measured seconds of an optimizer step.
        micro_batches: micro-batches of a step.
        open: parts of the configuration that the source leaves open.
        torch: the version that was measured, where the source tells it.
        same_kernels: whether the program measured runs the kernels that run here; others are predicted, not fitted to.
        held_out: whether it was found after the fit, and is predicted by numbers and a clock that never saw it.
    """

    name: str
    url: str
    date: str
    gpu: str
    program: str
    settings: Mapping[str, Any]
    seconds: float
    micro_batches: int = 1
    open: tuple[str, ...] = ()
    torch: str = ""
    same_kernels: bool = True
    held_out: bool = False

    @property
    def is_fitted_to(self) -> bool:
        """True if the clock's numbers are fitted to it."""
        return self.same_kernels and not self.held_out

    @property
    def run(self) -> PublicRun:
        """The program, of two steps."""
        padding = self.settings.get("padding")
        fields = {**self.settings, "padding": None if padding is None else tuple(padding), "num_steps": 2}
        return PublicRun(gpu=self.gpu, **fields)

    @cached_property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        config: Any = catalogue_config(ModelConfig(name_or_path=self.settings["model"]))
        return config.num_hidden_layers

    def kept_in(self, folder: Path) -> Path:
        """Return the file in a folder that keeps the row's work."""
        counted = [OPERATORS, [field.name for field in dataclasses.fields(Work)]]  # what is in the file
        key = hashlib.sha256(
            json.dumps([self.gpu, self.settings, counted], sort_keys=True).encode()
        ).hexdigest()[:16]
        return folder / f"{key}.pickle"


def load_rows() -> list[SecondsRow]:
    """Return every row that the package keeps."""
    return [SecondsRow(**row | {"open": tuple(row["open"])}) for row in json.loads(ROWS.read_text())]


@contextlib.contextmanager
def updated_in_chunks_until(date: str) -> Iterator[None]:
    """Trace what a run of that day was, in a block; see :data:`LAST_IN_CHUNKS`."""
    now = chunked_optimizer.KERNEL_CHUNK_ELEMENTS
    if date <= LAST_IN_CHUNKS:
        chunked_optimizer.KERNEL_CHUNK_ELEMENTS = chunked_optimizer.GPU_CHUNK_ELEMENTS
    try:
        yield
    finally:
        chunked_optimizer.KERNEL_CHUNK_ELEMENTS = now


def measured_rows() -> list[SecondsRow]:
    """Return the runs of recipes that ``measure_memory.py`` timed on a GPU; a row without seconds has changed since."""
    return [
        SecondsRow(
            name=f"recipe {row['name']} {row['date']}",
            url=f"../tests/data/measured/{CUDA_ROWS.name}",
            date=row["date"],
            gpu=row["gpu"]["name"],
            program=f"the recipe itself{', on constant tokens' * (kind_of_rows(row) == CONSTANT)}",
            settings={"overrides": row["overrides"]},
            seconds=statistics.median(row["measured"]["seconds"][1:]),
        )
        for row in json.loads(CUDA_ROWS.read_text())
        if "seconds" in row["measured"]
    ]


def work_of(run: PublicRun, num_layers: int | None = None) -> list[Work]:
    """Return the work of a run's steps, with the model cut to a number of layers."""
    with VirtualGPU(run.gpu) as gpu:
        train(dataclasses.replace(run, num_layers=num_layers), gpu)
    return gpu.trace().work


class TracedRow:
    """A row's work at both depths.

    Args:
        row: the row.
        folder: where traces are kept; the row is traced if it is not there.
    """

    def __init__(self, row: SecondsRow, folder: Path) -> None:
        self.row = row
        file = row.kept_in(folder)
        if not file.exists():
            works = [work_of(row.run, num_layers) for num_layers in (FEW, MORE)]
            folder.mkdir(parents=True, exist_ok=True)
            with whole_file(file, is_cache=True) as stream:
                pickle.dump(works, stream)
        works = pickle.loads(file.read_bytes())
        self._clocks = [(Clock(work), _last_step(work)) for work in works]
        self._gpu = find_gpu(row.gpu).in_its_rows_machine

    @property
    def gpu(self) -> Gpu:
        """The GPU that it was measured on."""
        return self._gpu

    def seconds(self, gpu: Gpu | None = None) -> float:
        """Return the seconds of a step.

        Args:
            gpu: the GPU, perhaps with other rates; None: in the machine that its rows were timed on.
        """
        few, more = (
            clock.times_on(gpu or self._gpu).between(*bounds).seconds for clock, bounds in self._clocks
        )
        return (few + self._further * (more - few)) * self.row.micro_batches

    @property
    def _further(self) -> float:
        """Layers beyond those of the first trace, in layers between both."""
        return (self.row.num_layers - FEW) / (MORE - FEW)

    def step(self, gpu: Gpu) -> StepTime:
        """Return a step as an estimate would, with its kinds of work and its range."""
        spans, kernels = [], defaultdict[str, float](float)
        for weight, (clock, bounds) in zip((1 - self._further, self._further), self._clocks, strict=True):
            times = clock.times_on(gpu)
            spans.append((weight, times.between(*bounds)))
            for kind, spent in clock.seconds_by_kind(times, *bounds).items():
                kernels[kind] += weight * spent
        whole = Span.of_parts(spans)
        by_kind = kinds_of_work(whole, kernels)
        return StepTime(
            seconds=whole.seconds * self.row.micro_batches,
            tokens=0,
            bound_by=whole.bound_by,
            host_share=whole.shares["kernel launches"],
            host_range=gpu.rates.host_range,
            seconds_share=gpu.rates.share_with(by_kind),
            by_kind=by_kind,
        )


class TracedRecipe:
    """A row of a recipe, in place of a :class:`TracedRow`.

    Args:
        row: the row.
    """

    def __init__(self, row: SecondsRow) -> None:
        self.row, self.gpu = row, find_gpu(row.gpu).in_its_rows_machine
        name, *settings = row.settings["overrides"]
        recipe = load_recipe(name.removeprefix("recipe="), settings)
        with updated_in_chunks_until(row.date):
            traced = trace_recipe(recipe, functools.partial(VirtualGPU, self.gpu))
        self._surroundings = estimate_context_of(recipe, traced, self.gpu, recipe.budget)
        self._replays = Replays(traced.trace, allocator_config_of_runs(self.gpu))

    def seconds(self, gpu: Gpu | None = None) -> float:
        """Return the seconds of a step; see :meth:`TracedRow.seconds`."""
        return self.step(gpu or self.gpu).seconds

    def step(self, gpu: Gpu) -> StepTime:
        """Return a step; see :meth:`TracedRow.step`."""
        step = step_time(self._replays, gpu, self._surroundings)
        assert step is not None
        return step


def _last_step(work: list[Work]) -> tuple[int, int]:
    first, last = (
        index for index, entry in enumerate(work) if entry.kind == "mark" and entry.name == STEP_END
    )
    return first, last
