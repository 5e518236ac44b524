"""Seconds that an estimate takes, from 1B to 405B parameters: in a fresh process, the next one, without extension.

    python scripts/bench_estimator.py [--models llama-3.1-8b ...] [--full-up-to 8] [--gpu h100-80gb] [--skip-all-gpus]
    python scripts/bench_estimator.py --recipes 8b-24gb=rtx-4090 8b-bf16=h200 ...
    python scripts/bench_estimator.py --preflight 8b-24gb=rtx-4090 8b-bf16=h100-80gb ...

With ``--recipes``: for each, the first estimate, a variant of it (one more row in a micro-batch), and the same again
from kept traces, in processor seconds without imports. With ``--preflight``: the time that the estimate before a run
adds to the start of ``lowmem-ft train``: from the start of the other process to its answer, and from the question to
the answer if imports are over before the run's data is there; first and from kept traces.

Architectures come from the catalogue: no weights, no data, no network. Every row has a process of its own. In addition
to importing torch, a user waits for the imports and the first estimate; a search pays only for the next ones. Tracing
every layer takes minutes for the largest models, so it is left out above ``--full-up-to`` billion parameters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

MODELS = ["llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"]
RECIPE = "8b-bf16"


def main() -> None:
    """Measure every model and print one JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS, help="names in the catalogue")
    parser.add_argument("--full-up-to", type=float, default=8.5, help="billion parameters")
    parser.add_argument("--gpu", default="h100-80gb")
    parser.add_argument("--skip-all-gpus", action="store_true")
    parser.add_argument("--recipes", nargs="+", metavar="NAME=GPU", help="shipped recipes, each on a GPU")
    parser.add_argument("--preflight", nargs="+", metavar="NAME=GPU", help="likewise")
    parser.add_argument("--in-this-process", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        name, gpu, mode = arguments.in_this_process
        timers = {"kept": time_kept, "preflight": time_preflight}
        timed = timers[mode](name, gpu) if mode in timers else time_estimates(name, gpu, mode)
        print(json.dumps(timed))
        return
    if arguments.recipes or arguments.preflight:
        mode = "kept" if arguments.recipes else "preflight"
        pairs = [named.rpartition("=") for named in arguments.recipes or arguments.preflight]
        rows = [in_new_process(name, gpu, mode) for name, _, gpu in pairs]
        print(json.dumps({**_measured_on_cpu(), "rows": rows}, indent=2))
        return
    rows = []
    for model in arguments.models:
        row = in_new_process(model, arguments.gpu, "extended")
        if row["billion_parameters"] <= arguments.full_up_to:
            full = in_new_process(model, arguments.gpu, "full")
            row["full_trace_seconds"] = full["next_estimate_seconds"]
        rows.append(row)
    result: dict[str, Any] = {"recipe": RECIPE, "gpu": arguments.gpu, "rows": rows}
    if not arguments.skip_all_gpus:
        result["all_gpus"] = in_new_process("llama-3.1-8b", "all", "extended")
    print(json.dumps({**_measured_on_cpu(), **result}, indent=2))


def in_new_process(model: str, gpu: str, mode: str) -> dict[str, Any]:
    """Run :func:`time_estimates` in a process that has imported nothing yet."""
    command = [sys.executable, __file__, "--in-this-process", model, gpu, mode]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def time_estimates(model: str, gpu: str, mode: str) -> dict[str, Any]:
    """Return seconds of each part of a first estimate, and of a second one."""
    start = time.perf_counter()
    import torch  # noqa: F401

    torch_seconds = time.perf_counter() - start
    start = time.perf_counter()
    from lowmem_ft.recipe import load_recipe

    run = _estimator(mode)
    recipe = load_recipe(RECIPE, [f"model={model}"])
    imports_seconds = time.perf_counter() - start
    start = time.perf_counter()
    num_parameters = run(recipe, gpu)
    first_seconds = time.perf_counter() - start
    if gpu != "all":  # for all GPUs once is enough
        start = time.perf_counter()
        run(recipe, gpu)
    next_seconds = time.perf_counter() - start
    beyond_torch = imports_seconds + first_seconds
    return {
        "model": model,
        "billion_parameters": round(num_parameters / 1e9, 2),
        "torch_import_seconds": round(torch_seconds, 2),
        "imports_seconds": round(imports_seconds, 2),
        "first_estimate_seconds": round(first_seconds, 2),
        "next_estimate_seconds": round(next_seconds, 2),
        "beyond_torch_seconds": round(beyond_torch, 2),
        "imports_share": round(imports_seconds / beyond_torch, 2),
    }


def time_kept(recipe_name: str, gpu: str) -> dict[str, Any]:
    """Return seconds of a recipe's first estimate, of a variant, and of both again by another reader of the same files.

    Also of a first one that asks torch about every operator, not only about new ones
    (``virtual_gpu/recording/fake_results.py``).
    """
    import tempfile
    from pathlib import Path
    from unittest import mock

    from lowmem_ft.estimator import estimate_memory
    from lowmem_ft.estimator.traces.trace_cache import KeptTraces
    from lowmem_ft.recipe import load_recipe
    from lowmem_ft.virtual_gpu.recording.fake_results import FakeResults

    recipe = load_recipe(recipe_name)
    rows = recipe.training.per_device_train_batch_size + 2
    variants = [
        load_recipe(recipe_name, [f"training.per_device_train_batch_size={rows + more}"]) for more in (0, 1)
    ]
    estimate_memory(load_recipe("tiny"), gpu)  # does the imports of the first estimate
    seconds: dict[str, Any] = {"recipe": recipe_name, "gpu": gpu}
    with tempfile.TemporaryDirectory() as folder:
        kept = KeptTraces(Path(folder))
        for name, which, traces in (
            ("first", recipe, kept),
            ("other_rows", variants[0], kept),
            ("variant", variants[1], kept),
            ("again", recipe, kept),
            ("from_disk", recipe, KeptTraces(Path(folder))),
        ):
            start = time.process_time()
            estimate_memory(which, gpu, kept=traces)
            seconds[f"{name}_seconds"] = round(time.process_time() - start, 2)
        seconds["file_bytes"] = max(file.stat().st_size for file in Path(folder).iterdir())
    asks_torch = mock.patch.object(
        FakeResults, "call", lambda self, func, args, kwargs: (func(*args, **kwargs), None)
    )
    with tempfile.TemporaryDirectory() as folder, asks_torch:
        start = time.process_time()
        estimate_memory(recipe, gpu, kept=KeptTraces(Path(folder)))
        seconds["first_asking_torch_seconds"] = round(time.process_time() - start, 2)
    return seconds


def time_preflight(recipe_name: str, gpu: str) -> dict[str, Any]:
    """Return wall-clock seconds of the process that estimates before a run, twice with, twice without its imports."""
    import os
    import tempfile

    from lowmem_ft.estimator.child_process import EstimatingProcess, estimate_without_timeline
    from lowmem_ft.recipe import load_recipe

    recipe = load_recipe(recipe_name)
    seconds: dict[str, Any] = {"recipe": recipe_name, "gpu": gpu}
    for are_imports_over in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["LOWMEM_FT_TRACE_CACHE"] = folder
            for traces in ("first", "from_kept_traces"):
                start = time.perf_counter()
                process = EstimatingProcess()
                if are_imports_over:
                    process.ask(estimate_without_timeline, load_recipe("tiny"), gpu)
                    process.answer()
                    start = time.perf_counter()
                process.ask(estimate_without_timeline, recipe, gpu)
                process.answer()
                name = f"{traces}{'' if are_imports_over else '_with_imports'}_seconds"
                seconds[name] = round(time.perf_counter() - start, 2)
                process.close()
    return seconds


def _estimator(mode: str) -> Any:
    """Return the estimate to be timed, as a function of recipe and GPU that returns the model's parameters."""
    import functools

    from lowmem_ft.catalog.gpu_catalog import find_gpu, load_gpus
    from lowmem_ft.estimator import estimate_memory, estimate_on_gpus
    from lowmem_ft.estimator.traces.tracing import trace_recipe
    from lowmem_ft.memory.memory_estimate import MemoryEstimate
    from lowmem_ft.virtual_gpu.gpu import VirtualGPU

    def on_one(recipe: Any, gpu: str) -> int:
        return estimate_memory(recipe, gpu).model.parameters

    def on_all(recipe: Any, gpu: str) -> int:
        if gpu != "all":
            return on_one(recipe, gpu)
        results = estimate_on_gpus(recipe, list(load_gpus().values()))
        return next(result for result in results if isinstance(result, MemoryEstimate)).model.parameters

    def full(recipe: Any, gpu: str) -> int:
        traced = trace_recipe(recipe, functools.partial(VirtualGPU, find_gpu(gpu)), extend=False)
        return traced.trace.model.parameters

    return full if mode == "full" else on_all


def _measured_on_cpu() -> dict[str, Any]:
    import torch
    from measured_on import measured_on

    return measured_on(torch.device("cpu"))


if __name__ == "__main__":
    main()
