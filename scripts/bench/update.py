"""A step with our compact optimizer next to the stock Trainer's with bitsandbytes, by a virtual GPU's timing model.

    python scripts/bench update [--write]            # --write: the table of docs/memory_ladder.md
    python scripts/bench update --python             # host time of a parameter's update, in operators of torch

Llama 3.1 8B, rows of 2048 tokens, two per step, on an H200: ``transformers.Trainer`` with bfloat16 weights and
bitsandbytes' 8-bit AdamW, and our step with split24 masters and 8-bit state, each without checkpointing and with it.
On an RTX 4090: our step in backward with state on the host. Ours runs twice: with the Triton kernel, and without
Triton, operation by operation. It needs no GPU; seconds are predictions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
import timeit
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from command_line import parser_of

from lowmem_ft import VirtualGPU  # isort: skip  first: it silences a needless message of bitsandbytes

import torch
from marked_table import put_table, table_of
from measured_on import measured_on
from measuring.constant_rows import caveat_of_the_clock
from measuring.measured_rows import MeasuredRows
from measuring.stubbed_launches import stubbed_launches
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.optimizers.triton.triton_update import Launches
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe

ROWS, TOKENS = 2, 2048
PAGE = Path(__file__).parents[2] / "docs" / "memory_ladder.md"
COMMON = (
    "data=any",
    f"data.max_length={TOKENS}",
    f"training.per_device_train_batch_size={ROWS}",
    "training.gradient_accumulation_steps=1",
    "model.dtype=bfloat16",
    "optimizer.name=adamw",
    "optimizer.master=split24",
    "optimizer.state=8bit",
)
KEEPS_ALL = ("checkpointing.mode=none", "loss.chunk_tokens=null")
CHECKPOINTED = ("checkpointing.mode=full", "loss.chunk_tokens=256")
ON_THE_HOST = ("optimizer.in_backward=true", "accumulation.order=vertical", "offload.optimizer=host")


def main() -> None:
    """Print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", help="of the catalogue")
    parser.add_argument("--write", action="store_true", help="the table into docs/memory_ladder.md")
    parser.add_argument("--python", action="store_true", help="the host's time alone, without kernels")
    arguments = parser.parse_args()
    if arguments.python:
        print(json.dumps({**measured_on("cpu"), **host_time_of_updates()}, indent=2))
        return
    model, rows = arguments.model, list(rows_of(arguments.model))
    if arguments.write:
        put_table(PAGE, "bench update", lines_of(rows))
    found = {**measured_on("cpu"), "model": model, "batch": f"{ROWS} x {TOKENS} tokens"}
    print(json.dumps({**found, "rows": rows}, indent=2))


def rows_of(model: str) -> Iterator[dict[str, Any]]:
    """Yield rows one after the other, as each is estimated."""
    for name, settings in {"no checkpointing": KEEPS_ALL, "checkpointing": CHECKPOINTED}.items():
        stock = _stock(model, "h200", is_checkpointed=settings is CHECKPOINTED)
        yield _row("h200", name, "stock", stock)
        for update, estimate in _ours(model, "h200", settings):
            yield _row("h200", name, update, estimate) | {"of_stock": _ratio(estimate, stock)}
    for update, estimate in _ours(model, "rtx-4090", (*CHECKPOINTED, *ON_THE_HOST)):
        yield _row("rtx-4090", "in backward, state on the host", update, estimate)


def host_time_of_updates(num_parameters: int = 400, num_steps: int = 60) -> dict[str, float]:
    """Return the least microseconds of a parameter's update up to Triton's driver, and without its launch.

    Both are also in the unit of ``add_`` on tensors of one element, measured in turn with the steps: it scales with
    the host.
    """
    parameters = [torch.nn.Parameter(torch.zeros(256, dtype=torch.bfloat16)) for _ in range(num_parameters)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    row = OPTIMIZERS["adamw"]
    hyperparameters = {"lr": 1e-5, "weight_decay": 0.0, **row.hyperparameters}
    optimizer = ChunkedOptimizer(
        parameters, row.update_rule(), hyperparameters, state="8bit", master="split16"
    )
    optimizer.kernel = "untried"
    tiny = torch.zeros(1)

    def step() -> None:
        optimizer.gradient_factor = tiny[0]  # as clipping leaves it
        optimizer.step()

    times = []
    with stubbed_launches():
        for _ in range(num_steps):
            add = timeit.timeit(lambda: tiny.add_(tiny), number=num_parameters)
            whole = timeit.timeit(step, number=1)
            with mock.patch.object(Launches, "launch", _no_launch):
                without_launch = timeit.timeit(step, number=1)
            times.append((add, whole, without_launch))
    add, whole, without_launch = (1e6 * min(of_one) / num_parameters for of_one in zip(*times, strict=True))
    return {
        "add_us": round(add, 3),
        "update_us": round(whole, 2),
        "update_in_adds": round(whole / add, 1),
        "without_launch_us": round(without_launch, 2),
        "without_launch_in_adds": round(without_launch / add, 1),
    }


def _no_launch(*arguments: Any) -> None:
    pass


def lines_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table of :func:`rows_of`, with a line for each kind of step."""
    heads = ("GPU", "step", "stock", "ours, Triton", "of stock", "ours, operations")
    lines = []
    for gpu, step in dict.fromkeys((row["gpu"], row["step"]) for row in rows):
        of = {row["update"]: row for row in rows if (row["gpu"], row["step"]) == (gpu, step)}
        stock, triton, operations = (
            f"{of[update]['step_seconds']:.3f} s" if update in of else "not timed"
            for update in ("stock", "Triton", "operations")
        )
        share = of["Triton"].get("of_stock")
        lines.append((gpu, step, stock, triton, str(share or ""), operations))
    return "\n".join([*caveat_of_the_clock(), table_of(heads, lines), ""])


def _stock(model: str, gpu: str, *, is_checkpointed: bool) -> MemoryEstimate:
    config = load_model_config(_recipe(model, ()).model, architecture_only=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rows = MeasuredRows.of(config, (TOKENS,))
    with VirtualGPU(gpu) as virtual, tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=ROWS,
            max_steps=3,
            train_sampling_strategy="sequential",
            bf16=True,
            optim="adamw_bnb_8bit",
            gradient_checkpointing=is_checkpointed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=network,
            args=arguments,
            train_dataset=[rows.columns(number) for number in range(3 * ROWS)],  # type: ignore[arg-type]
            data_collator=default_data_collator,
        )
        with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints a summary of its own
            trainer.train()
    return virtual.report(tokens_per_step=ROWS * TOKENS)


def _ours(model: str, gpu: str, settings: tuple[str, ...]) -> Iterator[tuple[str, MemoryEstimate]]:
    for update, has_triton in {"Triton": True, "operations": False}.items():
        spec = dataclasses.replace(find_gpu(gpu), has_triton=has_triton)
        yield update, estimate_memory(_recipe(model, settings), spec)


def _recipe(model: str, settings: tuple[str, ...]) -> Any:
    return load_recipe(None, [f"model={model}", *COMMON, *settings])


def _row(gpu: str, step: str, update: str, estimate: MemoryEstimate) -> dict[str, Any]:
    return {
        "gpu": gpu,
        "step": step,
        "update": update,
        "step_seconds": round(_seconds(estimate), 3),
        "bound_by": None if estimate.step is None else estimate.step.bound_by,
        "process_peak_gib": round(estimate.process_peak_bytes / 2**30, 1),
    }


def _ratio(estimate: MemoryEstimate, other: MemoryEstimate) -> float:
    return round(_seconds(estimate) / _seconds(other), 3)


def _seconds(estimate: MemoryEstimate) -> float:
    assert estimate.step is not None, "steps are traced"
    return estimate.step.seconds


if __name__ == "__main__":
    main()
