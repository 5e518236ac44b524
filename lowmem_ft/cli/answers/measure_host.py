"""The costs of this machine's host, measured, printed, and kept for the estimates of its own GPU."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.spinner import progress_line
from lowmem_ft.foundation.catalog.clock_rates import reference_host
from lowmem_ft.foundation.catalog.this_host import HostCosts, keep_host
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator.measured_host import measure_host
from lowmem_ft.reports.text.document import Pairs


def print_host(options: argparse.Namespace) -> int:
    """Measure, print what was found, and keep it if this machine has an NVIDIA GPU.

    Args:
        options: the command's.

    Returns:
        The exit code, 0.

    Raises:
        UserError: if it was measured and cannot be kept.
    """
    has_gpu = torch.cuda.is_available() and torch.version.cuda is not None
    with progress_line("measuring this machine's host") as say:
        costs = measure_host(
            torch.device("cuda" if has_gpu else "cpu"), on_step=lambda share: say(f"{share:.0%}")
        )
    kept = None
    if has_gpu:
        try:
            kept = keep_host(costs)
        except OSError as error:
            raise UserError(
                f"What was measured cannot be kept: {error}. Set {KEPT_FOLDER_VARIABLE} to a folder that can be "
                "written to."
            ) from error
    out = Output(options.json)
    out.add(Pairs(_rows(costs, kept, has_gpu=has_gpu)))
    out.write_json({"schema": 1, **dataclasses.asdict(costs), "kept_in": kept and str(kept)})
    return 0


def _rows(costs: HostCosts, kept: Path | None, *, has_gpu: bool) -> list[tuple[str, str]]:
    usual = reference_host()
    operator, launch = 1e6 * costs.operator_seconds, 1e6 * costs.launch_seconds
    host = ("host", f"{costs.processor}; {costs.software}")
    if not has_gpu:
        without = f"{operator:.1f} us, without a launch: this machine has no NVIDIA GPU"
        return [host, ("operator", without), ("not kept", "estimates assume a usual host")]
    launched, usually = costs.triton_launch, usual["triton_launch"]
    by_triton = f"{launched:.1f} operators more; usually {usually:.1f}"
    if launched == usually:
        by_triton = (
            f"{usually:.1f} operators more, as usual: Liger's kernels, which measure it, do not run here"
        )
    where = f"nothing is kept ({KEPT_FOLDER_VARIABLE}=off)" if kept is None else f"{kept}, for {costs.gpu}"
    return [
        host,
        ("operator", f"{operator:.1f} us; a usual host takes {1e6 * usual['operator_seconds']:.1f}"),
        ("further kernel", f"{launch:.1f} us; a usual host takes {1e6 * usual['launch_seconds']:.1f}"),
        ("Triton launch", by_triton),
        ("kept", where),
    ]
