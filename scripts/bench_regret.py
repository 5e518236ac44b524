"""Regret of plans against exhaustive search: small random spaces of a small model, each estimated in full.

    python scripts/bench_regret.py [--spaces 20] [--seed 0] [--most 40] [--gpus 1]

A space leaves two to four knobs free, drawn at random, of a recipe whose other knobs are drawn too; its budget is drawn
so that one of its combinations, or nearly, just fits; a second and a third are larger. Every combination is estimated,
and a plan's choice is compared with all that fit: none may be faster by more than 1%, nor be as fast within 1% with
fewer changes, unless something with less memory is faster than that. No weights, no data, no network, no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import operator
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from measured_on import measured_on
from transformers import LlamaConfig

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import parse_bytes
from lowmem_ft.memory.uncertainty import with_headroom
from lowmem_ft.planner import MemoryPlan, plan
from lowmem_ft.planner.plan_target import Target
from lowmem_ft.planner.search.best_found import NEARLY_AS_FAST
from lowmem_ft.planner.search.estimated_needs import Need
from lowmem_ft.recipe import Recipe, check_recipe, load_recipe
from lowmem_ft.recipe.space.search_space import Settings, Space, asks_consent, planned_keys, space_of

BUDGETS = (1.0, 1.3, 2.0)
"""Multiples of the smallest budget, none of them more than the GPU has."""

GPUS = ("rtx-3070", "rtx-3090", "a100-40gb", "h100-80gb", "t4")


def main() -> None:
    """Plan in each space, estimate everything there, and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spaces", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the first space; the next has the next")
    parser.add_argument("--most", type=int, default=40, help="combinations in a space")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs that share the model")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # about settings that no user chose
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWMEM_FT_TRACE_CACHE"] = f"{folder}/traces"
        os.environ["LOWMEM_FT_TRACE_PROCESSES"] = "1"
        save_small_model(f"{folder}/model")
        rows = []
        for seed in range(arguments.seed, arguments.seed + arguments.spaces):
            rows += compare(f"{folder}/model", arguments.gpus, seed, arguments.most)
            done = seed + 1 - arguments.seed
            print(f"\r{done} of {arguments.spaces} spaces", end="", file=sys.stderr)
    print(file=sys.stderr)
    regrets = [row for row in rows if row["regret"]]
    result = {
        "cards": arguments.gpus,
        "spaces": arguments.spaces,
        "plans": len(rows),
        "combinations": sum(row["combinations"] for row in rows) // len(BUDGETS),
        "estimated_by_plans": sum(row["estimated"] for row in rows),
        "where_nothing_fits": sum(row["best_seconds"] is None for row in rows),
        "not_proven": sum(not row["proven"] for row in rows),
        "with_regret": regrets,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(json.dumps({**measured_on(torch.device("cpu")), **result}, indent=2))


def save_small_model(folder: str) -> None:
    """Save an architecture of two layers, without weights."""
    LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        max_position_embeddings=1024,
    ).save_pretrained(folder)


def compare(model: str, num_gpus: int, seed: int, most: int) -> list[dict[str, Any]]:
    """Return a plan and all that fits, in one random space, for each of some budgets."""
    draw = random.Random(seed)
    gpu = draw.choice(GPUS)
    recipe, space, budget = next(_spaces(draw, _settings(model, num_gpus), gpu, most))
    available = find_gpu(gpu).available_bytes
    rows: list[dict[str, Any]] = []
    for times in BUDGETS:
        device = min(round(times * parse_bytes(budget.device or "0B")), available)
        asked = dataclasses.replace(recipe, budget=dataclasses.replace(budget, device=f"{device}B"))
        of_all = _all_needs(space, Target.of(asked, gpu))
        fitting = [(need, changes) for need, changes in of_all if need.fits]
        chosen: MemoryPlan = plan(asked, asked.budget, gpu)
        row = {
            "seed": seed,
            "gpu": gpu,
            "device_bytes": device,
            "free": [key for dimension in space.dimensions for key in dimension.keys],
            "combinations": len(space.combinations),
            "estimated": chosen.counts.estimated,
            "proven": chosen.is_proven,
            "best_seconds": min((need.seconds for need, _ in fitting), default=None),
            "plan_seconds": chosen.estimate.step.seconds if chosen.fits and chosen.estimate.step else None,
            "changes": _complexity_of(chosen, space),
        }
        rows.append({**row, "regret": regret_of(fitting, row["plan_seconds"], row["changes"])})
    return rows


def regret_of(fitting: Sequence[tuple[Need, int]], seconds: float | None, changes: int) -> str:
    """Return what is wrong with a plan, given the needs and the changes of all that fits; empty if nothing is."""
    if not fitting or seconds is None:
        return "" if seconds is None and not fitting else "one of the two has nothing that fits"
    fastest = min(need.seconds for need, _ in fitting)
    enough = (1 + NEARLY_AS_FAST) * fastest
    if seconds > enough:
        return f"{100 * (seconds / fastest - 1):.1f}% slower than the fastest"

    def is_slower_than_with_less(need: Need) -> bool:
        return need.seconds > seconds and any(
            less.seconds < need.seconds
            and (less.device_bytes < need.device_bytes or less.host_bytes < need.host_bytes)
            for less, _ in fitting
        )

    alike = [row for row in fitting if row[0].seconds <= enough and not is_slower_than_with_less(row[0])]
    simplest = min(changes for _, changes in alike)
    return f"changes of {changes}, where {simplest} would do" if changes > simplest else ""


def _complexity_of(chosen: MemoryPlan, space: Space) -> int:
    """Return how much a plan changes, by the choices of a space that it has."""

    def has(settings: Settings) -> bool:
        return all(operator.attrgetter(key)(chosen.recipe) == value for key, value in settings.items())

    choices = []
    for dimension in space.dimensions:
        has_each = [has(choice) for choice in dimension.choices]
        among = 0 if dimension.is_counted and not any(has_each) else has_each.index(True)  # as many as fit
        choices.append(among if chosen.fits else dimension.own)
    return space.complexity(tuple(choices))


def _all_needs(space: Space, target: Target) -> Iterator[tuple[Need, int]]:
    """Yield the needs of each combination that can be built, and how much it changes."""
    for combination in space.combinations:
        with contextlib.suppress(UserError):
            need = target.need(space.recipe_of(combination), space.counted(combination))
            yield need, space.complexity(combination)


def _spaces(
    draw: random.Random, settings: list[str], gpu: str, most: int
) -> Iterator[tuple[Recipe, Space, Budget]]:
    """Yield spaces of at least four combinations and not too many, whose recipe is valid, each with a budget."""
    plain = load_recipe(None, settings)
    while True:
        with contextlib.suppress(UserError):
            recipe = _drawn(draw, settings, plain)
            check_recipe(recipe)
            target = Target.of(recipe, gpu)
            space = space_of(
                recipe,
                num_layers=target.shape.num_layers,
                has_bfloat16=target.has_bfloat16,
                rules=target.rules,
            )
            if 4 <= len(space.combinations) <= most:
                yield recipe, space, _budget_for_one(draw, space, target)


def _drawn(draw: random.Random, given: list[str], plain: Recipe) -> Recipe:
    """Return a recipe with random values of some knobs, and with two to four choices for a plan, always with rows."""
    keys = [key for key in planned_keys(plain) if key.tries and not asks_consent(key)]
    others = [key.path for key in planned_keys(plain) if key.tries and asks_consent(key)]
    free = {key.path for key in draw.sample(keys, draw.randint(1, 3))}
    settings = [
        key.setting(draw.choice(key.tries)) for key in keys if key.path not in free and draw.random() < 0.3
    ]
    kept = ",".join([*(key.path for key in keys if key.path not in free), *others])
    rows = f"training.gradient_accumulation_steps={draw.choice((1, 2, 4))}"
    return load_recipe(None, [*given, rows, *settings, f"plan.keep=[{kept}]"])


def _settings(model: str, num_gpus: int) -> list[str]:
    settings = [f"model={model}", "model.weights=random", "data.max_length=256"]
    return settings if num_gpus == 1 else [*settings, f"distributed.num_processes={num_gpus}"]


def _budget_for_one(draw: random.Random, space: Space, target: Target) -> Budget:
    """Return a budget under which some combination just fits; in one space of five it does not.

    Raises:
        UserError: if no combination can be built.
    """
    share = draw.uniform(1.0, 1.1) if draw.random() < 0.8 else draw.uniform(0.9, 1.0)
    for combination in draw.sample(space.combinations, len(space.combinations)):
        with contextlib.suppress(UserError):
            estimate = target.need(space.recipe_of(combination), space.counted(combination)).estimate
            device = max(with_headroom(estimate.process_peak_bytes), estimate.process_high_bytes)
            host = (
                with_headroom(estimate.host_peak_bytes)
                * max(1.0, share)
                * space.recipe.distributed.per_machine
            )
            return Budget(device=f"{round(device * share)}B", host=f"{round(host)}B")
    raise UserError("No combination can be built.")


if __name__ == "__main__":
    main()
