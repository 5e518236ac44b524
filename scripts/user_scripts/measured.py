"""One row's numbers: a real run's bytes, phase by phase, and those of the estimate."""

from __future__ import annotations

from dataclasses import dataclass

from measuring.real_script import run_for_real
from user_scripts.rows import Row

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.script_runs import estimate_script

PEAK = 0.001
"""Most that a whole peak may be off by, relative."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row with its numbers.

    Args:
        row: the row.
        real_bytes: peak of the real run.
        estimated_bytes: peak of the estimate.
        phase: phase in which the estimate is off by most.
        off: how much it is off there, relative to the real bytes.
        problem: why there are no numbers; empty: there are.
    """

    row: Row
    real_bytes: int = 0
    estimated_bytes: int = 0
    phase: str = ""
    off: float = 0.0
    problem: str = ""

    @property
    def keeps_its_word(self) -> bool:
        """True if the whole peak is within 0.1%, and every phase as near as the row says."""
        if self.problem:
            return False
        return abs(self.estimated_bytes / self.real_bytes - 1) <= PEAK and abs(self.off) <= self.row.off

    def __str__(self) -> str:
        if self.problem:
            return f"{self.row.name}: {self.problem}"
        whole = self.estimated_bytes / self.real_bytes - 1
        return (
            f"{self.row.name}: {self.real_bytes:,} bytes, estimated {self.estimated_bytes:,} ({whole:+.3%}); "
            f"worst in {self.phase}: {self.off:+.3%}"
        )


def measure(row: Row) -> Measured:
    """Run a row's script in the present folder, which ``write_all`` has filled, and estimate it."""
    if not row.is_runnable:
        return Measured(row=row, problem=f"needs the package {row.package}")
    try:
        real = run_for_real(row.script, row.arguments)
    except RuntimeError as error:
        return Measured(row=row, problem=f"the script itself fails: {str(error).splitlines()[-1]}")
    try:
        found = estimate_script(row.script, row.arguments, gpu="cpu")
    except UserError as error:
        return Measured(row=row, problem=f"no estimate: {error}")
    estimated = {**found.estimate.by_phase, "kept": found.kept_bytes}
    measured = {**real.by_phase, "kept": real.kept_bytes}
    shared = [phase for phase in estimated if measured.get(phase) and phase != "load"]
    off = {phase: estimated[phase] / measured[phase] - 1 for phase in shared}  # type: ignore[index]
    worst = max(off, key=lambda phase: abs(off[phase]))
    return Measured(
        row=row,
        real_bytes=real.peak_bytes,
        estimated_bytes=found.estimate.allocated_peak_bytes,
        phase=worst,
        off=off[worst],
    )
