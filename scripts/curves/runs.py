"""Runs of a learning curve: one rung, one task, one seed; and the results that are kept."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from curves.cpu_products import float32_products
from curves.tasks import TASKS
from measured_on import measured_on
from safetensors.torch import load_file, save_file
from torch import Tensor

from lowmem_ft import load_recipe
from lowmem_ft.data.batches.stream import eval_batches
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.training.evaluation.held_out_loss import evaluate
from lowmem_ft.training.loop import TrainingRun

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests" / "data" / "measured" / "learning-curves.json"

REFERENCE = "float32"
_SPLIT24 = ("model.dtype=bfloat16", "optimizer.master=split24")
RUNGS: dict[str, tuple[str, ...]] = {
    REFERENCE: (),
    "split16": ("model.dtype=bfloat16", "optimizer.master=split16"),
    "split24, bf16 state": (*_SPLIT24, "optimizer.state=bf16"),
    "split24, 8bit state": (*_SPLIT24, "optimizer.state=8bit"),
    "split24, mixed state": (*_SPLIT24, "optimizer.state={exp_avg: bf16, exp_avg_sq: fp32}"),
}
"""Settings of each rung, the reference first."""

NUM_STEPS, NUM_POINTS, NUM_SEEDS = 200, 4, 3
"""Steps of a run if no other number is asked for; evaluations in a run; seeds."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One run of the plan."""

    task: str
    seed: int
    rung: str
    steps: int = NUM_STEPS

    def result_in(self, results: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return this run's result, if it is there."""
        mine = dataclasses.asdict(self).items()
        return next(
            (result for result in results if mine <= {name: result[name] for name in _NAMES}.items()), None
        )


_NAMES = [field.name for field in dataclasses.fields(Curve)]


def planned(tasks: list[str], seeds: int, steps: int) -> list[Curve]:
    """Return all runs in their order: every rung of a seed, then the next seed, then the next task."""
    return [
        Curve(task=task, seed=seed, rung=rung, steps=steps)
        for task in tasks
        for seed in range(seeds)
        for rung in RUNGS
    ]


def read_results() -> list[dict[str, Any]]:
    """Return the results that are kept."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []


def keep_result(result: dict[str, Any]) -> None:
    """Add a result to those that are kept, in the order of the plan."""
    places = {rung: place for place, rung in enumerate(RUNGS)}
    tasks = list(TASKS)
    results = sorted(
        [*read_results(), result],
        key=lambda row: (row["steps"], tasks.index(row["task"]), row["seed"], places[row["rung"]]),
    )
    partial = RESULTS.with_suffix(".partial")
    partial.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    os.replace(partial, RESULTS)


def compared_with(curve: Curve) -> Curve | None:
    """Return the run whose final weights a run's distance is from: float32's, for which it is that of seed 0."""
    other = dataclasses.replace(curve, rung=REFERENCE, seed=0 if curve.rung == REFERENCE else curve.seed)
    return other if other != curve else None


def run_curve(curve: Curve, model: Path, cache: Path) -> dict[str, Any]:
    """Train one run from the demo's model on, and return its result.

    The final weights of float32 are left in ``cache``, for the distances of other runs.

    Args:
        curve: the run.
        model: folder of SmolLM2-135M-Instruct.
        cache: folder for data and weights.
    """
    other = compared_with(curve)
    settings = [
        *TASKS[curve.task].settings(cache),
        *RUNGS[curve.rung],
        f"training.max_steps={curve.steps}",
        f"training.seed={curve.seed}",
        "training.use_cpu=true",
    ]
    with contextlib.ExitStack() as stack:
        output_dir = stack.enter_context(TemporaryDirectory(dir=cache, prefix="run-"))
        if curve.rung != REFERENCE:
            stack.enter_context(float32_products())
        run = TrainingRun.build(
            load_recipe("demo", [*settings, f"model={model}", f"training.output_dir={output_dir}"])
        )
        run.folder.start(run.recipe, run.progress)
        held_out = _held_out_losses(run, curve.steps, from_start=other is None)
        run.folder.end(succeeded=True)
    weights = _weights_of(run)
    if curve.rung == REFERENCE:
        save_file(weights, weights_file(cache, curve))
    return {
        **dataclasses.asdict(curve),
        "held_out": held_out,
        "distance": None if other is None else _distance(weights, weights_file(cache, other), model),
        "tokens": run.progress.tokens,
        "settings": [setting.replace(str(cache), "{cache}") for setting in settings],
        **measured_on("cpu"),
    }


def weights_file(cache: Path, curve: Curve) -> Path:
    """Return where a run's final weights are kept."""
    return cache / f"{curve.task}-{curve.seed}-{curve.steps}.safetensors"


def _held_out_losses(run: TrainingRun, steps: int, *, from_start: bool) -> list[tuple[int, float]]:
    """Train, and return steps and held-out losses at the points, or from the start on."""
    assert run.data.evaluation is not None
    config, every, losses = run.recipe.training, steps // NUM_POINTS, []
    for step in range(steps + 1):
        if step:
            run.step()
        if step % every == 0 and (step or from_start):
            batches = eval_batches(
                run.data.evaluation,
                batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
                num_processes=1,
                process_index=0,
                collate=run.data.collate,
            )
            result = evaluate(run.session, run.runtime, batches)
            assert result is not None, "nothing interrupts it"
            losses.append((step, result.loss))
    return losses


def _weights_of(run: TrainingRun) -> dict[str, Tensor]:
    """Return the trained weights in float32, with all that their masters hold."""
    optimizer = run.session.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has it inside
    assert isinstance(optimizer, ChunkedOptimizer)
    return {
        name: optimizer.master_of(parameter)
        .read(parameter.detach().view(-1), optimizer.state[parameter])
        .view(parameter.shape)
        for name, parameter in run.session.unwrapped_model.named_parameters()
    }


def _distance(weights: dict[str, Tensor], other: Path, model: Path) -> float:
    """Return the distance from another run's final weights, as a share of the way that these went."""
    reference, start = load_file(other), load_file(model / "model.safetensors")
    apart = sum((weights[name] - reference[name]).double().square().sum().item() for name in weights)
    way = sum((reference[name] - start[name]).double().square().sum().item() for name in weights)
    return (apart / way) ** 0.5
