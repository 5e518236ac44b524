"""Seconds and memory of our recipes next to the trainers that people would pick, on the same rows and the same clock.

    python scripts/bench_speed.py [--works 8b-full 7b-lora ...] [--device cuda] [--write]

Each work is one model on one GPU with 16 rows of 2048 tokens a step. The peer's program is its own code, as installed,
on a virtual GPU: ``transformers.Trainer`` or TRL's ``SFTTrainer`` with Liger's kernels, PEFT and bitsandbytes. Each of
several sizes of micro-batches runs with checkpointing and without; the fastest one that fits the GPU counts. A step of
one and a step of two micro-batches run; seconds of more follow from the difference, and two hold as much memory as
more. torchtune is not installed: a loop does what its single-device recipe does (bitsandbytes' paged 8-bit AdamW in the
backward pass of every micro-batch, every layer checkpointed, whole logits). Ours is a shipped recipe with the settings
that the table names. Each run is a process of its own, as Liger replaces functions of transformers for good.

The table goes into ``docs/benchmarks.md`` with ``--write``. Everything is by the clock of ``docs/clock.md``, or, with
``--device cuda``, measured on this machine's GPU: random weights, the median of three steps with all their
micro-batches after a first one that does not count, and what the driver reports for the process. Its rows are written
to ``--out``; ``--write-measured`` writes a table of those in ``tests/data/measured/speed-cuda.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import marked_table

from lowmem_ft.virtual_gpu.gpu import (
    VirtualGPU,
)  # first: what bitsandbytes says to no purpose is then left out

# isort: split
import bitsandbytes  # pyright: ignore[reportMissingImports]  # an optional package
import torch
from datasets import Dataset
from ground_truth.public_runs import PublicRun, model_on_meta
from ground_truth.real_run import run_for_real
from measured_on import measured_on, require_device, wait_for_the_gpu
from peft import LoraConfig  # pyright: ignore[reportMissingImports]  # an optional package
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportMissingImports]  # an optional package

from lowmem_ft.catalog.gpu_catalog import find_gpu
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.estimate import estimate_of_trace
from lowmem_ft.estimator.traces.tracing import trace_recipe
from lowmem_ft.foundation.units import GIB
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.monitoring.process_bytes import ProcessBytes
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.recording.work import STEP_END
from lowmem_ft.virtual_gpu.recording.work import Work as LoggedWork
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
MEASURED = ROOT / "tests" / "data" / "measured" / "speed-cuda.json"
ROWS, TOKENS = 16, 2048
MEASURED_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Result:
    """A run by the clock, or on a GPU.

    Args:
        seconds: seconds of a step.
        outside_products: those that no product of matrices or attention takes; NaN where they were not told apart.
        process_bytes: what the process needs of the GPU's memory.
        fits: whether the GPU has as much.
    """

    seconds: float
    outside_products: float
    process_bytes: int
    fits: bool


@dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """The work of a step.

    Args:
        rows: rows of a micro-batch.
        number: micro-batches of a step.
        checkpoints: whether layers are checkpointed.
        steps: number of such steps.
    """

    rows: int
    number: int
    checkpoints: bool
    steps: int = 2


class ThisGPU:
    """This machine's GPU, in the place of a virtual one.

    Attributes:
        device: the device.
        step_ends: when each step's work was done, in seconds.
    """

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self.step_ends: list[float] = []

    def end_step(self) -> None:
        """Wait for a step's work."""
        torch.cuda.synchronize(self.device)
        self.step_ends.append(time.perf_counter())

    def result(self) -> Result:
        """Return the median of the steps after the first, and what the process holds."""
        ends = self.step_ends
        return self.result_of([end - begin for begin, end in itertools.pairwise(ends)])

    def result_of(self, seconds: Sequence[float]) -> Result:
        """Return the median of seconds, and what the process holds."""
        held, _ = ProcessBytes(self.device).read()
        return Result(
            seconds=statistics.median(seconds), outside_products=math.nan, process_bytes=held, fits=True
        )


AnyGPU = VirtualGPU | ThisGPU


class _EndOfStep(TrainerCallback):
    def __init__(self, gpu: ThisGPU) -> None:
        self._gpu = gpu

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gpu.end_step()


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another tool's program for a work.

    Args:
        title: the tool and its settings that do not change.
        model: name in the catalogue.
        run: runs steps of these micro-batches on a GPU.
        settings: rows of a micro-batch and whether layers are checkpointed.
        updates_each: whether every micro-batch is followed by an update.
    """

    title: str
    model: str
    run: Callable[[AnyGPU, str, MicroBatches], None]
    settings: tuple[tuple[int, bool], ...] = (
        (1, False),
        (2, False),
        (4, False),
        (1, True),
        (2, True),
        (4, True),
    )
    updates_each: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row of the table.

    Args:
        gpu: name in the catalogue.
        recipe: our recipe.
        overrides: its settings that differ.
        variants: other settings in addition, with each of which ours runs once more.
        peer: what it is compared with.
        goal: least ratio of tokens a second, and largest of memory, that the project wants.
    """

    gpu: str
    recipe: str
    overrides: tuple[str, ...]
    variants: tuple[tuple[str, ...], ...] = ()
    peer: Peer
    goal: tuple[float, float]

    def ours(self) -> dict[str, Work]:
        """Return this work and its variants, by their names on a command line."""
        more = (dataclasses.replace(self, overrides=(*self.overrides, *some)) for some in self.variants)
        return {f"ours:{index}": work for index, work in enumerate((self, *more))}


def train_in_full(gpu: AnyGPU, model: str, step: MicroBatches) -> None:
    """Fine-tune all weights with the stock Trainer, Liger's kernels and bitsandbytes' 8-bit AdamW."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, optim="adamw_bnb_8bit", **_common(step))
        Trainer(
            model=_model(gpu, model),
            args=arguments,
            train_dataset=_dataset(step),
            data_collator=default_data_collator,
            callbacks=_callbacks(gpu),
        ).train()


def train_adapters(gpu: AnyGPU, model: str, step: MicroBatches, *, quantization: str) -> None:
    """Train LoRA of rank 16 on all linear layers with TRL, PEFT, Liger's kernels and bitsandbytes."""
    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=_model(gpu, model, quantization),
            args=SFTConfig(folder, optim="adamw_torch_fused", max_length=TOKENS, **_common(step)),
            train_dataset=_dataset(step),
            callbacks=_callbacks(gpu),
            processing_class=_tokenizer(),
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
        ).train()


def train_with_paged_state(gpu: AnyGPU, model: str, step: MicroBatches) -> None:
    """Update each weight in the backward pass by a paged 8-bit AdamW of its own, as torchtune's recipe does."""
    net: Any = _model(gpu, model)
    if step.checkpoints:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in net.parameters():
        optimizer = bitsandbytes.optim.PagedAdamW8bit([parameter], lr=2e-5)
        parameter.register_post_accumulate_grad_hook(functools.partial(_update, optimizer=optimizer))
    ids_BT = torch.zeros(step.rows, TOKENS, dtype=torch.long, device=gpu.device)
    for _ in range(step.steps):
        for _ in range(step.number):
            net(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
        if isinstance(gpu, ThisGPU):
            gpu.end_step()


def _update(parameter: torch.Tensor, *, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


TRAINER = Peer(
    title="`Trainer`, Liger, bitsandbytes 8-bit AdamW; bfloat16 weights without a master",
    model="qwen3-8b",
    run=train_in_full,
)
SFT = Peer(
    title="TRL `SFTTrainer`, PEFT, Liger, fused AdamW",
    model="qwen2.5-7b",
    run=functools.partial(train_adapters, quantization="none"),
)
QLORA = dataclasses.replace(
    SFT,
    title="TRL `SFTTrainer`, PEFT, bitsandbytes NF4, Liger, fused AdamW",
    run=functools.partial(train_adapters, quantization="nf4"),
)
PAGED = Peer(
    title="torchtune's single-device recipe as a loop: no master, paged 8-bit AdamW in each micro-batch's backward",
    model="qwen3-8b",
    run=train_with_paged_state,
    settings=((1, True), (2, True), (4, True)),
    updates_each=True,
)

WITHOUT_CHECKPOINTS = (
    "training.per_device_train_batch_size=1",
    "training.gradient_accumulation_steps=16",
    "checkpointing.mode=none",
    "optimizer.in_backward=false",
    "accumulation.dtype=weights",
)
"""Settings of 8b-bf16 that sum gradients in bfloat16, as the peer does, in place of computing activations again."""

TWO_ROWS = (
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=8",
    "checkpointing.mode=full",
    "checkpointing.mlp_activation=recompute",
    "optimizer.in_backward=false",
    "accumulation.dtype=weights",
)
"""The same with half the launches: the host sets the pace of one row per micro-batch."""

WORKS = {
    "8b-full": Work(
        gpu="h100-80gb",
        recipe="8b-bf16",
        overrides=("model.kernels=liger",),
        variants=(
            (
                "training.per_device_train_batch_size=2",
                "training.gradient_accumulation_steps=8",
                "checkpointing.mode=none",
                "optimizer.in_backward=false",
                "optimizer.master=split24",
                "offload.optimizer=host",
                "accumulation.fusion=true",
            ),
            (*TWO_ROWS, "checkpointing.skip_last_layers=30", "optimizer.master=split24"),
            WITHOUT_CHECKPOINTS,
            (*TWO_ROWS, "checkpointing.skip_last_layers=12"),
        ),
        peer=TRAINER,
        goal=(1.05, 1.0),
    ),
    "7b-lora": Work(
        gpu="rtx-4090",
        recipe="7b-lora",
        overrides=("model.kernels=liger",),
        variants=(("checkpointing.skip_last_layers=0",),),
        peer=SFT,
        goal=(1.1, 0.9),
    ),
    "7b-lora-80gb": Work(
        gpu="h100-80gb",
        recipe="7b-lora",
        overrides=(
            "model.kernels=liger",
            "training.per_device_train_batch_size=4",
            "training.gradient_accumulation_steps=4",
            "checkpointing.mode=none",
            "checkpointing.skip_last_layers=0",
        ),
        peer=SFT,
        goal=(1.1, 0.9),
    ),
    "7b-qlora": Work(
        gpu="rtx-4090",
        recipe="7b-qlora",
        overrides=("model.kernels=liger",),
        variants=(
            ("checkpointing.mlp_activation=recompute",),
            ("checkpointing.mode=full",),
        ),
        peer=QLORA,
        goal=(1.1, 0.9),
    ),
    "8b-offload": Work(
        gpu="rtx-4090", recipe="8b-24gb", overrides=("model.kernels=liger",), peer=PAGED, goal=(1.0, 1.0)
    ),
}


def main() -> None:
    """Run every work, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--settings",
        nargs="+",
        type=setting_of,
        help="micro-batches to try for the peer, such as 2:off for 2 rows and no checkpointing; by default all",
    )
    parser.add_argument("--device", choices=["cuda"], help="measure on this machine's GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/bench_speed.json"), help="(--device cuda)")
    parser.add_argument("--write", action="store_true", help=f"write the table into docs/{PAGE.name}")
    parser.add_argument(
        "--write-measured", action="store_true", help="run nothing, write the table of what was measured"
    )
    parser.add_argument("--in-this-process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.write and arguments.device:
        parser.error("--write is for the virtual clock's table: leave --device out")
    if arguments.write_measured:
        table = "\n".join(measured_lines(json.loads(MEASURED.read_text()))) + "\n"
        PAGE.write_text(
            marked_table.with_table(PAGE.read_text(), f"{Path(__file__).name} --device cuda", table)
        )
        return
    if arguments.device:
        require_device(arguments.device)
    if arguments.in_this_process:
        name, setting = arguments.in_this_process
        result = (_measured if arguments.device else _by_clock)(name, setting)
        print(json.dumps(dataclasses.asdict(result)))
        return
    if arguments.device:
        measure(arguments.works, arguments.settings, arguments.out)
        return
    lines = [
        "| work | run | s a step | tokens/s | outside products, s | process, GiB | ratio of tokens/s | of memory |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in arguments.works:
        for line in compared(name, arguments.settings):
            print(line, flush=True)
            lines.append(line)
    if arguments.write:
        table = "\n".join([*lines, "", _versions(), ""])
        PAGE.write_text(marked_table.with_table(PAGE.read_text(), Path(__file__).name, table))


def measure(names: Sequence[str], settings: Sequence[tuple[int, bool]] | None, out: Path) -> None:
    """Run works on this machine's GPU, ours first, and write each run as soon as it is there."""
    rows: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        titles = {setting: title_of(work, None) for setting, work in WORKS[name].ours().items()}
        titles |= {_text(one): title_of(WORKS[name], one) for one in settings or WORKS[name].peer.settings}
        with ThreadPoolExecutor(2) as pool:  # one imports everything while the other has the GPU
            results = pool.map(functools.partial(_in_new_process, name, options=("--device", "cuda")), titles)
            for title, result in zip(titles.values(), results, strict=True):
                if result is None:
                    continue
                row = {"work": name, "run": title, **dataclasses.asdict(result)}
                del row["outside_products"], row["fits"]
                rows.append(row | measured_on(torch.device("cuda")) | {"libraries": _versions()})
                out.write_text(json.dumps(rows, indent=1) + "\n")


def measured_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of runs on a GPU: of each work the peer's runs, the fastest first, then ours next to that."""
    lines = [
        "| work | run | s a step | tokens/s | process, GiB | ratio of tokens/s | of memory |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, members in itertools.groupby(rows, lambda row: row["work"]):
        of_work = sorted(members, key=lambda row: (row["run"].startswith("ours"), row["seconds"]))
        best = of_work[0]
        for row in of_work:
            seconds, held = row["seconds"], row["process_bytes"]
            ratios = f"{best['seconds'] / seconds:.2f} | {held / best['process_bytes']:.2f}"
            if not row["run"].startswith("ours"):
                ratios = "|"
            numbers = f"{seconds:.2f} | {ROWS * TOKENS / seconds:,.0f} | {held / GIB:.1f}"
            lines.append(f"| {name if row is best else ''} | {row['run']} | {numbers} | {ratios} |")
    return [*lines, "", f"{rows[0]['hardware']}, {rows[0]['date']}. {rows[0]['libraries']}"]


def compared(name: str, settings: Sequence[tuple[int, bool]] | None = None) -> list[str]:
    """Return a work's lines: the peer's fastest run that fits its GPU, ours, and the variants of ours."""
    work = WORKS[name]
    fitting: dict[tuple[int, bool], Result] = {}
    too_large: set[bool] = set()
    for rows, checkpoints in settings or work.peer.settings:  # fewer rows first
        result = None if checkpoints in too_large else _in_new_process(name, _text((rows, checkpoints)))
        if result is not None and result.fits:
            fitting[rows, checkpoints] = result
        else:
            too_large.add(checkpoints)
    setting, best = min(fitting.items(), key=lambda pair: pair[1].seconds, default=(None, None))
    its = f"{work.peer.title}: no setting fits" if setting is None else title_of(work, setting)
    return [
        _line(f"{work.recipe}, {work.gpu}", its, best),
        *(
            _line("", title_of(one, None), ours(one), than=best, goal=work.goal)
            for one in work.ours().values()
        ),
    ]


def title_of(work: Work, setting: tuple[int, bool] | None) -> str:
    """Describe a run of the peer, or ours, which has no setting."""
    if setting is None:
        return f"ours, `{' '.join((work.recipe, *work.overrides))}`"
    rows, checkpoints = setting
    return f"{work.peer.title}; {rows} x {TOKENS}, checkpointing {'on' if checkpoints else 'off'}"


def setting_of(text: str) -> tuple[int, bool]:
    """Read rows of a micro-batch and whether layers are checkpointed, such as ``2:off``."""
    rows, _, checkpoints = text.partition(":")
    if not rows.isdecimal() or ROWS % int(rows) or checkpoints not in ("on", "off"):
        raise argparse.ArgumentTypeError(f"expected rows that divide {ROWS}, then :on or :off, got {text!r}")
    return int(rows), checkpoints == "on"


def _text(setting: tuple[int, bool]) -> str:
    return f"{setting[0]}:{'on' if setting[1] else 'off'}"


def _by_clock(name: str, setting: str) -> Result:
    return of_peer(WORKS[name], *setting_of(setting))


def _measured(name: str, setting: str) -> Result:
    gpu, work = ThisGPU(), WORKS[name]
    if setting in work.ours():
        overrides = (*work.ours()[setting].overrides, "model.weights=random", "data=any")
        recipe = load_recipe(work.recipe, overrides)
        wait_for_the_gpu()
        return gpu.result_of(run_for_real(recipe, num_steps=MEASURED_STEPS).seconds[1:])
    rows, checkpoints = setting_of(setting)
    wait_for_the_gpu()
    step = MicroBatches(rows=rows, number=ROWS // rows, checkpoints=checkpoints, steps=MEASURED_STEPS)
    work.peer.run(gpu, work.peer.model, step)
    return gpu.result()


def of_peer(work: Work, rows: int, checkpoints: bool) -> Result:
    """Run a peer's program in this process, with one micro-batch a step and with two."""
    one = _steps_of_peer(work, MicroBatches(rows=rows, number=1, checkpoints=checkpoints))
    further = ROWS // rows - 1
    if not further:
        return one
    if work.peer.updates_each:
        two = dataclasses.replace(one, seconds=2 * one.seconds, outside_products=2 * one.outside_products)
    else:
        two = _steps_of_peer(work, MicroBatches(rows=rows, number=2, checkpoints=checkpoints))
    return dataclasses.replace(
        two,
        seconds=one.seconds + further * (two.seconds - one.seconds),
        outside_products=one.outside_products + further * (two.outside_products - one.outside_products),
    )


def _steps_of_peer(work: Work, step: MicroBatches) -> Result:
    with VirtualGPU(work.gpu) as gpu:
        work.peer.run(gpu, work.peer.model, step)
    return _result(gpu.report(), gpu.trace().work, find_gpu(work.gpu))


def ours(work: Work) -> Result:
    """Estimate our recipe."""
    gpu, recipe = find_gpu(work.gpu), load_recipe(work.recipe, work.overrides)
    traced = trace_recipe(recipe, functools.partial(VirtualGPU, gpu))
    return _result(estimate_of_trace(recipe, traced, gpu, recipe.budget, 0.0, ""), traced.trace.work, gpu)


def _result(estimate: MemoryEstimate, log: Sequence[LoggedWork], gpu: Gpu) -> Result:
    """Read a step; where an estimate counts micro-batches that it has not traced, by the traced ones' share."""
    ends = [index for index, entry in enumerate(log) if entry.kind == "mark" and entry.name == STEP_END]
    span = Clock(log).times_on(gpu).between(*ends[-2:])
    seconds = span.seconds if estimate.step is None else estimate.step.seconds
    return Result(
        seconds=seconds,
        outside_products=seconds * (1 - span.shares["compute"]),
        process_bytes=estimate.process_peak_bytes,
        fits=estimate.fits,
    )


def _in_new_process(name: str, text: str, options: Sequence[str] = ()) -> Result | None:
    """Run a peer's program, or ours, in a process of its own; None: it fails, which is printed."""
    command = [sys.executable, __file__, *options, "--in-this-process", name, text]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{name} {text}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    result = Result(**json.loads(done.stdout.splitlines()[-1]))
    print(f"{name} {text}: {result}", file=sys.stderr, flush=True)
    return result


def _line(
    work: str,
    run: str,
    result: Result | None,
    than: Result | None = None,
    goal: tuple[float, float] | None = None,
) -> str:
    if result is None:
        return f"| {work} | {run} | | | | | | |"
    ratios = ["", ""]
    if than is not None and goal is not None:
        ratios = [
            f"{than.seconds / result.seconds:.2f} (goal {goal[0]})",
            f"{result.process_bytes / than.process_bytes:.2f} (goal {goal[1]})",
        ]
    numbers = (
        f"{result.seconds:.2f}",
        f"{ROWS * TOKENS / result.seconds:,.0f}",
        f"{result.outside_products:.2f}",
        f"{result.process_bytes / GIB:.1f}",
    )
    return "| " + " | ".join((work, run, *numbers, *ratios)) + " |"


def _model(gpu: AnyGPU, name: str, quantization: str = "none") -> Any:
    """Return a model of the catalogue in bfloat16, with random weights if the GPU has any memory."""
    if isinstance(gpu, VirtualGPU):
        run = PublicRun(
            gpu=gpu.spec.name,
            model=name,
            dtype="bfloat16",
            quantization=quantization,
            batch_size=1,
            length=TOKENS,
        )
        return gpu.place(model_on_meta(run))
    config = ModelConfig(
        name_or_path=name,
        dtype="bfloat16",
        weights="random",
        quantization="nf4" if quantization == "nf4" else "none",
    )
    hf_config = load_model_config(config, architecture_only=True)
    model: Any = load_model(config, hf_config, attn_implementation="sdpa", device=gpu.device, seed=0)
    model.is_loaded_in_4bit = quantization != "none"
    return model


def _callbacks(gpu: AnyGPU) -> list[TrainerCallback]:
    return [_EndOfStep(gpu)] if isinstance(gpu, ThisGPU) else []


def _common(step: MicroBatches) -> dict[str, Any]:
    return {
        "bf16": True,
        "per_device_train_batch_size": step.rows,
        "gradient_accumulation_steps": step.number,
        "gradient_checkpointing": step.checkpoints,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_liger_kernel": True,
        "max_steps": step.steps,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def _dataset(step: MicroBatches) -> Dataset:
    tokens = list(range(2, 2 + TOKENS))
    row = {"input_ids": tokens, "labels": tokens}
    return Dataset.from_list([row] * (ROWS * step.steps))


def _tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that nothing asks: the rows are tokens already."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def _versions() -> str:
    packages = ("torch", "transformers", "trl", "peft", "bitsandbytes", "liger-kernel", "triton")
    return "By " + ", ".join(f"{name} {version(name)}" for name in packages) + "."


if __name__ == "__main__":
    main()
