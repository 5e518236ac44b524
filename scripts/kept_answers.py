"""Keep what users see, and compare it after a change that must not change it.

    python scripts/kept_answers.py keep before.json          # some 10 minutes of a core
    python scripts/kept_answers.py compare before.json       # answers once more, and prints what differs

Every recipe that ``recipes/needs.json`` names is estimated on its GPU and, unless it is for several processes, trained
for five steps: its settings with the weights and data of ``recipes/tiny``, on the CPU. Some commands that fail are
asked for their exit code. Numbers are compared exactly; times that were measured are left out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command_line import parser_of

from lowmem_ft.cli import main as lowmem_ft
from lowmem_ft.foundation.catalog.gpu_catalog import CPU
from lowmem_ft.recipe import load_recipe

REPOSITORY = Path(__file__).resolve().parent.parent
TINY = REPOSITORY / "recipes" / "tiny"
MEASURED = frozenset({"trace_seconds", "date", "versions"})
"""Keys of an estimate that are another number each time."""

FIVE_STEPS = (
    *(f"model={TINY}", "model.weights=random", f"data={TINY / 'data.jsonl'}", "data.max_length=128"),
    *("training.max_steps=5", "training.logging_steps=1", "training.use_cpu=true"),
)

FAILING = {
    "no such recipe": "estimate recipe=no-such-recipe",
    "no such key": "estimate recipe=7b-lora optimizer.stat=bf16",
    "no such GPU": "estimate recipe=7b-lora --gpu h1000",
    "a rule": "estimate recipe=7b-lora --gpu rtx-4090 adapter.r=0",
    "does not fit": "estimate recipe=8b-bf16 --gpu rtx-3060",
    "no plan": "plan recipe=7b-bf16 --gpu rtx-4060 plan.keep=[optimizer,offload,model,training,checkpointing]",
    "no data": "train recipe=tiny data=no-such-file.jsonl",
    "no command": "estimat recipe=7b-lora",
}


def main(argv: list[str] | None = None) -> None:
    """Keep the answers, or compare them with kept ones; exit code 1 if they differ."""
    parser = parser_of(__doc__)
    parser.add_argument("action", choices=["keep", "compare"])
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    if args.action == "compare":
        kept = json.loads(args.file.read_text(encoding="utf-8"))
        differences = list(_differences(kept, _answers()))
        print(*differences or ["no differences"], sep="\n")
        sys.exit(bool(differences))
    args.file.write_text(json.dumps(_answers(), indent=1) + "\n", encoding="utf-8")


def _answers() -> dict[str, Any]:
    needs = json.loads((REPOSITORY / "recipes" / "needs.json").read_text(encoding="utf-8"))["recipes"]
    answers: dict[str, Any] = {}
    for name, need in needs.items():
        print(name, file=sys.stderr, flush=True)
        code, output = _run("estimate", f"recipe={name}", "--gpu", need["gpu"], "--json", "-")
        estimate = _without_times(json.loads(output.replace(str(REPOSITORY), ".")))
        if need["gpu"] == CPU:  # whose steps were timed, not computed
            del estimate["step"], estimate["choices"]
        answers[f"{name}: estimate"] = {"exit": code, "json": estimate}
        if load_recipe(name).distributed.num_processes in (None, 1):
            answers[f"{name}: five steps"] = _five_steps(name)
    for name, line in FAILING.items():
        answers[f"{name}: exit code"] = _run(*line.split())[0]
    return answers


def _five_steps(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        code, _ = _run("train", f"recipe={name}", *FIVE_STEPS, f"training.output_dir={folder}/run")
        metrics = Path(folder, "run", "metrics.jsonl")
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    steps = [json.loads(line) for line in lines]
    return {"exit": code, "losses": [step["loss"] for step in steps if "loss" in step]}


def _run(*command: str) -> tuple[int, str]:
    """Return a command's exit code and what it writes to the terminal; what it says of its work is thrown away."""
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
            code = lowmem_ft(list(command))
    except SystemExit as end:
        code = end.code
    return code if isinstance(code, int) else int(code is not None), output.getvalue()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(one) for key, one in value.items() if key not in MEASURED}
    return [_without_times(one) for one in value] if isinstance(value, list) else value


def _differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _differences(before.get(key), after.get(key), f"{place} {key}".strip())
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(one, other, f"{place}[{index}]")
    elif before != after:
        yield f"{place}: {before} became {after}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
