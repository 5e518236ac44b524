"""A run as one self-contained page: how it went, its memory as estimated and as measured, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from html import escape

from lowmem_ft.foundation.memory.comparison import compared
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.recipe import recipe_to_yaml
from lowmem_ft.recipe.command_lines import command_line, launched
from lowmem_ft.reports.plots.html_page import page, table
from lowmem_ft.reports.plots.line_svg import line_svg
from lowmem_ft.reports.plots.memory_figure import memory_figure
from lowmem_ft.reports.plots.memory_html import NARROW, memory_html
from lowmem_ft.reports.plots.run_figures import run_figures
from lowmem_ft.reports.plots.svg import within_page
from lowmem_ft.reports.run_record import RunRecord
from lowmem_ft.reports.run_report import facts, notes, rehearsed
from lowmem_ft.training.folder.replaced_run import RECIPE_FILE


def run_page(run: RunRecord, estimate: MemoryEstimate | str) -> str:
    """Return the report of a run as a page, which loads nothing and shows texts of data and models as texts.

    Args:
        run: the run.
        estimate: an estimate of its recipe on its device, with its timeline; or the reason why it is missing.

    Returns:
        The text of an HTML file.
    """
    figure = None if isinstance(estimate, str) else memory_figure(estimate)
    limits = () if figure is None else figure.limits
    timeline = _paragraph(str(estimate)) if figure is None else memory_html(figure)
    curves = "\n".join(within_page(line_svg(each, NARROW)) for each in run_figures(run.metrics, limits))
    sections = {
        "": _table(("", run.path.name), facts(run).items()) + "".join(map(_paragraph, notes([run]))),
        "Losses, memory and speed": f'<div class="figures">\n{curves}\n</div>' if curves else "",
        "Estimated and measured": _memory(run),
        "Memory of a step, as estimated": timeline,
        "Answers before and after": _answers(run),
        "Where the time of a step went": _profile(run),
        "Settings": f"<pre>{escape(recipe_to_yaml(run.recipe))}</pre>",
        "How to repeat it": _commands(run),
    }
    body = "\n".join(
        (f"<h2>{title}</h2>\n" if title else "") + content for title, content in sections.items() if content
    )
    return page(f"{run.path.name}: report of a run", run.path.name or str(run.path), body)


def _memory(run: RunRecord) -> str:
    rows = [
        (
            row.name,
            row.text(row.estimated),
            row.text(row.measured),
            "" if row.error is None else f"{row.error:+.1%}",
        )
        for row in compared(run.estimated, run.measured)
    ]
    found = _table(("", "estimated", "measured", "error"), rows) if rows else ""
    if of_rehearsal := dict(rehearsed(run)):
        found += "\n" + _table(("", "rehearsed / measured"), of_rehearsal.items())
    return found


def _answers(run: RunRecord) -> str:
    if not run.generations:
        return ""
    first, last = run.generations[0].steps
    headings = ("prompt", f"at step {first:,}", f"at step {last:,}")
    rows = [
        (one.prompt, *("- (memory ran out)" if text is None else text for text in (one.before, one.after)))
        for one in run.generations
    ]
    return table(headings, rows, headings)


def _profile(run: RunRecord) -> str:
    if run.profile is None:
        return ""
    parts = [_paragraph(run.profile.title)]
    for section in run.profile.sections():
        parts += [_paragraph(section.title), _table(section.headings, section.rows)]
    if run.profile.advice:
        items = "".join(f"<li>{escape(text)}</li>" for text in run.profile.advice)
        parts.append(f"{_paragraph('What to change first:')}<ol>{items}</ol>")
    return "\n".join(parts)


def _commands(run: RunRecord) -> str:
    recipe = f"recipe={run.path / RECIPE_FILE}"
    commands = (
        [*launched(run.recipe), recipe, f"training.output_dir={run.path}-again"],
        command_line("estimate", recipe),
        command_line("report", str(run.path), f"{run.path}-again"),
    )
    return f"<pre>{escape(chr(10).join(map(shlex.join, commands)))}</pre>"


def _paragraph(words: str) -> str:
    return f"<p>{escape(words)}</p>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column has words, and whose others have numbers."""
    return table(headings, rows, headings[:1])
