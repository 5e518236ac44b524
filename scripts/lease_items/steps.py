"""Steps of whole models on equal rows: the Trainer at its best, and ours with one row a micro-batch and with two.

Each of two processes takes its runs one after the other: Liger's functions, which the Trainer's run puts into
transformers, stay there. Of six steps the first two warm up, the third is recorded by torch's profiler, kernels alone,
and three are timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from lease_items.parts import Numbers, Part, Setting
from measuring.families import write_families
from measuring.measured_rows import described
from speed.kernel_trace import digest, events_of
from speed.peer_settings import ROWS, TOKENS
from speed.this_gpu import ThisGPU
from speed.work_runs import run_on
from speed.works import TWO_ROWS, WITHOUT_CHECKPOINTS, WORKS, Work
from torch.profiler import ProfilerActivity, profile

WORK = WORKS["8b-full"]
PROFILED, TIMED = 3, 3
"""The step that is recorded, and the number of those after it."""

MODEL, SECONDS = "qwen3-8b", 35
SMALLER_MODEL, SMALLERS_SECONDS = "qwen3-1.7b", 12
"""The model of a lease too short for two runs of the first one."""

PEERS = ("2:off:wide", "1:off:wide", "2:off")
"""With Liger's fused head in chunks as long as suit it, and as installed."""

TWO_ROWS_WITHOUT_CHECKPOINTS = (
    *WITHOUT_CHECKPOINTS,
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=8",
)
TWO_ROWS_IN_80_GB = (*TWO_ROWS, "checkpointing.skip_last_layers=15", "offload.activations=inputs")
_BYTES_OF_TWO_ROWS = 120e9


class ProfiledGPU(ThisGPU):
    """This machine's GPU, which times every step and profiles one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._profile = profile(activities=[ProfilerActivity.CUDA])
        self._began = time.perf_counter()

    def end_step(self) -> None:
        """Wait for a step's work; the next step begins at once."""
        torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._began)
        if len(self.seconds) == PROFILED:
            self._profile.stop()
        elif len(self.seconds) == PROFILED - 1:
            self._profile.start()
        self._began = time.perf_counter()

    def events(self) -> list[dict[str, Any]]:
        """Return what the GPU did in the profiled step: kernels, copies, fills; ``ts`` and ``dur`` in microseconds."""
        return events_of(self._profile)


def of_peer(setting: Setting) -> Iterator[Part]:
    """Yield runs of the Trainer, the one first that is thought to be its best."""
    for run in PEERS:
        yield _part(setting, f"the Trainer, {run}", WORK, run, needs_cuda=True)  # Liger's kernels


def of_ours(setting: Setting) -> Iterator[Part]:
    """Yield runs of ours: one row, then two, as the GPU has memory for them."""
    on_gpu = setting.device == "cuda"
    yield _part(setting, "ours, 1 row", _ours(WITHOUT_CHECKPOINTS), "ours:0")
    if not on_gpu or torch.cuda.mem_get_info()[1] > _BYTES_OF_TWO_ROWS:
        yield _part(setting, "ours, 2 rows", _ours(TWO_ROWS_WITHOUT_CHECKPOINTS), "ours:0")
    # Its layers without checkpoints are counted, which a tiny model has not.
    yield _part(setting, "ours, 2 rows in 80 GB", _ours(TWO_ROWS_IN_80_GB), "ours:0", needs_cuda=True)


def _ours(settings: Sequence[str]) -> Work:
    return dataclasses.replace(WORK, overrides=(*WORK.overrides, *settings), variants=())


def _part(setting: Setting, name: str, work: Work, run: str, **options: Any) -> Part:
    short = setting.seconds < 2 * SECONDS
    model, seconds = (SMALLER_MODEL, SMALLERS_SECONDS) if short else (MODEL, SECONDS)
    tokens = 64 if setting.tiny else TOKENS
    settings = {"model": "tiny" if setting.tiny else model, "run": run, **described((tokens,))}
    if run.startswith("ours"):
        settings["overrides"] = [work.recipe, *work.overrides]
    return Part(
        name=f"{name}, {settings['model']}",
        run=functools.partial(_measured, setting, work, run, model, tokens),
        seconds=seconds,
        settings=settings,
        **options,
    )


def _measured(setting: Setting, work: Work, run: str, model: str, tokens: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        if setting.tiny:
            write_families(Path(folder))
            work = _with_model(work, f"{folder}/qwen3", f"data.max_length={tokens}")
        else:
            work = _with_model(work, model)
        if setting.device == "cuda":
            gpu = ProfiledGPU()
            run_on(gpu, work, run, (tokens,), num_steps=PROFILED + TIMED, after_step=gpu.end_step)
            held = gpu.result_of(gpu.seconds).process_bytes
            return {
                **_of_steps(gpu.seconds[PROFILED:], tokens),
                "process_bytes": held,
                **digest(gpu.events()),
            }
        work = dataclasses.replace(work, overrides=(*work.overrides, "model.kernels=none"))
        seconds = run_on(ThisGPU(), work, run, (tokens,), num_steps=1 + TIMED)
        assert seconds is not None, "the Trainer's kernels need a GPU"
        return _of_steps(seconds[1:], tokens)


def _with_model(work: Work, model: str, *settings: str) -> Work:
    overrides = (*work.overrides, f"model={model}", *settings)
    return dataclasses.replace(work, overrides=overrides, peer=dataclasses.replace(work.peer, model=model))


def _of_steps(seconds: Sequence[float], tokens: int) -> Numbers:
    step = statistics.median(seconds)
    return {"step_seconds": step, "steps_seconds": list(seconds), "tokens_per_second": ROWS * tokens / step}
