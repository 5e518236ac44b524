"""Plans at full size against random combinations of the whole space, each estimated once and judged on every GPU.

    python scripts/bench plans sample llama-3.1-8b --gpus h100-80gb rtx-4090 --budgets 24 48 65 79
    python scripts/bench plans sample llama-3.2-1b --gpus rtx-4060 --budgets 4 6 7.6
    python scripts/bench plans compare llama-3.1-8b=h100-80gb:24,48,65,79 llama-3.1-8b=rtx-4090:23.5 --write

A space of tens of thousands of combinations is no even mixture: for an 8B, one in a hundred may fit in 24 GiB. So the
script draws as many for each budget, from those whose bounds let them fit there, and judges every budget by all of
them. One trace serves all GPUs with bfloat16. Estimates are appended to ``--out`` one by one; a second call fills the
file up to ``--count``, and refuses a file if some of its rows are estimated differently by now. ``compare`` also plans
for models without a sample, and tells where a larger budget has a slower plan. No weights, no data, no network, no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from command_line import parser_of
from marked_table import with_table
from measured_on import measured_on

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.estimate import CannotRun, SharedTraces
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.planner import MemoryPlan, PlanProgress, plan
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.planning import quiet_logs
from lowmem_ft.planning.planner.search.candidates import candidates_of
from lowmem_ft.planning.planner.search.estimated_needs import Limits, need_from
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.request.plan_defaults import with_defaults_of_plan
from lowmem_ft.recipe.space.search_space import Combination, Settings, Space, space_of, with_settings

DATA = Path(__file__).parents[2] / "tests" / "data" / "random_combinations"

CHECKED = 4
"""Number of a file's rows, from its first to its last, that are estimated again before others join them."""

NEAR = 1e-3
"""Relative difference up to which a row counts as what is estimated now: plans are compared by 1% and more."""

PLANS = DATA / "plans.json"
PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
HEADER = "| for | a step | best of the sample | estimates | first answer | CPU s | |\n|---|---|---|---|---|---|---|\n"

Row = dict[str, Any]


def main() -> None:
    """Draw and estimate a sample, or compare plans with one."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    sampling = commands.add_parser("sample", help="estimate random combinations of a model")
    sampling.add_argument("model", help="name in the catalogue")
    sampling.add_argument("--gpus", nargs="+", required=True, help="with bfloat16; the first is traced")
    sampling.add_argument("--budgets", nargs="+", type=float, required=True, help="GiB of device memory")
    sampling.add_argument("--host", type=float, default=64, help="GiB")
    sampling.add_argument("--count", type=int, default=300, help="combinations in all")
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--out", type=Path, help="JSON lines; tests/data/random_combinations/MODEL.jsonl")
    comparing = commands.add_parser("compare", help="plan, and look for something faster in the sample")
    comparing.add_argument("cases", nargs="+", help="MODEL=GPU:GIB,GIB")
    comparing.add_argument("--host", type=float, default=64, help="GiB")
    comparing.add_argument(
        "--write", action="store_true", help="keep the rows, and put them into docs/planning.md"
    )
    arguments = parser.parse_args()
    if arguments.command == "sample":
        sample(arguments.out or DATA / f"{arguments.model}.jsonl", arguments)
    else:
        compare(arguments.cases, arguments.host, write=arguments.write)


@quiet_logs()
def sample(out: Path, arguments: argparse.Namespace) -> None:
    """Estimate the combinations that the file does not hold yet."""
    recipe = plain_recipe(arguments.model)
    header, rows = read(out)
    kept = KeptTraces()
    for row in rows[:: max(1, len(rows) // CHECKED)]:
        answer = estimated(recipe, row["settings"], arguments.gpus, kept)
        if not _is_near(row, answer):
            sys.exit(
                f"{row['settings']} in {out} is estimated otherwise by now. Delete the file, or name another --out."
            )
    drawn = draw(
        recipe, arguments.gpus[0], arguments.budgets, arguments.host, arguments.count, arguments.seed, rows
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        if not header:
            asked = {name: getattr(arguments, name) for name in ("model", "budgets", "host", "seed")}
            rates = {gpu: dataclasses.asdict(find_gpu(gpu).rates) for gpu in arguments.gpus}
            asked |= {"cards": arguments.gpus, "rates": rates}
            print(json.dumps({**measured_on("cpu"), **asked}), file=file)
        for number, (gib, settings) in enumerate(drawn):
            print(f"\r{number} of {len(drawn)} estimated", end="", file=sys.stderr)
            answer = estimated(recipe, settings, arguments.gpus, kept)
            print(json.dumps({"drawn_for_gib": gib, "settings": settings, **answer}), file=file, flush=True)
    print(f"\r{len(drawn)} of {len(drawn)} estimated", file=sys.stderr)


def gpus_of(header: Row) -> dict[str, Gpu]:
    """Return the GPUs of a sample with the rates that its clock had, which may be from before kinds of kernels."""
    gpus = {}
    for name in header["cards"]:
        gpu, known = find_gpu(name), header["rates"][name]
        known = {"float32_products": known["products"], **known}  # one share for products of all types
        gpus[name] = dataclasses.replace(gpu, rates=dataclasses.replace(gpu.rates, **known))
    return gpus


def _is_near(row: Row, answer: Row) -> bool:
    """Check whether a row says what is estimated now: each number within ``NEAR``, or the same refusal."""
    if "refused" in row or "refused" in answer:
        return row.get("refused") == answer.get("refused")
    return all(
        math.isclose(row["on"][gpu][name], value, rel_tol=NEAR)
        for gpu, found in answer["on"].items()
        for name, value in found.items()
    )


def plain_recipe(model: str) -> Recipe:
    """Return the recipe from which ``lowmem-ft plan model=MODEL`` starts."""
    return load_recipe(None, with_defaults_of_plan([f"model={model}"]))


def with_budget(recipe: Recipe, budget: Budget) -> Recipe:
    """Return the recipe with a budget."""
    return dataclasses.replace(recipe, budget=budget)


def draw(
    recipe: Recipe,
    gpu: str,
    budgets: Sequence[float],
    host_gib: float,
    count: int,
    seed: int,
    known: Sequence[Row] = (),
) -> list[tuple[float, Settings]]:
    """Draw as many at random for each budget, known rows included, from combinations whose bounds let them fit."""
    random_numbers = random.Random(f"{seed} {len(known)}")
    target = Target.of(recipe, gpu)
    space = space_of(
        recipe,
        num_layers=target.shape.num_layers,
        has_bfloat16=target.has_bfloat16,
        rules=target.rules,
    )
    candidates = candidates_of(space, target.shape, target.gpu)
    settings = {
        place: _with_some_layers(space, combination, random_numbers)
        for place, combination in enumerate(space.combinations)
    }
    drawn: dict[int, float] = {}
    for number, gib in enumerate(sorted(budgets), 1):
        may_fit = candidates.may_fit(Limits(device_bytes=gib * GIB, host_bytes=host_gib * GIB))
        taken = [row["settings"] for row in known]
        places = [
            place
            for place in may_fit.nonzero()[0].tolist()
            if place not in drawn and settings[place] not in taken
        ]
        known_here = sum(row["drawn_for_gib"] <= gib for row in known)
        wanted = min(len(places), max(0, round(count * number / len(budgets)) - len(drawn) - known_here))
        drawn |= dict.fromkeys(random_numbers.sample(places, wanted), gib)
    shuffled = random_numbers.sample(list(drawn), len(drawn))
    return [(drawn[place], settings[place]) for place in shuffled]


def _with_some_layers(space: Space, combination: Combination, random_numbers: random.Random) -> Settings:
    """Return what a combination changes, with a random number of layers where it takes as many as fit."""
    changes = space.changes(combination)
    return changes | {
        key: random_numbers.randint(1, changes[key]) for key in space.counted(combination) if key in changes
    }


def estimated(recipe: Recipe, settings: Settings, gpus: Sequence[str], kept: KeptTraces) -> Row:
    """Return what a combination needs on each GPU, or why it cannot be built."""
    changed = with_settings(recipe, settings)
    shared = SharedTraces(changed, budget=Budget(), kind=lambda gpu: gpu.has_bfloat16, kept=kept)
    answers: dict[str, Any] = {}
    for gpu in gpus:
        try:
            answer = shared.estimate(find_gpu(gpu))
        except UserError as error:
            return {"refused": list(error.problems)}
        if isinstance(answer, CannotRun):
            return {"refused": list(answer.problems)}
        answers[gpu] = _needed(answer)
    return {"on": answers}


def _needed(estimate: MemoryEstimate) -> dict[str, float]:
    need = need_from(estimate)
    return {
        "step_seconds": need.seconds,
        "device_bytes": round(need.device_bytes),
        "host_bytes": round(need.host_bytes),
    }


def compare(cases: Sequence[str], host_gib: float, *, write: bool) -> None:
    """Plan each case without kept traces, print the rows as JSON, and write the table."""
    rows: list[Row] = []
    for case in cases:
        model, _, where = case.partition("=")
        gpu, _, budgets = where.partition(":")
        _, sampled = read(DATA / f"{model}.jsonl")
        of_case: list[Row] = []
        for gib in map(float, budgets.split(",")):
            fitting = fitting_seconds(sampled, gpu, gib, host_gib)
            of_case.append(
                {
                    **planned(model, gpu, gib, host_gib),
                    "sampled": len(sampled),
                    "sampled_that_fit": len(fitting),
                    "best_sampled_seconds": min(fitting, default=None),
                }
            )
        for line in where_more_memory_is_slower(of_case):
            print(line, file=sys.stderr)
        rows += of_case
    result = {**measured_on("cpu"), "rows": rows}
    print(json.dumps(result, indent=2))
    if write:
        keep(result)


def where_more_memory_is_slower(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each plan of a model on a GPU that is slower than that of the next smaller budget."""
    in_order = sorted((row for row in rows if row["fits"]), key=lambda row: row["device_gib"])
    for smaller, larger in itertools.pairwise(in_order):
        if larger["step_seconds"] > smaller["step_seconds"]:
            yield (
                f"{larger['model']} on {larger['card']}: {larger['step_seconds']:.4g} s a step in "
                f"{larger['device_gib']:g} GiB, {smaller['step_seconds']:.4g} s in {smaller['device_gib']:g} GiB"
            )


def keep(result: Row) -> None:
    """Merge rows into the kept ones, each with its origin, and write all of them to the page."""
    origin = {name: value for name, value in result.items() if name != "rows"}
    kept: list[Row] = json.loads(PLANS.read_text(encoding="utf-8")) if PLANS.exists() else []
    rows = {_case(row): row for row in [*kept, *({**row, **origin} for row in result["rows"])]}
    in_order = [rows[case] for case in sorted(rows)]
    PLANS.write_text(json.dumps(in_order, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(with_plans(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def with_plans(page: str) -> str:
    """Return a page with the kept rows between its marks."""
    rows = json.loads(PLANS.read_text(encoding="utf-8"))
    return with_table(page, "bench plans", HEADER + "".join(map(_line, rows)))


def _case(row: Row) -> tuple[str, str, float, float]:
    return row["model"], row["card"], row["device_gib"], row["host_gib"]


def fitting_seconds(rows: Sequence[Row], gpu: str, device_gib: float, host_gib: float) -> list[float]:
    """Return seconds of a step of each sampled combination that fits on a GPU."""
    needs = [row["on"][gpu] for row in rows if "on" in row]
    return [
        need["step_seconds"]
        for need in needs
        if need["device_bytes"] <= device_gib * GIB and need["host_bytes"] <= host_gib * GIB
    ]


def planned(model: str, gpu: str, device_gib: float, host_gib: float) -> Row:
    """Return a plan in numbers; seconds are summed over all cores, without imports."""
    start, first = cpu_seconds(), math.nan
    estimates_before_first = 0

    def say(progress: PlanProgress) -> None:
        nonlocal first, estimates_before_first
        print(f"\r{model} {gpu} {device_gib:g} GiB: {progress.estimated} estimated", end="", file=sys.stderr)
        if progress.best is not None and math.isnan(first):
            first, estimates_before_first = cpu_seconds() - start, progress.estimated

    budget = Budget(device=f"{device_gib}GiB", host=f"{host_gib}GiB")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOWMEM_FT_TRACE_CACHE"] = folder
        result: MemoryPlan = plan(plain_recipe(model), budget, gpu, on_progress=say)
    print(file=sys.stderr)
    step = result.estimate.step
    return {
        "model": model,
        "card": gpu,
        "device_gib": device_gib,
        "host_gib": host_gib,
        "fits": result.fits,
        "step_seconds": None if step is None else step.seconds,
        "device_bytes": result.estimate.process_high_bytes,
        "estimates": result.counts.estimated,
        "estimates_before_first": estimates_before_first,
        "first_answer_cpu_seconds": None if math.isnan(first) else round(first, 1),
        "cpu_seconds": round(cpu_seconds() - start, 1),
        "left": result.counts.left,
        "chosen": list(result.settings),
    }


def cpu_seconds() -> float:
    """Return seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _line(row: Row) -> str:
    best = row["best_sampled_seconds"]
    sampled = "none fits" if best is None else f"{best:.3g} s, of {row['sampled_that_fit']} that fit"
    of = [f"`{setting}`" for setting in row["chosen"]]
    return (
        f"| {row['model']} on {row['card']}, {row['device_gib']:g} GiB | {row['step_seconds']:.3g} s | {sampled} | "
        f"{row['estimates']} | {row['first_answer_cpu_seconds']:.0f} | {row['cpu_seconds']:.0f} | {' '.join(of)} |\n"
    )


def read(file: Path) -> tuple[Row, list[Row]]:
    """Return the head and the rows of a file; empty if there is no file. Drops a last line that was cut off."""
    lines: list[Row] = list(_whole_lines(file)) if file.exists() else []
    return (lines[0], lines[1:]) if lines else ({}, [])


def _whole_lines(file: Path) -> Iterator[Row]:
    text = file.read_text(encoding="utf-8")
    whole, _, cut = text.rpartition("\n")
    if cut:
        file.write_text(f"{whole}\n" if whole else "", encoding="utf-8")
    yield from (json.loads(line) for line in whole.splitlines())


if __name__ == "__main__":
    main()
