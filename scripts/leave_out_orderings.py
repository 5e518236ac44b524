"""Findings of a virtual GPU that checks for races, when each ordering of copies in the package is left out in turn.

python scripts/leave_out_orderings.py    # all runs; minutes
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from command_line import parser_of
from ground_truth.checked_streams import leave_out_each, orders_of_cases, orders_of_visits
from ground_truth.copy_cases import CASES, steady


def main() -> None:
    """Print the findings."""
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = orders_of_cases(map(steady, CASES.values()), Path(folder))
        findings = leave_out_each(itertools.chain(orders_of_visits(), cases))
    for name in ("found", "implied", "missed"):
        edges = sorted(map(str, getattr(findings, name)))
        print(f"{len(edges)} {name}", *edges, sep="\n  ", end="\n\n")
    print(
        f"{findings.num_runs} runs, {findings.num_accesses:,} accesses, {findings.num_false_alarms} false alarms"
    )


if __name__ == "__main__":
    main()
