"""The costs of an operator on the host of this machine's GPU, as ``lowmem-ft measure-host`` measured and kept them."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.catalog.clock_rates import HOST_NUMBERS, ClockRates
from lowmem_ft.foundation.catalog.kept_rows import read_rows, write_rows
from lowmem_ft.foundation.system.cores import processor_name
from lowmem_ft.foundation.user_paths import kept_folder

FILE_NAME = "host.v1.json"


@dataclass(frozen=True, kw_only=True)
class HostCosts:
    """Seconds of the host, and the surroundings that they hold for.

    Args:
        gpu: the GPU's name, as its driver has it.
        operator_seconds: seconds for an operator; see :class:`ClockRates`, as for the next two.
        launch_seconds: seconds for each further kernel of an operator.
        triton_launch: operators that a Triton kernel's launch takes longer than an operator.
        date: day of the measurement.
        processor: the processor's name.
        software: versions of Python and torch.
    """

    gpu: str
    operator_seconds: float
    launch_seconds: float
    triton_launch: float
    date: str
    processor: str = dataclasses.field(default_factory=processor_name)
    software: str = dataclasses.field(
        default_factory=lambda: f"Python {platform.python_version()}, torch {version('torch')}"
    )

    @property
    def surroundings(self) -> tuple[str, str, str]:
        """All that a later process must have in common with this one for the seconds to hold."""
        return self.gpu, self.processor, self.software


def keep_host(costs: HostCosts) -> Path | None:
    """Keep a measurement in place of that of the same surroundings, and return its file; None: nothing is kept.

    Raises:
        OSError: if the file cannot be written.
    """
    file = _host_file()
    if file is not None:
        others = [one for one in _kept(file) if one.surroundings != costs.surroundings]
        write_rows(file, [dataclasses.asdict(one) for one in (*others, costs)])
    return file


def with_host_here(rates: ClockRates, gpu: str) -> ClockRates:
    """Return the rates of a GPU of this machine with its host's, if that was measured.

    Args:
        rates: the GPU's, with a usual host.
        gpu: its name, as its driver has it.
    """
    here = HostCosts(gpu=gpu, operator_seconds=0.0, launch_seconds=0.0, triton_launch=0.0, date="")
    costs = next((one for one in _kept(_host_file()) if one.surroundings == here.surroundings), None)
    if costs is None:
        return rates
    numbers = {name: getattr(costs, name) for name in HOST_NUMBERS}
    return dataclasses.replace(rates, **numbers, is_host_measured=True)


def _host_file() -> Path | None:
    folder = kept_folder()
    return None if folder is None else folder / FILE_NAME


def _kept(file: Path | None) -> list[HostCosts]:
    """Return the measurements of a file that can be read."""
    found = []
    for row in read_rows(file):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            found.append(_read(row))
    return found


def _read(row: Any) -> HostCosts:
    numbers = {name: float(row[name]) for name in HOST_NUMBERS}
    if not all(0 <= number < 1e3 for number in numbers.values()):
        raise ValueError(f"not seconds and operators: {numbers}")
    return HostCosts(
        gpu=str(row["gpu"]),
        operator_seconds=numbers["operator_seconds"],
        launch_seconds=numbers["launch_seconds"],
        triton_launch=numbers["triton_launch"],
        date=str(row["date"]),
        processor=str(row["processor"]),
        software=str(row["software"]),
    )
