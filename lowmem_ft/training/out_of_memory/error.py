"""The error for a run whose device memory ran out."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe
from lowmem_ft.system.memory_meter import MemoryReading
from lowmem_ft.training.out_of_memory.remediations import remediations_for


class NotRetried(RuntimeError):
    """Memory ran out, and why what it ran out in was not started over; comes from the error itself, if that is left.

    Args:
        reason: one or more sentences.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


INSIDE_AN_UPDATE = "It ran out inside an update of the weights, which cannot be taken back."


@contextlib.contextmanager
def not_retried(reason: str) -> Iterator[None]:
    """Say of an out-of-memory error in a block why it ends the run.

    Raises:
        NotRetried: from the error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NotRetried) or not is_out_of_memory(error):
            raise
        raise NotRetried(reason) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, or a block under :func:`not_retried` has said so."""
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
    """The error for a run whose device memory ran out.

    Args:
        recipe: what was run; changes it has made already are not suggested again.
        memory: of the device, at the end.
        when: the moment, such as ``at step 1``.
        num_processes: that trained together: what works in one process only is not suggested to several.
        has_bfloat16: whether the device computes with bfloat16, which is else not suggested.
        held_by_others_bytes: what other processes and displays held of the device.
        report: sentences about the moment.

    Returns:
        An error that says how far it came and what would need less, from no cost in time to the most.
    """
    budget = f" (budget.device={recipe.budget.device})" if recipe.budget.device else ""
    ways = remediations_for(recipe, num_processes=num_processes, has_bfloat16=has_bfloat16)
    remedies = [f"{way.overrides_text} ({way.why})" for way in ways] or ["a GPU with more memory"]
    others = ""
    if held_by_others_bytes:
        others = (
            f", beside {format_bytes(held_by_others_bytes)} that other processes hold (nvidia-smi lists them)"
        )
    return DoesNotFitError(
        f"The device memory ran out {when}{budget}, after a peak of {format_bytes(memory.peak_bytes)} in "
        f"tensors{others}. {''.join(f'{sentence} ' for sentence in report)}What would need less, cheapest first: "
        f"{'; '.join(remedies)}. `lowmem-ft plan` with the same settings looks for the fastest that fits."
    )
