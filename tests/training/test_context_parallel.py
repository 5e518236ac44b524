"""Rows whose tokens are spread over several processes, by torch's own ring, beside one process with the same rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NEAR = {"loss": 1e-5, "norm": 1e-5}
"""Relative: sums in float32, in another order."""

ROUNDED = {"loss": 2e-3, "norm": 0.1}
"""The same in bfloat16, where the merged parts of attention are rounded once more: 1e-3 and 1e-2 at most were seen."""

STEPS, LAYERS = 3, 2

TRAIN = """
import contextlib, json, os, sys, types
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import TrainingRun

folder, here, cases = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.append(here)
from ring_on_gloo import fused_kernels_on_cpu

world = int(os.environ.get("WORLD_SIZE", 1))

def run(words, context):
    words += [f"distributed.context={context}"]
    data_width = world // context if world > 1 else 1
    rows = 2 if "two-rows" in words else 1
    settings = [word for word in words if "=" in word and (world > 1 or not word.startswith("distributed."))]
    recipe = load_recipe("tiny", [
        "training.use_cpu=true", "budget.preflight=false", "training.max_steps=14",
        f"training.output_dir={folder}/none",
        f"training.per_device_train_batch_size={rows}",
        f"training.gradient_accumulation_steps={4 // data_width // rows}",
        *settings,
    ])
    with fused_kernels_on_cpu() if world > 1 else contextlib.nullcontext({}) as calls:
        run = TrainingRun.build(recipe)
        run.metrics = types.SimpleNamespace(write=lambda *args, **kwargs: None)  # there is no folder
        calls.clear()
        taken = [run.step() for _ in range(3)]
        trained = dict(calls)
        held_out = run.evaluations.evaluate().result.loss
    kinds = sorted({type(parameter).__name__ for parameter in run.session.unwrapped_model.parameters()})
    return {
        "loss": [step["loss"] for step in taken] + [held_out],
        "norm": [step["grad_norm"] for step in taken],
        "calls": trained,
        "kinds": kinds,
    }

results = {name: run(words.split(), context) for name, (words, context) in cases.items()}
json.dump(results, open(f"{folder}/{world}-{os.environ.get('RANK', 0)}.json", "w"))
"""

CASES = {
    "odd-rows": "distributed.strategy=ddp data.max_length=77",
    "padded-lora": "distributed.strategy=fsdp2 adapter.name=lora two-rows",
    "bfloat16": "distributed.strategy=fsdp2 model.dtype=bfloat16",
}
"""The first rows of an odd length, the second with padding, the third with grouped heads in the flash kernel; all with
checkpointed layers and a chunked loss."""

OTHERS = {
    "plain": "distributed.strategy=fsdp2",
    "copies": "distributed.strategy=ddp",
    "copies-lora": "distributed.strategy=ddp adapter.name=lora two-rows",
    "offload.activations=inputs": "distributed.strategy=fsdp2 offload.activations=inputs",
    "offload.activations=all": "distributed.strategy=ddp checkpointing.mode=none offload.activations=all",
    "checkpointing.mode=none": "distributed.strategy=fsdp2 checkpointing.mode=none",
    "checkpointing.mode=selective": "distributed.strategy=fsdp2 checkpointing.mode=selective",
    "loss.chunk_tokens=null": "distributed.strategy=ddp loss.chunk_tokens=null",
    "vertical": "distributed.strategy=fsdp2 accumulation.order=vertical optimizer.in_backward=true",
    "tiles": "distributed.strategy=ddp tiling.mlp=2 tiling.head=3",
    "mixed": "distributed.strategy=ddp training.mixed_precision=bf16",
}


def trained(forks, folder: Path, world: int, context: int, cases: dict[str, str]) -> list[dict]:
    """What each process has seen, by case."""
    here = str(Path(__file__).parents[1])
    given = json.dumps({name: (words, context) for name, words in cases.items()})
    arguments = (TRAIN, str(folder), here, given)
    done = [forks.run(*arguments)] if world == 1 else forks.run_several(world, *arguments)
    assert [process.returncode for process in done] == [0] * world, done[0].stderr
    return [json.loads((folder / f"{world}-{rank}.json").read_text()) for rank in range(world)]


def assert_trains_as_one(forks, folder: Path, world: int, context: int, cases: dict[str, str]) -> list[dict]:
    """Losses and norms as in one process, in every process; returns what each of them has seen."""
    [one] = trained(forks, folder, 1, 1, cases)
    several = trained(forks, folder, world, context, cases)
    for name, words in cases.items():
        near = ROUNDED if "bf" in words else NEAR
        for rank in several:
            for kind, tolerance in near.items():
                assert rank[name][kind] == pytest.approx(one[name][kind], rel=tolerance), (name, kind)
    return several


def test_two_processes_share_each_row(forks, tmp_path):
    ranks = assert_trains_as_one(forks, tmp_path, 2, 2, CASES)
    for seen in ranks:
        # Each layer's forward runs twice, in parts: this process's tokens with those of each of the two.
        for name, micro_batches in ("odd-rows", 4), ("padded-lora", 2):
            parts = STEPS * micro_batches * LAYERS * 2
            assert seen[name]["calls"] == {"efficient": 2 * parts, "efficient backward": parts}
        parts = STEPS * 4 * LAYERS * 2
        assert seen["bfloat16"]["calls"] == {"flash": 2 * parts, "flash backward": parts}
        assert seen["odd-rows"]["kinds"] == ["Parameter"]
        assert "DTensor" in seen["bfloat16"]["kinds"]


@pytest.mark.slow
def test_with_every_technique(forks, tmp_path):
    assert_trains_as_one(forks, tmp_path, 2, 2, OTHERS)


@pytest.mark.slow
@pytest.mark.parametrize("context", [4, 2])
def test_four_processes(forks, tmp_path, context):
    cases = {**CASES, **{name: OTHERS[name] for name in ("plain", "copies-lora", "vertical")}}
    ranks = assert_trains_as_one(forks, tmp_path, 4, context, cases)
    parts = STEPS * context * LAYERS * context  # four rows a step, over the groups
    assert ranks[3]["copies-lora"]["calls"]["efficient backward"] == parts // 2


RUN = """
import contextlib, os, sys

here, *settings = sys.argv[1:]
sys.path.append(here)
from lowmem_ft.cli.commands.train import main
from ring_on_gloo import fused_kernels_on_cpu

sys.argv[1:] = settings
with fused_kernels_on_cpu() if "WORLD_SIZE" in os.environ else contextlib.nullcontext():
    sys.exit(main())
"""


def test_a_run_goes_on_in_other_numbers_of_processes(forks, metrics, tmp_path):
    """In two that share rows, then alone, as if it had never been spread; answers and held-out losses are among it."""
    here, run, whole = str(Path(__file__).parents[1]), tmp_path / "run", tmp_path / "whole"
    settings = ("recipe=tiny", "training.use_cpu=true", "budget.preflight=false", "training.save_steps=2")
    settings += (
        "training.eval_steps=2",
        "training.eval_generations=1",
        "training.lr_scheduler_type=constant",
    )
    spread = ("distributed.strategy=fsdp2", "distributed.context=2")
    for folder, last, world in (run, 2, 2), (run, 4, 1), (run, 6, 2), (whole, 6, 1):
        told = (f"training.max_steps={last}", f"training.output_dir={folder}")
        arguments = (
            here,
            *settings,
            *told,
            *(spread if world > 1 else ()),
            "training.resume_from_checkpoint=auto",
        )
        done = [forks.run(RUN, *arguments)] if world == 1 else forks.run_several(world, RUN, *arguments)
        assert [process.returncode for process in done] == [0] * world, done[0].stderr
    assert metrics(run, "step") == list(range(1, 7))
    assert metrics(run) == pytest.approx(metrics(whole), rel=1e-5)
    assert metrics(run, "epoch") == metrics(whole, "epoch")
    held_out = [held_out_losses(folder) for folder in (run, whole)]
    assert len(held_out[0]) >= 3
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


def held_out_losses(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["eval_loss"] for record in records if "eval_loss" in record]


MIXING = """
import sys
from torch import nn
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import TrainingRun

folder, here = sys.argv[1:]
sys.path.append(here)
from ring_on_gloo import fused_kernels_on_cpu

looked_up = nn.Embedding.forward
nn.Embedding.forward = lambda table, ids: looked_up(table, ids) + 0.1 * looked_up(table, ids).roll(1, 1)
recipe = load_recipe("tiny", [
    "training.use_cpu=true", "budget.preflight=false", f"training.output_dir={folder}/none",
    "distributed.strategy=ddp", "distributed.context=2",
])
with fused_kernels_on_cpu():
    try:
        TrainingRun.build(recipe)
    except ModelError as error:
        print(error)
"""


def test_a_model_that_mixes_tokens_elsewhere_is_refused(forks, tmp_path):
    for done in forks.run_several(2, MIXING, str(tmp_path), str(Path(__file__).parents[1])):
        assert done.returncode == 0, done.stderr
        assert "needs a model whose tokens see one another by attention alone" in done.stdout
