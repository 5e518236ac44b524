"""Fit what a search expects of a step to estimates of random combinations, and report how far off it is.

    python scripts/calibrate expectations [--write]

The estimates are the samples in ``tests/data/random_combinations``, which ``scripts/bench plans`` made; each file
says with which rates of the clock, and seconds are expected at the same ones. A share is found by least squares of the
logarithms of expected over estimated numbers (Gauss-Newton with damping). Then each model is left out in turn, the
shares are fitted to the others, and its errors are those of a model that a search has not seen. ``--write`` keeps
shares and errors in ``lowmem_ft/planning/planner/expected_shares.json``, where the planner reads them;
``tests/scripts/test_calibrated_expectations.py`` fits them again.

Device bytes are fitted to steps that compute in 16 bits. The samples were made before float32 attention repeated
grouped heads: such a step kept all attention scores, up to seven times the bytes that are expected of it now.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bench.plans import DATA, gpus_of, plain_recipe, read
from command_line import parser_of

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.least_memory import StepParts
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.planning.planner import bounds, expectations
from lowmem_ft.planning.planner.expectations import SHARES, Shares
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.search_space import with_settings

FILE = Path(expectations.__file__).with_name("expected_shares.json")

OF_DEVICE = ("kept", "mlp", "logit_bytes", "chunked_logit_bytes", "at_work")
OF_SECONDS = ("times_moved", "cast_bytes", "tiled_mlp", "tiled_head")

DIGITS = 4
STEP = 1e-3
"""Change of a share's logarithm by which its slopes are found."""

CONVERGED = 1e-4


@dataclass(frozen=True, kw_only=True)
class Estimated:
    """An estimate of a combination on a GPU with the rates that its clock had, and what the expectations read.

    Args:
        model: name in the catalogue.
        is_first: whether the GPU is the first of its file: bytes are alike on all of them.
        device_bytes: bytes of the device, with the headroom that is required.
        seconds: seconds of a step.
    """

    model: str
    is_first: bool
    recipe: Recipe
    shape: bounds.ModelShape
    parts: StepParts
    gpu: Gpu
    device_bytes: float
    seconds: float

    def device_error(self, shares: Shares) -> float:
        """Return the logarithm of expected over estimated device bytes."""
        expected = expectations.device_bytes(self.recipe, self.shape, self.parts, shares)
        return math.log(with_headroom(self.gpu.context_bytes + expected) / self.device_bytes)

    def seconds_error(self, shares: Shares) -> float:
        """Return the logarithm of expected over estimated seconds."""
        expected = expectations.seconds(self.recipe, self.shape, self.parts, self.gpu, shares)
        return math.log(expected / self.seconds)


Errors = Callable[[Shares], list[float]]


def main() -> None:
    """Fit, print, and write if requested."""
    parser = parser_of(__doc__)
    parser.add_argument("--write", action="store_true", help="keep the shares for the planner")
    arguments = parser.parse_args()
    found = result(estimates())
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if arguments.write:
        FILE.write_text(text, encoding="utf-8")


def estimates() -> list[Estimated]:
    """Return all kept estimates."""
    found: list[Estimated] = []
    for file in sorted(DATA.glob("*.jsonl")):
        header, rows = read(file)
        recipe, gpus = plain_recipe(header["model"]), gpus_of(header)
        shape = Target.of(recipe, header["cards"][0]).shape
        for row in rows:
            if "refused" in row:
                continue
            changed = with_settings(recipe, row["settings"])
            parts = bounds.parts_of(changed, shape)
            found += [
                Estimated(
                    model=header["model"],
                    is_first=card == header["cards"][0],
                    recipe=changed,
                    shape=shape,
                    parts=parts,
                    gpu=gpu,
                    device_bytes=row["on"][card]["device_bytes"],
                    seconds=row["on"][card]["step_seconds"],
                )
                for card, gpu in gpus.items()
            ]
    return found


def result(sample: Sequence[Estimated]) -> dict[str, Any]:
    """Return the fitted shares, and the errors of each model when it is left out."""
    models = sorted({row.model for row in sample})
    return {
        "sample": {model: sum(row.model == model for row in sample) for model in models},
        "shares": dataclasses.asdict(fitted(sample)),
        "left_out": {
            model: errors_of(
                [row for row in sample if row.model == model],
                fitted([row for row in sample if row.model != model]),
            )
            for model in models
        },
    }


def fitted(sample: Sequence[Estimated], start: Shares = SHARES) -> Shares:
    """Return the shares with which expectations are nearest to estimates; seconds read those of the bytes."""
    of_device = [row for row in sample if _is_fitted(row)]
    shares = _nearest(start, OF_DEVICE, lambda shares: [row.device_error(shares) for row in of_device])
    shares = _nearest(shares, OF_SECONDS, lambda shares: [row.seconds_error(shares) for row in sample])
    return Shares(
        **{name: float(f"{value:.{DIGITS}g}") for name, value in dataclasses.asdict(shares).items()}
    )


def _is_fitted(row: Estimated) -> bool:
    return row.is_first and bounds.activation_itemsize(row.recipe, row.shape) == 2


def _nearest(start: Shares, names: Sequence[str], errors_with: Errors) -> Shares:
    """Return the shares after least squares over the logarithms of those named."""
    shares, errors, damping = start, np.array(errors_with(start)), 1e-3
    while True:
        slopes = np.stack(
            [(np.array(errors_with(_scaled(shares, {name: STEP}))) - errors) / STEP for name in names], axis=1
        )
        normal, gradient = slopes.T @ slopes, slopes.T @ errors
        while True:
            damped = normal + damping * np.diag(np.diag(normal) + 1e-9)
            steps = np.clip(-np.linalg.solve(damped, gradient), -0.5, 0.5)
            tried = _scaled(shares, dict(zip(names, steps.tolist(), strict=True)))
            found = np.array(errors_with(tried))
            if (found**2).sum() <= (errors**2).sum():
                break
            damping *= 10
        shares, errors, damping = tried, found, damping / 10
        if np.abs(steps).max() < CONVERGED:
            return shares


def _scaled(shares: Shares, logs: Mapping[str, float]) -> Shares:
    """Return shares multiplied by the exponentials of these logarithms."""
    return dataclasses.replace(
        shares, **{name: getattr(shares, name) * math.exp(step) for name, step in logs.items()}
    )


def errors_of(sample: Sequence[Estimated], shares: Shares) -> dict[str, float]:
    """Return root mean squares of the logarithms of expected over estimated numbers, with and without their level."""
    device = [row.device_error(shares) for row in sample if _is_fitted(row)]
    seconds = [row.seconds_error(shares) for row in sample]
    return {
        "device_bytes": _rounded_up(_root_mean_square(device)),
        "device_bytes_without_level": _rounded_up(statistics.pstdev(device)),
        "seconds": _rounded_up(_root_mean_square(seconds)),
        "seconds_without_level": _rounded_up(statistics.pstdev(seconds)),
    }


def _root_mean_square(errors: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def _rounded_up(error: float) -> float:
    return math.ceil(1000 * error) / 1000


if __name__ == "__main__":
    main()
