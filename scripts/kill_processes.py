"""Kill one process of real runs of FSDP2 on CPUs at random moments, resume, and compare each end with a whole run's.

python scripts/kill_processes.py --kills 30 --seed 0

A run is killed one to three times in a row, then resumed to its end, where losses, norms, weights, optimizer state and
files must equal those of an undisturbed run with as many processes. The moments come from the seed; how far a run has
come by then depends on the machine. ``--write`` adds the result to ``tests/data/measured/killed-runs.json``, from
which ``scripts/proof_page.py`` writes its table.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from command_line import parser_of
from killed_runs import KINDS, KilledRuns
from measured_on import measured_on

RESULTS = Path(__file__).resolve().parents[1] / "tests" / "data" / "measured" / "killed-runs.json"


def main() -> int:
    """Kill as often as requested; the number of problems found, at most 1, is the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=30, help="how many processes to kill (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (0)")
    parser.add_argument("--folder", type=Path, help="keep runs and their logs here")
    parser.add_argument("--write", action="store_true", help=f"keep the result in {RESULTS.name}")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        runs = KilledRuns(arguments.folder or Path(temporary), random.Random(arguments.seed), print_now)
        for kind in itertools.cycle(KINDS):
            if runs.num_kills >= arguments.kills:
                break
            runs.kill_and_go_on(kind, most_kills=arguments.kills - runs.num_kills)
    phases = ", ".join(f"{count} in {phase}" for phase, count in Counter(runs.phases).items())
    print(
        f"{runs.num_kills} kills ({phases}; {runs.num_cut_short} left a folder half written) of {runs.num_runs} runs, "
        f"each launch ended within {runs.longest_seconds:.1f} s: {len(runs.problems)} problems "
        f"({time.monotonic() - began:.0f} s)"
    )
    for problem in runs.problems:
        print(problem)
    if arguments.write:
        keep(runs)
    return min(len(runs.problems), 1)


def keep(runs: KilledRuns) -> None:
    """Add what became of the runs to the kept results."""
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else []
    row = {
        **measured_on("cpu"),
        "kills": runs.num_kills,
        "by_phase": dict(Counter(runs.phases)),
        "left_a_folder_half_written": runs.num_cut_short,
        "runs": runs.num_runs,
        "problems": runs.problems,
    }
    RESULTS.write_text(json.dumps([*kept, row], indent=1) + "\n", "utf-8")


def print_now(line: str) -> None:
    """Print a progress line at once."""
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
