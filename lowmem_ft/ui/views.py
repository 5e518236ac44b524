"""HTML of answers: the bar by use, two settings side by side, lengths, and lines of progress and of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.estimate_words import CATEGORY_WORDS
from lowmem_ft.reports.longest_rows_table import length_table, length_words
from lowmem_ft.reports.plots.svg import COLOURS
from lowmem_ft.reports.text.document import Table
from lowmem_ft.reports.text.html_document import copied_html, html_of
from lowmem_ft.ui.desk import Progress

_COLOURS = {words: COLOURS[category] for category, words in CATEGORY_WORDS.items()} | {
    "cached, not in use": COLOURS["cached"],
    "context, libraries": COLOURS["context"],
    "context, estimated": COLOURS["context"],
    "context, paged state": COLOURS["context"],
    "held by others": "#444c56",
    "free": "transparent",
    "missing": "var(--bad)",
}
"""The colours of the timeline, by the words of the uses in the bar."""


def progress_html(progress: Progress) -> str:
    """Return the line that says what is being done, and for how long."""
    return f'<p class="progress" role="status">{escape(progress.doing)} … {progress.seconds:.0f} s</p>'


def problems_html(problems: Sequence[str]) -> str:
    """Return a line for each problem of an error."""
    return "".join(f'<p class="problem" role="alert">{escape(problem)}</p>' for problem in problems)


def estimate_html(answer: Mapping[str, Any]) -> str:
    """Return an estimate: the verdict, the bar by use, the timeline, and the facts.

    Args:
        answer: the answer of ``ui.answering.estimate``.
    """
    device, values = answer["values"]["device"], answer["values"]
    peak = device["process_peak_bytes"]
    words = f"{format_bytes(peak)}"
    if device["process_low_bytes"] is not None:
        words += (
            f", {format_bytes(device['process_low_bytes'])} to {format_bytes(device['process_high_bytes'])}"
        )
    drawings = (f'<div class="{name}">{drawing}</div>' for name, drawing in answer["timeline"].items())
    return (
        f'<section class="verdict" data-verdict="{escape(values["verdict"])}"><p>{answer["verdict"]}</p>'
        f'<p>The process takes <strong id="peak" data-bytes="{peak}">{escape(words)}</strong>.</p></section>'
        f'{_bar_html(answer["uses"])}<div class="timeline">{"".join(drawings)}</div>{answer["facts"]}'
        f"{answer['engines']}"
    )


def _bar_html(uses: Sequence[tuple[str, int]]) -> str:
    """Return one bar of all uses at the peak, and a legend with their sizes.

    Args:
        uses: words and bytes, in the order in which they are stacked.
    """
    whole = sum(size for words, size in uses if words != "missing") or 1
    parts, legend = [], []
    for words, size in uses:
        paint, name, text = f"background:{_COLOURS[words]}", escape(words), format_bytes(size)
        if words != "missing":
            parts.append(f'<i style="width:{size / whole:.3%};{paint}" title="{name}: {text}"></i>')
        legend.append(f'<li><i style="{paint}"></i>{name}<b>{text}</b></li>')
    label = escape(", ".join(f"{words} {format_bytes(size)}" for words, size in uses))
    bar = f'<div class="bar" role="img" aria-label="{label}">{"".join(parts)}</div>'
    return f'{bar}<ul class="legend">{"".join(legend)}</ul>'


def compared_html(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return two estimates side by side, with what differs.

    Args:
        kept: the answer that was kept.
        now: the answer to compare with it.
    """
    rows = [[words, *cells] for words, *cells in _compared(kept, now)]
    return html_of(Table(("", "kept", "now", "difference"), rows, left=("",))) + (
        f"<h4>Kept</h4>{copied_html(kept['command'])}<h4>Now</h4>{copied_html(now['command'])}"
    )


def lengths_html(answer: Mapping[str, Any]) -> str:
    """Return the length at which memory ends, and what one GiB more buys.

    Args:
        answer: the answer of ``ui.answering.find_longest_rows``.
    """
    now, more = answer["now"], answer["with_one_gib_more"]
    words = [length_words(now)]
    if more.tokens == more.most_tokens == now.tokens:
        words.append("One GiB more buys nothing: rows are as long as the model takes.")
    else:
        words.append(f"One GiB more buys rows of {more.tokens:,} tokens, {more.tokens - now.tokens:,} more.")
    return "".join(f"<p>{escape(each)}</p>" for each in words) + html_of(length_table(now))


def table_html(answer: Mapping[str, Any]) -> str:
    """Return a table that a command prints, with that command."""
    return answer["table"] + f"<p>The same on a terminal:</p>{copied_html(answer['command'])}"


def plan_html(answer: Mapping[str, Any]) -> str:
    """Return a plan with its reasons, and the command that trains it."""
    train = copied_html(answer["train"]) if answer["train"] else ""
    return table_html(answer) + (f"<p>Train it:</p>{train}" if train else "")


def rows_html(answer: Mapping[str, Any]) -> str:
    """Return the counts of a data file, and what training would warn of."""
    words = (
        f"{answer['rows']:,} examples, {answer['tokens']:,} tokens; the longest has {answer['longest']:,}, "
        "which is now the length of a row."
    )
    return "".join(f"<p>{escape(each)}</p>" for each in (words, *answer["warnings"]))


def _compared(kept: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    both = kept["values"], now["values"]
    yield "verdict", both[0]["verdict"], both[1]["verdict"], ""
    yield "GPU", *(each["gpu"]["name"] for each in both), ""
    sizes: dict[str, Callable[[Mapping[str, Any]], int | None]] = {
        "process at the peak": lambda each: each["device"]["process_peak_bytes"],
        "upper end of its range": lambda each: each["device"]["process_high_bytes"],
        "host memory": lambda each: each["host"]["peak_bytes"],
    }
    for words, read in sizes.items():
        yield (words, *_sizes(read(both[0]), read(both[1])))
    parts = [dict(kept["uses"]), dict(now["uses"])]
    for use in dict.fromkeys([*parts[0], *parts[1]]):
        yield (use, *_sizes(parts[0].get(use, 0), parts[1].get(use, 0)))
    numbers: dict[str, tuple[Callable[[Mapping[str, Any]], float | None], str]] = {
        "seconds a step": (lambda each: (each["step"] or {}).get("seconds"), ".3g"),
        "tokens a second": (lambda each: (each["step"] or {}).get("tokens_per_second"), ",.0f"),
        "$ per 1M tokens": (lambda each: (each["cost"] or {}).get("usd_per_million_tokens"), ".3g"),
    }
    for words, (number, digits) in numbers.items():
        yield (words, *_numbers(number(both[0]), number(both[1]), digits))


def _sizes(before: int | None, after: int | None) -> tuple[str, str, str]:
    cells = ["-" if each is None else format_bytes(each) for each in (before, after)]
    if before is None or after is None:
        return cells[0], cells[1], ""
    difference = after - before
    sign = "+" if difference > 0 else "-" if difference < 0 else ""
    return (
        format_bytes(before),
        format_bytes(after),
        f"{sign}{format_bytes(abs(difference))}" if sign else "same",
    )


def _numbers(before: float | None, after: float | None, digits: str) -> tuple[str, str, str]:
    cells = ["-" if each is None else f"{each:{digits}}" for each in (before, after)]
    change = f"{after / before - 1:+.1%}" if before and after is not None else ""
    return cells[0], cells[1], change
