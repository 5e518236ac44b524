"""Run random choices of the memory ladder on tiny random models, each against its plain run, and print differences.

python scripts/try_random_runs.py --seconds 600 --seed 1000
python scripts/try_random_runs.py --only 1042
"""

from __future__ import annotations

import logging
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from command_line import parser_of
from ground_truth.random_runs import RandomRun, difference_from_plain, has_way_out, random_run

from lowmem_ft.foundation.errors import UserError


def main() -> None:
    """Try seed after seed until the time is up."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="seconds until it stops (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run (0)")
    parser.add_argument("--only", type=int, help="a seed to run alone")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    for seed in _seeds(arguments.seed, arguments.seconds) if arguments.only is None else [arguments.only]:
        run = random_run(seed)
        kind, message = _try(run)
        counts[kind] += 1
        if kind not in ("as the plain run", "refused"):
            print(f"{seed}: {kind}: {message}\n  {run.fields}\n  {run}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))


def _seeds(first: int, seconds: float) -> Iterator[int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield first
        first += 1


def _try(run: RandomRun) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            difference = difference_from_plain(run, Path(folder))
        except UserError as error:
            return ("refused" if has_way_out(error) else "refused without a way out"), str(error)
        except Exception:  # the failures that this script searches for
            return "failed", traceback.format_exc()
    return ("as the plain run", "") if difference is None else ("differs", difference)


if __name__ == "__main__":
    main()
