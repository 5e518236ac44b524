"""The error for a run whose device memory ran out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.system.host_memory import MemoryReading
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.space.remediations import remediations_for


class NotRetried(RuntimeError):
    """Out-of-memory error with the reason why the work was not retried; its cause is the original error, if known.

    Args:
        reason: one or more sentences.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


INSIDE_AN_UPDATE = "It ran out inside an update of the weights, which cannot be undone."


@contextlib.contextmanager
def not_retried(reason: str) -> Iterator[None]:
    """Add to an out-of-memory error in a block the reason why it ends the run.

    Raises:
        NotRetried: from the original error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NotRetried) or not is_out_of_memory(error):
            raise
        raise NotRetried(reason) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, or a :class:`NotRetried`."""
    return isinstance(error, NotRetried) or is_failed_allocation(error)


def does_not_fit(
    recipe: Recipe,
    memory: MemoryReading,
    when: str,
    *,
    num_processes: int = 1,
    has_bfloat16: bool = True,
    held_by_others_bytes: int = 0,
    report: Sequence[str] = (),
) -> DoesNotFitError:
    """Return the error for a run whose device memory ran out.

    Args:
        recipe: the recipe of the run; changes that it has already made are not suggested again.
        memory: reading of the device's memory at the end.
        when: the moment, such as ``at step 1``.
        num_processes: processes that trained together: changes that work only in one process are not suggested to
            several.
        has_bfloat16: whether the device computes with bfloat16, which is otherwise not suggested.
        held_by_others_bytes: bytes of the device that other processes and displays held.
        report: sentences about the moment.

    Returns:
        An error with the progress of the run and the changes that would need less memory, from no cost in time to the
        most.
    """
    budget = f" (budget.device={recipe.budget.device})" if recipe.budget.device else ""
    ways = remediations_for(recipe, num_processes=num_processes, has_bfloat16=has_bfloat16)
    remedies = [f"{way.overrides_text} ({way.why})" for way in ways] or ["a GPU with more memory"]
    others = ""
    if held_by_others_bytes:
        others = (
            f", plus {format_bytes(held_by_others_bytes)} that other processes hold (nvidia-smi lists them)"
        )
    return DoesNotFitError(
        f"The device memory ran out {when}{budget}, after a peak of {format_bytes(memory.peak_bytes)} in "
        f"tensors{others}. {''.join(f'{sentence} ' for sentence in report)}Changes that need less, cheapest first: "
        f"{'; '.join(remedies)}. `lowmem-ft plan` with the same settings searches for the fastest that fit."
    )
