"""Learning curves of the memory ladder's number formats, paired with float32's over seeds, and their page.

    python scripts/learning_curves.py [--tasks demo definitions] [--seeds 3] [--steps 200] [--page-only]

SmolLM2-135M-Instruct is fine-tuned in full, on a processor, on each task, with each rung and each seed: seeds set the
order of the data and the random rounding. A run that is in ``tests/data/measured/learning-curves.json`` is not
repeated, so that the command continues where it was stopped. A run of 200 steps takes 7 minutes with float32 and up to
18 with the others on a core of an AMD EPYC, all 30 about 7 hours. After each run ``docs/learning_curves.md`` and
its picture are written. Products of bfloat16 are computed in float32 and rounded once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from command_line import parser_of
from curves.page import write_page
from curves.runs import (
    NUM_POINTS,
    NUM_SEEDS,
    NUM_STEPS,
    Curve,
    compared_with,
    keep_result,
    planned,
    read_results,
    run_curve,
    weights_file,
)
from curves.tasks import TASKS
from demo.get_demo_model import default_cache_dir, get_demo_model

from lowmem_ft.cli.console.exit_codes import explains_user_errors


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, and write the page."""
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="how many, from 0 (%(default)s)")
    parser.add_argument(
        "--steps", type=int, default=NUM_STEPS, help=f"of a run, a multiple of {NUM_POINTS} (%(default)s)"
    )
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    arguments = parser.parse_args(argv)
    if arguments.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {arguments.seeds}")
    if arguments.steps < 1 or arguments.steps % NUM_POINTS:
        parser.error(f"--steps must be a multiple of {NUM_POINTS}, got {arguments.steps}")
    if not arguments.page_only:
        run_missing(planned(arguments.tasks, arguments.seeds, arguments.steps))
    write_page(read_results(), arguments.steps)
    return 0


def run_missing(curves: Sequence[Curve]) -> None:
    """Run what has no result yet, in order, and keep each result at once."""
    cache = default_cache_dir() / "learning_curves"
    cache.mkdir(parents=True, exist_ok=True)
    model = get_demo_model(default_cache_dir())
    for curve in curves:
        if curve.result_in(read_results()) is not None:
            continue
        other = compared_with(curve)
        if other is not None and not weights_file(cache, other).is_file():
            print(f"Again, for its final weights: {other}", flush=True)
            run_curve(other, model, cache)
        print(curve, flush=True)
        keep_result(run_curve(curve, model, cache))
        write_page(read_results(), curve.steps)


if __name__ == "__main__":
    sys.exit(main())
