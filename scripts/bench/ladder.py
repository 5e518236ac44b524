"""The memory ladder, rung by rung: bytes, seconds and losses of real steps, in one table.

    python scripts/bench ladder [--model FOLDER] [--steps 20]
    python scripts/bench ladder --device cuda [--model llama-3.1-8b] [--budgets 24GiB 16GiB 12GiB 8GiB 4GiB]
    python scripts/bench ladder --clock [--model llama-3.1-8b] [--gpus rtx-4090 h100-80gb] [--accumulation 16]
    python scripts/bench ladder --clock --write          # the table of docs/memory_ladder.md

On a CPU: a small real model on the demo's examples. First each rung alone, for its bytes: those kept between two steps
by kind, those on the host apart, and the peak of a step; exact sums over tensor storages. Then all rungs in one
process, step by step in turn, for their seconds (as ratios) and losses: any other load on the machine affects all
alike.

On CUDA: a model of the catalogue with random weights, each rung in a process of its own under each budget, which the
allocator enforces; a rung that does not fit is reported as such.

With ``--clock``: no real GPU but virtual ones, whose timing model predicts a step of one row per micro-batch. For each
GPU, the rungs that fit it: tokens per second; their share of those of the last rung that keeps everything on the GPU
("+ step in backward"), on a GPU of the same kind with enough memory; the bottleneck of the step; and for each kind of
work the share of the step's seconds that would be saved if it took none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from command_line import answer_of_new_process, parser_of
from demo.get_demo_model import default_cache_dir, get_demo_model
from ladder_clock import lines_of, on_clock
from ladder_rungs import RUNGS, Rung, settings_of
from marked_table import put_table, table_of
from measured_on import measured_on, require_device
from measuring.constant_rows import caveat_of_the_clock

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.device_memory import read_device_memory
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.techniques.streaming.parameter_streaming import ParameterStreaming
from lowmem_ft.training.run.loop import TrainingRun
from lowmem_ft.training.step.session import Session

TOKENS = 256
TINY = Path(__file__).parents[2] / "recipes" / "tiny"
PAGE = Path(__file__).parents[2] / "docs" / "memory_ladder.md"


def main() -> None:
    """Run the ladder and print a table and one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="a folder (CPU; the demo's SmolLM2-135M if left out) or a name")
    parser.add_argument("--clock", action="store_true", help="by the clock of virtual GPUs")
    parser.add_argument(
        "--gpus", nargs="+", default=["rtx-4090", "rtx-4060", "a100-80gb", "h100-80gb"], help="(--clock)"
    )
    parser.add_argument("--write", action="store_true", help="(--clock) the table into docs/memory_ladder.md")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulation", type=int, help="micro-batches of a step; 2, or 16 with --clock")
    parser.add_argument("--budgets", nargs="+", default=["24GiB", "16GiB", "12GiB", "8GiB", "4GiB"])
    parser.add_argument("--tokens", type=int, default=2048, help="of a row (CUDA, --clock)")
    parser.add_argument("--one", nargs=2, metavar=("RUNG", "BUDGET"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.clock and arguments.device == "cuda":
        parser.error("--clock times virtual GPUs: leave --device out")
    if arguments.write and not arguments.clock:
        parser.error("--write is for --clock")
    arguments.accumulation = arguments.accumulation or (16 if arguments.clock else 2)
    require_device(arguments.device)
    if arguments.one:
        print(json.dumps(_one_on_cuda(arguments, RUNGS[int(arguments.one[0])], arguments.one[1])))
        return
    if arguments.clock:
        rows = list(on_clock(arguments))
        header, *lines = lines_of(rows)
        table = "\n".join([*caveat_of_the_clock(), table_of(header, lines)])
        print(table)
        if arguments.write:
            put_table(PAGE, "bench ladder", table + "\n")
    else:
        rows = on_cuda(arguments) if arguments.device == "cuda" else on_cpu(arguments)
        print(_table(rows))
    print(json.dumps({**measured_on(arguments.device), "rows": rows}, indent=2))


def on_cpu(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each rung."""
    model_dir = Path(arguments.model) if arguments.model else get_demo_model(default_cache_dir())
    with tempfile.TemporaryDirectory() as scratch:
        recipes = [_cpu_recipe(rung, model_dir, Path(scratch), arguments) for rung in RUNGS]
        rows = [{"rung": rung.name, **bytes_of(recipe)} for rung, recipe in zip(RUNGS, recipes, strict=True)]
        for row, timed in zip(rows, _in_turn(recipes, arguments.steps), strict=True):
            row.update(timed)
    return rows


def bytes_of(recipe: Recipe) -> dict[str, Any]:
    """Return the bytes that a rung keeps after two steps, and the peak of the second; host bytes are listed apart."""
    with StorageTracker() as tracker:
        run = TrainingRun.build(recipe)
        run.folder.start(recipe, run.progress)
        run.step()
        tracker.reset_peak()
        run.step()
        host = run.session.host_memory.bytes_by_category
        kept = {
            "weights": _weight_bytes(run.session),
            "optimizer state": _bytes(_state(run.session)) - host.get("optimizer_state", 0),
            "host": sum(host.values()),
        }
        row = {"kept": kept, "peak_beside_host": tracker.peak_bytes - sum(host.values())}
        run.session.close()
    return row


def _in_turn(recipes: list[Recipe], num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield seconds as a ratio to the first rung's, and losses; the rungs take turns step by step."""
    runs = [TrainingRun.build(recipe) for recipe in recipes]
    for run, recipe in zip(runs, recipes, strict=True):
        run.folder.start(recipe, run.progress)
    seconds: list[list[float]] = [[] for _ in runs]
    losses: list[list[float]] = [[] for _ in runs]
    for _ in range(num_steps):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            losses[index].append(run.step()["loss"])
            seconds[index].append(time.perf_counter() - start)
    for own, curve in zip(seconds, losses, strict=True):
        ratios = [mine / plain for mine, plain in zip(own[1:], seconds[0][1:], strict=True)]
        yield {
            "step_seconds": round(statistics.median(own[1:]), 3),
            "median_ratio": round(statistics.median(ratios), 3),
            "final_loss": round(statistics.mean(curve[-3:]), 4),
            "largest_difference": round(max(abs(a - b) for a, b in zip(curve, losses[0], strict=True)), 4),
        }


def on_cuda(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each rung and budget, each from a process of its own."""
    rows = []
    for index, budget in ((i, budget) for i in range(len(RUNGS)) for budget in arguments.budgets):
        row = {"rung": RUNGS[index].name, "budget": budget}
        try:
            row |= answer_of_new_process(__file__, [*sys.argv[1:], "--one", str(index), budget])
        except RuntimeError as error:
            row |= {"fits": None, "why": f"FAILED: {error}"}
        print(row, file=sys.stderr)
        rows.append(row)
    return rows


def _one_on_cuda(arguments: argparse.Namespace, rung: Rung, budget: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        recipe = _cuda_recipe(rung, Path(scratch), arguments, budget)
        try:
            run = TrainingRun.build(recipe)
            run.folder.start(recipe, run.progress)
            run.step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            before = run.progress.tokens
            for _ in range(arguments.steps - 1):
                run.step()
            torch.cuda.synchronize()
        except (UserError, torch.OutOfMemoryError) as error:
            return {"fits": False, "why": str(error).splitlines()[0]}
        memory = read_device_memory(run.runtime.machine.device)
        return {
            "fits": True,
            "tokens_per_second": (run.progress.tokens - before) / (time.perf_counter() - start),
            "allocated_peak_bytes": memory.peak_bytes,
            "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "host_bytes": sum(run.session.host_memory.bytes_by_category.values()),
        }


def _cpu_recipe(rung: Rung, model_dir: Path, scratch: Path, arguments: argparse.Namespace) -> Recipe:
    return load_recipe(
        "demo",
        [
            f"model={model_dir}",
            "training.use_cpu=true",
            "training.per_device_train_batch_size=2",
            f"training.gradient_accumulation_steps={arguments.accumulation}",
            f"training.max_steps={arguments.steps}",
            f"training.output_dir={scratch / str(RUNGS.index(rung))}",
            "training.overwrite_output_dir=true",  # it runs once for its bytes and once for its time
            "training.save_steps=null",
            f"data.max_length={TOKENS}",
            *settings_of(rung),
        ],
    )


def _cuda_recipe(rung: Rung, scratch: Path, arguments: argparse.Namespace, budget: str) -> Recipe:
    named = load_recipe(None, [f"model={arguments.model or 'llama-3.1-8b'}", "data=any"]).model
    folder, rows = scratch / "model", scratch / "rows.jsonl"
    load_model_config(named, architecture_only=True).save_pretrained(folder)
    line = json.dumps({"text": "memory " * 2 * arguments.tokens})
    rows.write_text("\n".join([line] * arguments.accumulation * arguments.steps))
    return load_recipe(
        None,
        [
            f"model={folder}",
            "model.weights=random",
            f"model.tokenizer_name_or_path={TINY}",  # any will do, and this one needs no network
            f"data={rows}",
            f"data.max_length={arguments.tokens}",
            f"training.gradient_accumulation_steps={arguments.accumulation}",
            f"training.max_steps={arguments.steps}",
            f"training.output_dir={scratch / 'run'}",
            f"budget.device={budget}",
            *settings_of(rung),
        ],
    )


def _weight_bytes(session: Session) -> int:
    """Return bytes of the resident weights, and of the slots for streamed ones."""
    parameters = session.unwrapped_model.parameters()
    streaming = session.techniques.find(ParameterStreaming)
    if streaming is None:
        return _bytes(parameters)
    waiting = streaming.weights_in_slices()
    return streaming.layers.slot_bytes + _bytes(
        parameter for parameter in parameters if parameter not in waiting
    )


def _state(session: Session) -> Iterator[torch.Tensor]:
    for state in session.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _bytes(tensors: Any) -> int:
    """Return bytes of the storages behind tensors, each counted once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _table(rows: list[dict[str, Any]]) -> str:
    """Format rows as Markdown, as in the README."""
    if "kept" not in rows[0]:
        columns = (
            "rung",
            "budget",
            "fits",
            "tokens_per_second",
            "allocated_peak_bytes",
            "reserved_peak_bytes",
            "host_bytes",
            "why",
        )
        lines = [[str(row.get(column, "")) for column in columns] for row in rows]
        return table_of(columns, lines)
    header = ["rung", "weights", "optimizer state", "peak of a step", "host", "time", "loss"]
    return table_of(
        header,
        [
            [
                row["rung"],
                format_bytes(row["kept"]["weights"]),
                format_bytes(row["kept"]["optimizer state"]),
                format_bytes(row["peak_beside_host"]),
                format_bytes(row["kept"]["host"]),
                f"{row['median_ratio']:.2f}",
                f"{row['final_loss']:.3f}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
