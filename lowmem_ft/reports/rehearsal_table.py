"""A rehearsed run at a glance: whether it fits, how long it takes, what it costs, and what it writes to disk."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import counted, format_bytes
from lowmem_ft.planning.estimator.changes import Change
from lowmem_ft.planning.rehearsal.fix_search import Fix
from lowmem_ft.planning.rehearsal.records import Saved
from lowmem_ft.planning.rehearsal.result import (
    DISK_BYTES_PER_SECOND,
    NETWORK_BYTES_PER_SECOND,
    Failure,
    Rehearsal,
    TracedShape,
)
from lowmem_ft.reports.estimate_table import format_dollars, headline, labelled, what_is_missing
from lowmem_ft.reports.estimate_words import PHASE_WORDS, duration, host_need, module_words, verdict
from lowmem_ft.reports.text.document import Document, Table

MOST_WARNINGS = 20

USUAL_WAITS = 1
"""A step reads its loss once."""


def rehearsal_table(rehearsal: Rehearsal) -> Document:
    """Return the results of a rehearsal.

    Args:
        rehearsal: the rehearsal to show.
    """
    failure = rehearsal.failure
    return Document(
        headline(rehearsal.estimate),
        None if failure is None else Text(_failure_words(failure), "bold red"),
        labelled(*_lines(rehearsal)),
        _shapes(rehearsal),
    )


def fixes_table(
    tried: Sequence[Fix], all_together: Change | None, gpu_name: str, *, complete: bool
) -> Document:
    """Return what would make a run fit that does not, as settings to paste.

    Args:
        tried: the changes that were rehearsed; the last fits, or none does.
        all_together: every change at once, for what is missing if there is nothing to rehearse.
        gpu_name: the GPU it would fit on.
        complete: whether the search came to its end.
    """
    mend = next((mend for mend in tried if mend.rehearsal.fits), None)
    if mend is None:
        failed = "".join(
            f"With {shlex.join(mend.change.overrides)} it fits by the estimate, but not when rehearsed. "
            for mend in tried
        )
        if not complete:
            return Document(f"{failed}The search was stopped before it found a change that makes it fit.")
        return Document(
            failed or what_is_missing(all_together, gpu_name),
            "These are the changes that keep the results of training. `lowmem-ft estimate` with the same settings and "
            "--changes tries others too, and with --gpu all other GPUs.",
            gap=0,
        )
    run = mend.rehearsal
    cost = "" if run.cost_usd is None else f", {format_dollars(run.cost_usd)}"
    steps = "the whole run" if run.rehearsed_steps == run.num_steps else counted(run.rehearsed_steps, "step")
    return Document(
        Text("  " + "\n  ".join(map(shlex.quote, mend.change.overrides)), "bold"),
        mend.change.why,
        f"Rehearsed with it ({steps}): {verdict(run.estimate)}. The complete run takes "
        f"{duration(run.time.seconds)}{cost}.",
        title="With this change it fits, and the results of training are the same:",
        gap=0,
    )


def _failure_words(failure: Failure) -> str:
    """Return a sentence on where memory runs out."""
    where = "while the model is loaded"
    if failure.at_step is not None:
        where = f"at step {failure.at_step}, in {PHASE_WORDS[failure.phase]}"
    if failure.shape is not None:
        where += f", with {failure.shape}"
    if failure.sample_ids:
        some = ", ".join(map(str, failure.sample_ids[:4]))
        where += f" (examples {some}{', ...' if len(failure.sample_ids) > 4 else ''})"
    return (
        f"Memory runs out {where}: another {format_bytes(failure.requested_bytes)} cannot be allocated, "
        f"{module_words(failure.module)}."
    )


def _lines(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    estimate, worst = rehearsal.estimate, rehearsal.worst
    part = ""
    if rehearsal.rehearsed_steps < rehearsal.num_steps:
        part = f", of which the first {rehearsal.rehearsed_steps:,} were rehearsed"
    yield (
        "run",
        f"{counted(rehearsal.num_steps, 'step')}{part}; {rehearsal.tokens:,} tokens, "
        f"{rehearsal.label_tokens:,} of them learnt",
    )
    yield "memory", _peaks("your batches", estimate)
    yield "", _peaks("the largest batch that the recipe allows", worst)
    yield "host", host_need(estimate)
    yield from _time(rehearsal)
    yield from _files(rehearsal)
    yield from _waits(rehearsal.longest.waits)
    races = estimate.races
    yield (
        "races",
        "none between streams"
        if not races
        else f"{len(races)}: a stream may use memory before another stream is done with it, so that some results would "
        "be wrong. Where a file of your own is named, let the stream there wait (torch.cuda.Stream.wait_stream); "
        "please report the others.",
    )
    yield from (("", str(race)) for race in races)
    yield from (("" if index else "chosen", text) for index, text in enumerate(estimate.choices))
    warnings = rehearsal.warnings
    for index, warning in enumerate(warnings[:MOST_WARNINGS]):
        yield "" if index else "warnings", warning
    if len(warnings) > MOST_WARNINGS:
        yield "", f"and {len(warnings) - MOST_WARNINGS} more; --json has them"
    if not warnings:
        yield "warnings", "none"
    yield "rehearsed", f"in {duration(rehearsal.seconds)}, on a virtual {rehearsal.gpu.name}"


def _peaks(what: str, estimate: MemoryEstimate) -> str:
    tensors, held, process = map(
        format_bytes,
        (estimate.allocated_peak_bytes, estimate.reserved_peak_bytes, estimate.process_peak_bytes),
    )
    return f"{what}: {tensors} in tensors, {held} reserved for them, {process} in the process"


def _time(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    time, cost, price = rehearsal.time, rehearsal.cost_usd, rehearsal.gpu.cheapest_price
    words = duration(time.seconds)
    if cost is not None and price is not None:
        words += (
            f", {format_dollars(cost)} at {format_dollars(price.usd_per_hour)} an hour "
            f"({price.provider}, {price.date})"
        )
    yield "time", words
    parts = {
        "loading": time.loading,
        "steps": time.steps,
        counted(rehearsal.num_evaluations, "evaluation"): time.evaluations,
        "saving": time.saving,
    }
    yield "", ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items() if seconds)
    if rehearsal.download_bytes:
        rent = (
            ""
            if price is None
            else f", {format_dollars(price.usd_per_hour * rehearsal.download_seconds / 3600)}"
        )
        yield (
            "",
            f"not counted: the download of {format_bytes(rehearsal.download_bytes)}, unless the machine has them, "
            f"{duration(rehearsal.download_seconds)}{rent} at {NETWORK_BYTES_PER_SECOND * 8 / 1e9:.0f} Gbit/s",
        )
    if rehearsal.rounding > 0:
        yield (
            "",
            f"the seconds of a batch are interpolated between the traced shapes, which are padded to "
            f"{rehearsal.rounding:.1%} more tokens than your batches{_within(rehearsal.interpolation_error)}",
        )


def _within(error: float) -> str:
    return f"; interpolated likewise, the traced ones would be off by {error:.1%} at most" if error else ""


def _files(rehearsal: Rehearsal) -> Iterator[tuple[str, str]]:
    if rehearsal.checkpoints:
        saved, kept = rehearsal.checkpoints[-1], rehearsal.kept_checkpoints
        yield "checkpoints", f"{rehearsal.num_checkpoints:,} of {_file_words(rehearsal, saved)}"
        state = format_bytes(saved.optimizer_bytes)
        most = f"{format_bytes(saved.weight_bytes)} of weights, {state} of optimizer state"
        # The newest is written before the oldest of those to keep is deleted.
        together = min(kept + 1, rehearsal.num_checkpoints) * saved.total_bytes
        yield "", f"{most}; they take at most {format_bytes(together)} of disk, {kept} stay at the end"
    elif rehearsal.num_checkpoints:
        first = rehearsal.recipe.training.save_steps
        yield (
            "checkpoints",
            f"{rehearsal.num_checkpoints:,}, the first at step {first:,}, which was not rehearsed",
        )
    else:
        yield "checkpoints", "none; training.save_steps=N saves one every N steps"
    if rehearsal.model is not None:
        yield "model", _file_words(rehearsal, rehearsal.model)


def _file_words(rehearsal: Rehearsal, saved: Saved) -> str:
    seconds = duration(rehearsal.save_seconds(saved))
    return (
        f"{format_bytes(saved.total_bytes)}, {seconds} at {DISK_BYTES_PER_SECOND / 1e9:.0f} GB/s of the disk"
    )


def _waits(waits: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    total = sum(waits.values())
    yield "host waits", f"{total:,} in a step of the largest shape" + (", at" if total else "")
    for place, times in waits.items():
        yield "", place if times == 1 else f"{place}, {times:,} times"
    if total > USUAL_WAITS:
        yield (
            "",
            "At each of these lines the host waits until the GPU has done all its work, and the GPU then waits for "
            "the host. One a step, to read the loss, is usual. In code of your own, read values (.item(), .tolist(), "
            "print) once the step is over.",
        )


def _shapes(rehearsal: Rehearsal) -> Table:
    def rows() -> Iterator[tuple[str, ...]]:
        yield from ((_shape_words(one), *_numbers(one)) for one in rehearsal.steps)
        if rehearsal.update_seconds:
            yield "update", f"{rehearsal.rehearsed_steps:,}", "", _seconds(rehearsal.update_seconds), ""
        yield from ((f"evaluation: {_shape_words(one)}", *_numbers(one)) for one in rehearsal.evaluations)

    return Table(
        ("shape", "times", "first at", "seconds", "tensors"),
        rows(),
        left=("shape",),
        wraps=("shape", 24),
        spare=("first at",),
    )


def _shape_words(traced: TracedShape) -> str:
    return f"{traced.shape}{', not padded' if traced.is_exact else ''}"


def _numbers(traced: TracedShape) -> tuple[str, ...]:
    return (
        f"{traced.times:,}",
        f"step {traced.at_step:,}",
        _seconds(traced.seconds),
        format_bytes(traced.peak_bytes),
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g}"
