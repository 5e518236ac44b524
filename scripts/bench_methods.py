"""Compare what ``estimate model=NAME --gpu all`` chooses for a GPU with the best of a grid of settings, one by one.

    python scripts/bench_methods.py --seed 1 --models 2 --gpus rtx-4090 a100-40gb h100-80gb [--methods lora qlora]
    python scripts/bench_methods.py --named qwen3-14b --gpus h200

Models are drawn from the catalogue by the seed. The grid changes the printed command of each method and GPU in the rows
of a micro-batch (1, 2, 4, 8), in checkpointing (none, half of the layers, all) and in Liger's kernels, with as many
rows a step; updates in backward, which take a step of one micro-batch, come after it where a step has more. Each is
estimated by itself on that GPU. A row has the speed in the table, that of the printed command by
itself, and that of the best of the grid that fits. ``cpu_seconds`` are those of the table with nothing kept.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from command_line import parser_of
from measured_on import measured_on

from lowmem_ft.catalog.architectures import load_architectures
from lowmem_ft.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.estimator import MethodEstimate, estimate_memory, estimate_methods
from lowmem_ft.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.shipped.fine_tuning_methods import ROWS, recipe_of

MICRO_BATCHES = (1, 2, 4, 8)
KERNELS = ("none", "liger")
CHECKPOINTED = ("none", "half", "full")


def main() -> None:
    """Print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=2, help="number of models to draw")
    parser.add_argument("--named", nargs="+", help="models by name, in place of drawn ones")
    parser.add_argument("--methods", nargs="+", default=["full", "lora", "qlora"])
    parser.add_argument("--gpus", nargs="+", default=["rtx-4090", "a100-40gb", "h100-80gb", "b200"])
    parser.add_argument("--rows", nargs="+", type=int, default=MICRO_BATCHES, help="of the grid")
    arguments = parser.parse_args()
    models = arguments.named or random.Random(arguments.seed).sample(
        sorted(load_architectures()), arguments.models
    )
    found: list[dict[str, Any]] = []
    for model in models:
        began = _cpu_seconds()
        table = estimate_methods(model, [*load_gpus().values()], is_thorough=False)
        print(f"{model}: {_cpu_seconds() - began:.0f} s of the processor for the table", file=sys.stderr)
        kept = KeptTraces()
        for result in table:
            if result.gpu.name not in arguments.gpus or result.method.name not in arguments.methods:
                continue
            row = compared(result, arguments.rows, kept)
            found.append({"model": model, "cpu_seconds": round(_cpu_seconds() - began, 1), **row})
            print(json.dumps(found[-1]), file=sys.stderr)
    print(json.dumps({**measured_on("cpu"), "rows": found}, indent=1))


def compared(result: MethodEstimate, rows: Sequence[int], kept: KeptTraces) -> dict[str, Any]:
    """Return a result of the table next to its own command and the best of the grid."""
    best, settings = 0.0, ""
    for words, recipe in grid(result, rows):
        speed = speed_of(recipe, result.gpu.name, kept)
        if speed > best:
            best, settings = speed, words
    table = tokens_per_second(result.estimate) if result.fits else 0.0
    return {
        "method": result.method.name,
        "gpu": result.gpu.name,
        "command": " ".join(result.command),
        "table": round(table, 1),
        "printed_command": round(speed_of(recipe_of(result.command), result.gpu.name, kept), 1),
        "by_hand": round(best, 1),
        "by_hand_settings": settings,
        "by_hand_over_table": round(best / table, 3) if table else None,
    }


def grid(result: MethodEstimate, rows: Sequence[int]) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipes of the grid around a printed command that its rules allow, and their settings."""
    name, *settings = result.command
    recipe = recipe_of(result.command)
    step_rows = recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps
    config = load_model_config(recipe.model, architecture_only=True)
    half = config.get_text_config().num_hidden_layers // 2
    for micro_batch, checkpointed, kernels in itertools.product(rows, CHECKPOINTED, KERNELS):
        changed = {
            ROWS[0]: micro_batch,
            ROWS[1]: step_rows // micro_batch,
            "model.kernels": kernels,
            "checkpointing.mode": "none" if checkpointed == "none" else "full",
            "checkpointing.skip_last_layers": half if checkpointed == "half" else 0,
        }
        if recipe.optimizer.in_backward and micro_batch < step_rows:
            changed["optimizer.in_backward"] = "false"
        others = [setting for setting in settings if setting.partition("=")[0] not in changed]
        words = [f"{key}={value}" for key, value in changed.items()]
        try:
            yield " ".join(words), load_recipe(name.removeprefix("recipe="), [*others, *words])
        except UserError:  # a rule of the recipe's
            continue


def speed_of(recipe: Recipe, gpu: str, kept: KeptTraces) -> float:
    """Return tokens a second; 0 where it does not fit or cannot run."""
    try:
        estimate = estimate_memory(recipe, find_gpu(gpu), kept=kept)
    except UserError:
        return 0.0
    return tokens_per_second(estimate) if estimate.fits else 0.0


def tokens_per_second(estimate: MemoryEstimate | None) -> float:
    """Return tokens a second; 0 if unknown."""
    return 0.0 if estimate is None or estimate.step is None else estimate.step.tokens_per_second


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
