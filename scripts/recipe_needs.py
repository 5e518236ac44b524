"""Estimate shipped recipes on the GPUs they name; keep needs and speed in ``recipes/needs.json`` and the headers.

    python scripts/recipe_needs.py                     # all, again
    python scripts/recipe_needs.py 8b-8gb=rtx-4060     # one that is new, or has another GPU now; =cpu for a processor

Run it when a recipe or the estimator has changed. The header of each recipe has the same numbers, in the line after its
`lowmem-ft estimate` command. Streamed recipes take minutes.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import re

from command_line import parser_of

from lowmem_ft.foundation.catalog.gpu_catalog import CPU
from lowmem_ft.foundation.user_paths import recipes_folder
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.run_host_memory import build_bytes
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.recipe import load_recipe, shipped_recipes
from lowmem_ft.recipe.shipped.needs import NEEDS_FILE, RecipeNeeds, needs_of_shipped_recipes


def main() -> None:
    """Estimate the recipes that the arguments name, and write the file after each."""
    parser = parser_of(__doc__)
    parser.add_argument("recipes", nargs="*", metavar="NAME[=GPU]", help="default: all that are kept")
    for argument in parser.parse_args().recipes or needs_of_shipped_recipes():
        name, _, gpu = argument.partition("=")
        gpu = gpu or needs_of_shipped_recipes()[name].gpu
        needs, versions = needs_of(name, gpu)
        write({**needs_of_shipped_recipes(), name: needs}, versions)
        if gpu != CPU:
            path = shipped_recipes()[name]
            path.write_text(with_header(path.read_text(encoding="utf-8"), name, needs), encoding="utf-8")
        print(f"{name}: {needs.header_words} ({needs.spare_share:.1%} of the GPU left)", flush=True)


def needs_of(name: str, gpu: str) -> tuple[RecipeNeeds, dict[str, str]]:
    """Return the needs of a recipe on a GPU, and the versions behind the numbers."""
    estimate = estimate_memory(load_recipe(name), gpu, kept=KeptTraces.of_user())
    of_build = build_bytes() if gpu == CPU else 0
    needs = RecipeNeeds(
        gpu=gpu,
        memory_bytes=0 if gpu == CPU else estimate.gpu.memory_bytes,
        process_peak_bytes=estimate.process_peak_bytes - of_build,
        host_peak_bytes=estimate.host_peak_bytes - of_build,
        host_pinned_bytes=estimate.host_pinned_bytes,
        step_seconds=None if estimate.step is None else estimate.step.seconds,
        step_tokens=None if estimate.step is None else estimate.plan.in_all(estimate.step.tokens),
    )
    return needs, dict(estimate.versions)


def with_header(text: str, name: str, needs: RecipeNeeds) -> str:
    """Return a recipe's file with its needs in the header, after the command that prints them."""
    lines = f"# `lowmem-ft estimate recipe={name} --gpu {needs.gpu}`:\n# process {needs.header_words}.\n"
    new, found = re.subn(
        rf"^# `lowmem-ft estimate recipe={name} --gpu \S+`:\n# process .*\n", lines, text, flags=re.M
    )
    if found != 1:
        raise SystemExit(f"The header of {name} needs these two lines:\n{lines}")
    return new


def write(needs: dict[str, RecipeNeeds], versions: dict[str, str]) -> None:
    """Write the file."""
    values = {
        "command": "python scripts/recipe_needs.py",
        "date": datetime.date.today().isoformat(),
        "versions": versions,
        "recipes": {name: dataclasses.asdict(needs[name]) for name in sorted(needs)},
    }
    text = json.dumps(values, indent=2) + "\n"
    (recipes_folder() / NEEDS_FILE).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
