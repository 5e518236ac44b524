"""Comparison of a run's estimate with its limits, before any weight is read.

The caller passes in the estimator (``lowmem_ft.train`` has one): this package imports none, and a run without one
trains unchecked.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Protocol

import torch

from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.foundation.catalog.timed_steps import with_seconds_here
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.runtimes.runtime import Runtime

logger = logging.getLogger(__name__)


class Preflight(Protocol):
    """Estimator of one run, which works while the run is prepared."""

    def begin(self, recipe: Recipe, device: torch.device) -> None:
        """Start to estimate, now that the recipe and the device are known.

        Args:
            recipe: the recipe that will be built.
            device: the device of the run.
        """
        ...

    def finish(self, longest_row: int | None) -> MemoryEstimate | None:
        """Return the estimate for rows of at most ``longest_row`` tokens; None if it failed, with the reason logged.

        Args:
            longest_row: tokens of the longest row in the data; None: as the recipe says.

        Raises:
            UserError: if the device cannot run the recipe.
        """
        ...

    def close(self) -> None:
        """Stop, as no estimate is needed any more."""
        ...


class PreflightChecks:
    """Checks of a run's estimate as early as possible: the main process estimates, and all processes fail together.

    The length of rows may be known only from the data, which can take minutes to tokenize. If the recipe fixes the
    length, the check comes before the data.

    Args:
        preflight: the estimator; None, or ``budget.preflight=false``: no estimate is made.
        recipe: the recipe that will be built.
        runtime: the run's device and processes.
    """

    def __init__(self, preflight: Preflight | None, recipe: Recipe, runtime: Runtime) -> None:
        self._is_wanted = preflight is not None and recipe.budget.preflight
        self._preflight = preflight if self._is_wanted and runtime.ranks.is_main else None
        self._recipe, self._runtime = recipe, runtime
        self._rows_are_full = recipe.data.packing or recipe.data.streaming
        self._estimate: MemoryEstimate | None = None
        if self._preflight is not None:
            self._preflight.begin(recipe, runtime.machine.device)

    def before_data(self) -> None:
        """Check the estimate if it does not depend on the data.

        Raises:
            DoesNotFitError: if the run is above a limit.
        """
        if self._rows_are_full:
            self._check(None)

    def after_data(self, data: PreparedData) -> MemoryEstimate | None:
        """Check the estimate if it has not been checked yet, and return it.

        Raises:
            DoesNotFitError: if the run is above a limit.
        """
        if not self._rows_are_full:
            self._check(longest_row(data))
        if self._preflight is not None:
            self._preflight.close()
        return self._estimate

    def _check(self, longest_row: int | None) -> None:
        if not self._is_wanted:
            return
        with self._runtime.ranks.failing_together():
            if self._preflight is not None:
                found = self._preflight.finish(longest_row)
                self._estimate = found and with_seconds_here(found, torch.get_num_threads())
            if self._estimate is not None:
                check_estimate(self._recipe, self._estimate, num_processes=self._runtime.ranks.num_processes)


def longest_row(data: PreparedData) -> int | None:
    """Return the tokens of the longest row in training or evaluation, padding included; None: not known."""
    summaries = [data.summary, data.evaluation_summary if data.evaluation is not None else data.summary]
    lengths = [0 if summary is None else summary.longest for summary in summaries]
    return data.collate.padded_length(max(lengths)) if all(lengths) else None


def with_rows_of(recipe: Recipe, longest_row: int | None) -> Recipe:
    """Return the recipe with ``data.max_length`` set to the longest row of its data, if that is shorter."""
    length = recipe.data.max_length
    if longest_row is None or recipe.data.packing or (length is not None and length <= longest_row):
        return recipe
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, max_length=longest_row))


def check_estimate(recipe: Recipe, estimate: MemoryEstimate, *, num_processes: int = 1) -> None:
    """Compare an estimate with the limits and log the result in one line; on a CPU, device memory is host memory.

    A run whose estimated value is above a limit is refused. If only the upper end of its range is above, a warning is
    logged, because a run that gets an out-of-memory error loses only time.

    Args:
        recipe: for its budget.
        estimate: the estimate of one process of the run that is about to begin.
        num_processes: processes of the run.

    Raises:
        DoesNotFitError: if it is above a limit and ``budget.enforce`` is true.
    """
    if num_processes > 1 and estimate.processes is None:
        logger.warning(
            "The estimate is for a single process. Each of these %d processes takes more, to exchange gradients, and "
            "those on one machine share its host memory.",
            num_processes,
        )
    missing = _missing(recipe, estimate)
    if not missing:
        if not estimate.fits:
            logger.warning(
                "Estimated: %s. It may not fit: the upper end of the estimate's range, %s, is above the limit.",
                summary(estimate),
                format_bytes(estimate.process_high_bytes),
            )
        elif estimate.tight:
            logger.warning(
                "Estimated: %s. That is a tight fit, and the run may still not fit.", summary(estimate)
            )
        else:
            logger.info("Estimated: %s.", summary(estimate))
        return
    opening = "The run may not fit: it" if estimate.verdict == "may not fit" else "The run"
    message = f"{opening} is estimated to need {summary(estimate)}: {' and '.join(missing)}."
    if not recipe.budget.enforce:
        logger.warning("%s It continues, because budget.enforce=false.", message)
        return
    raise DoesNotFitError(
        f"{message} The peak comes in {estimate.peak_phase}{_largest(estimate)}. `lowmem-ft estimate` with the same "
        "settings and --changes lists changes that need less; budget.preflight=false trains without this check."
    )


def summary(estimate: MemoryEstimate) -> str:
    """Return a run's needs as a clause: ``17.2 GiB of device memory, 52.1 GiB of host memory, 3.1 s a step``."""
    time = "" if estimate.step is None else f", {estimate.step.seconds:.3g} s a step"
    if estimate.is_of_cpu:
        return f"{format_bytes(estimate.process_peak_bytes)} of host memory{_of_each(estimate)}{time}"
    return (
        f"{format_bytes(estimate.process_peak_bytes)} of device memory, "
        f"{format_bytes(estimate.host_peak_bytes)} of host memory{_of_each(estimate)}{time}"
    )


def _of_each(estimate: MemoryEstimate) -> str:
    if estimate.processes is None:
        return ""
    together, count = estimate.machine_host_bytes, estimate.plan.per_machine
    return f" in each process ({format_bytes(together)} of host memory in the {count} of a machine)"


def _missing(recipe: Recipe, estimate: MemoryEstimate) -> list[str]:
    """Describe each exceeded limit, and by how many bytes it is exceeded."""
    budget = recipe.budget
    device = None if budget.device is None else f"budget.device={budget.device}"
    host = None if budget.host is None else budget.host_in_words(estimate.plan.per_machine)
    needs = [
        (estimate.process_peak_bytes, estimate.budget.device_bytes, "device", device),
        (estimate.host_peak_bytes, estimate.budget.host_bytes, "host", host),
    ]
    missing = []
    for needed, limit, part, budget in needs:
        if limit is not None and needed > limit:
            has = f"{budget} allows" if budget else f"the {format_bytes(limit)} of this {part}"
            missing.append(f"{format_bytes(needed - limit)} more than {has}")
    return missing


def _largest(estimate: MemoryEstimate) -> str:
    parts = sorted(estimate.by_category_at_peak.items(), key=lambda part: part[1], reverse=True)[:3]
    at = f" at {estimate.peak_module}" if estimate.peak_module else ""
    named = ", ".join(
        f"{category.replace('_', ' ')} {format_bytes(size)}" for category, size in parts if size
    )
    return f"{at}: {named}"
