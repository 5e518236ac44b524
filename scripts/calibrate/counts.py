"""Check a trace's counts times unit costs against the host's time for a layer; two minutes on a CPU.

    python scripts/calibrate counts [--rounds 60] [--only "Liger,LoRA"]

An estimate takes the operators, the launches by Triton and the Python between them that a trace counts, times what
``lowmem-ft measure-host`` finds each to cost. Here both are had on one machine: the layers of ``scripts/bench layer``
run with launches that do nothing, and are traced on a virtual GPU. Meanwhile the command's own code measures the costs
of a stock and a fused model several times, as a machine with other work is now slower and now faster; the rows
``stock`` and ``Liger`` say little, and the others are the check.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lowmem_ft import VirtualGPU  # noqa: F401  isort: skip  first: it silences a needless message of bitsandbytes

import torch
from bench.layer import CHANGES, FEW, MANY, Change, asked_for, computing_nothing, run_pass, seconds_of_a_layer
from measured_on import measured_on

from lowmem_ft.planning.estimator.measured_host import Counts, counts_of_pass, measure_host, tiny_qwen3


def main() -> None:
    """Print one JSON object."""
    changes, num_rounds = asked_for(__doc__)
    counts = {name: counts_of_a_layer(change) for name, change in changes.items()}
    found = []

    def measure(number: int) -> None:
        """Measure the costs after every tenth round."""
        if number % 10 == 0:
            found.append(measure_host(torch.device("cpu"), seconds=1.0, fuse=_fuse))

    with computing_nothing():
        seconds = seconds_of_a_layer(changes, num_rounds, measure)
    costs = min(found, key=lambda one: one.operator_seconds)
    rows = {}
    for name, one in counts.items():
        counted = costs.operator_seconds * (one.operators + one.triton * costs.triton_launch + one.python)
        rows[name] = {
            **{key: round(value, 1) for key, value in dataclasses.asdict(one).items()},
            "layer_us": round(1e6 * seconds[name]),
            "counted_us": round(1e6 * counted),
            "error": f"{counted / seconds[name] - 1:+.0%}",
        }
    of = {
        "operator_us": round(1e6 * costs.operator_seconds, 2),
        "triton_launch": round(costs.triton_launch, 2),
    }
    print(json.dumps({**measured_on("cpu"), **of, "variants": rows}, indent=2))


def _fuse(model: Any) -> bool:
    return CHANGES["Liger"](model) is not None


def counts_of_a_layer(change: Change) -> Counts:
    """Return what a trace counts of a layer.

    Args:
        change: what makes its variant of a stock model.
    """
    few, many = (counts_of_pass(tiny_qwen3(num), change, run_pass) for num in (FEW, MANY))
    of_layer = {
        key: (value - getattr(few, key)) / (MANY - FEW) for key, value in dataclasses.asdict(many).items()
    }
    return Counts(**of_layer)


if __name__ == "__main__":
    main()
