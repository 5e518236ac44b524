"""Plans of an 8B for several budgets and of a 70B: seconds, combinations by outcome, and the choice.

    python scripts/bench_planner.py [--models llama-3.1-8b] [--budgets 80 24 16 12 8 4] [--host 64] [--gpu h200]
        [--skip-70b]

Architectures come from the catalogue: no weights, no data, no network, no GPU. Seconds exclude imports. Without
``--gpu`` each budget is that of the cheapest GPU that has it; with it, of that GPU: the script then checks that no
smaller budget has a faster plan than a larger one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from typing import Any

import torch
from measured_on import measured_on

from lowmem_ft.budget import Budget
from lowmem_ft.planner import MemoryPlan, PlanProgress, plan
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.reading.defaults import with_defaults_of_plan


def main() -> None:
    """Make each plan and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["llama-3.1-8b"], help="names in the catalogue")
    parser.add_argument("--budgets", nargs="+", type=float, default=[80, 24, 16, 12, 8, 4], help="GiB")
    parser.add_argument("--host", type=float, default=64, help="GiB")
    parser.add_argument("--gpu", help="one GPU for all budgets, which are shares of its memory")
    parser.add_argument("--skip-70b", action="store_true")
    arguments = parser.parse_args()
    gpu: str | None = arguments.gpu
    rows: list[dict[str, Any]] = []
    for model in arguments.models:
        of_model = [
            planned(model, gib, arguments.host, gpu) for gib in sorted(arguments.budgets, reverse=True)
        ]
        rows += of_model
        fitting = [row["step_seconds"] for row in of_model if row["fits"]]
        if gpu is not None and any(larger > smaller for larger, smaller in itertools.pairwise(fitting)):
            print(f"{model}: a larger budget has a slower plan: {fitting}", file=sys.stderr)
    if not arguments.skip_70b:
        rows.append(planned("llama-3.1-70b", 24, 256, gpu))
        with tempfile.TemporaryDirectory() as folder:
            rows.append(
                planned("llama-3.1-70b", 24, 256, gpu, f"offload.folder={folder}", "offload.optimizer=host")
            )
    print(json.dumps({**measured_on(torch.device("cpu")), "rows": rows}, indent=2))


def planned(
    model: str, device_gib: float, host_gib: float, gpu: str | None, *settings: str
) -> dict[str, Any]:
    """Return one plan in numbers."""
    recipe = load_recipe(None, with_defaults_of_plan([f"model={model}", *settings]))
    budget = Budget(device=f"{device_gib}GiB", host=f"{host_gib}GiB")

    def say(progress: PlanProgress) -> None:
        print(f"\r{model} {device_gib:g} GiB: {progress.estimated} estimated", end="", file=sys.stderr)

    result: MemoryPlan = plan(recipe, budget, gpu, on_progress=say)
    print(file=sys.stderr)
    values = result.to_json()
    step = result.estimate.step
    return {
        "model": model,
        "gpu": result.estimate.gpu.name,
        "device_gib": device_gib,
        "host_gib": host_gib,
        "settings": list(settings),
        "fits": result.fits,
        "seconds": round(result.seconds, 1),
        "step_seconds": None if step is None else step.seconds,
        "tokens_per_second": None if step is None else step.tokens_per_second,
        "process_high_bytes": result.estimate.process_high_bytes,
        "host_peak_bytes": result.estimate.host_peak_bytes,
        **{
            name: values[name]
            for name in ("searched", "counts", "proven", "left_seconds", "binds", "missing")
        },
        "smallest_gpu": result.smallest_gpu,
        "chosen": list(result.settings),
    }


if __name__ == "__main__":
    main()
