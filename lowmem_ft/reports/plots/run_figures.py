"""The figures of a run: losses, memory and speed over its steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lowmem_ft.reports.plots.figure import Limit, Line, LineFigure

__all__ = ["run_figures"]


def run_figures(metrics: Sequence[Mapping[str, Any]], limits: Sequence[Limit] = ()) -> list[LineFigure]:
    """Return the figures of a run, those that its lines have numbers for.

    Args:
        metrics: the lines of its ``metrics.jsonl``; numbers that are not finite are left out.
        limits: sizes that the memory of a step is not to exceed.

    Returns:
        Up to three figures: losses in nats per label token, bytes, tokens per second.
    """
    held_out = dict.fromkeys(key for record in metrics for key in record if key.startswith("eval_loss_"))
    found = [
        _figure(
            "Loss, nats per label token",
            [
                Line(words="training", points=_points(metrics, "loss")),
                *_held_out(metrics, {"eval_loss": "held-out"}),
                *_held_out(metrics, {key: f"held-out, {key.removeprefix('eval_loss_')}" for key in held_out}),
            ],
        ),
        _figure(
            "Memory of a step",
            [
                Line(words="peak", points=_points(metrics, "memory_peak_bytes")),
                Line(words="after the step", points=_points(metrics, "memory_now_bytes")),
            ],
            unit="bytes",
            limits=limits,
        ),
        _figure(
            "Tokens per second",
            [Line(words="tokens per second", points=_points(metrics, "tokens_per_second"))],
            starts_at_zero=True,
        ),
    ]
    return [figure for figure in found if figure is not None]


def _figure(title: str, lines: Iterable[Line], **further: Any) -> LineFigure | None:
    shown = [one for one in lines if one.points]
    if not shown:
        return None
    return LineFigure(title=title, axis_words="step", lines=shown, **{"unit": "number", **further})


def _held_out(metrics: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> Iterator[Line]:
    for key, words in names.items():
        yield Line(words=words, points=_points(metrics, key), shows_points=True)


def _points(metrics: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    values = {record["step"]: record[key] for record in metrics if key in record}
    return [
        (step, value) for step, value in sorted(values.items()) if value is not None and math.isfinite(value)
    ]
