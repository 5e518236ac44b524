"""Training data as a model reads it: rows with marks, lengths, losses by limit, padding, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from lowmem_ft.data.inspection import Inspection, ShownRow
from lowmem_ft.data.text.marked_pieces import Piece
from lowmem_ft.data.text.template_checks import MOST_KINDS, NUM_CHECKED_EXAMPLES
from lowmem_ft.foundation.system.visible import visible
from lowmem_ft.foundation.units import counted
from lowmem_ft.reports.text.bar import Bar
from lowmem_ft.reports.text.document import Document, Pairs, Table

LEARNT_STYLE, OTHER_STYLE, OURS_STYLE = "bold green", "dim", "bold yellow"

NOTHING_WRONG = "Nothing is wrong with the data or the chat template that training would warn of."


def data_table(inspection: Inspection) -> Document:
    """Return what the model reads, and what is wrong with it.

    Args:
        inspection: the results of the inspection.
    """
    return Document(
        Document(*(Text(visible(note)) for note in inspection.notes), gap=0),
        _rows(inspection.rows),
        _histogram(inspection),
        _cuts(inspection),
        _paddings(inspection),
        _warnings(inspection),
    )


def _rows(rows: Sequence[ShownRow]) -> Document:
    return Document(*(Document(_MarkedRow(row), title=_title(row), gap=0) for row in rows))


def _title(row: ShownRow) -> str:
    why = {"first": "", "longest": ", the longest", "cut": ", cut"}[row.why]
    return f"Example {row.example}{why}: {counted(row.num_tokens, 'token')}, {row.num_labels:,} learnt"


class _MarkedRow:
    """A row's text: in colours, what is learnt differs from what is not; without them, it is between brackets.

    Args:
        row: the row.
    """

    def __init__(self, row: ShownRow) -> None:
        self._row = row

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        row, is_coloured = self._row, console.color_system is not None and not console.no_color
        text = Text()
        for part in _parts(row.begin, is_coloured=is_coloured):
            text.append_text(part)
        if row.num_left_out:
            text.append(f" [... {row.num_left_out:,} tokens not shown ...] ", OURS_STYLE)
        for part in _parts(row.end, is_coloured=is_coloured):
            text.append_text(part)
        if row.num_read < row.num_tokens:
            lost = row.num_tokens - row.num_read
            text.append(f" [cut here: {lost:,} tokens, {row.labels_lost:,} of them learnt]", OURS_STYLE)
        yield Pairs([("", text)], indent=0)


def _parts(pieces: Sequence[Piece], *, is_coloured: bool) -> Iterator[Text]:
    for piece in pieces:
        if is_coloured:
            yield Text(piece.text, LEARNT_STYLE if piece.is_learnt else OTHER_STYLE)
        else:
            yield Text(f"⟦{piece.text}⟧" if piece.is_learnt else piece.text)


def _histogram(inspection: Inspection) -> Document:
    """Return the number of rows by their tokens; bins with rows that are cut have another colour."""
    most = max(count for _, _, count in inspection.bins)
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold", expand=True)
    grid.add_column("tokens", justify="right", no_wrap=True)
    grid.add_column("examples", justify="right", no_wrap=True)
    grid.add_column("", ratio=1)
    for start, end, count in inspection.bins:
        is_cut = inspection.max_length is not None and end > inspection.max_length
        lengths = f"{start:,}" if start == end else f"{start:,} - {end:,}"
        grid.add_row(lengths, f"{count:,}", Bar(count / most, "red" if is_cut else "green"))
    streamed = inspection.num_streamed
    of = "" if streamed is None else f" of the first {streamed:,}"
    return Document(grid, title=f"Lengths{of} before anything is cut", gap=0)


def _cuts(inspection: Inspection) -> Document:
    own = inspection.max_length

    def name(limit: int) -> Text:
        return Text(f"{limit:,}", "bold") + Text(" (the recipe's)" if limit == own else "")

    if inspection.splits:
        rows = [(name(cut.max_length), f"{cut.rows_cut:,}", f"{cut.rows:,}") for cut in inspection.cuts]
        table = Table(("data.max_length", "texts split", "rows"), rows, left=("data.max_length",))
        return Document(table, title="Raw text is split, and nothing is lost", gap=0)
    shares = [
        (
            name(cut.max_length),
            f"{cut.rows_cut:,}",
            f"{cut.tokens_lost:,}",
            _share(cut.labels_lost, inspection.num_labels),
            f"{cut.answers_cut:,}",
            f"{cut.rows_left_out:,}",
        )
        for cut in inspection.cuts
    ]
    columns = ("data.max_length", "rows cut", "tokens lost", "labels lost", "ends lost", "left out")
    return Document(
        Table(columns, shares, left=("data.max_length",), spare=("tokens lost",)),
        "Ends lost: rows whose last learnt token, the end of the turn, is cut. Left out: nothing to learn is left.",
        "Raw text, which is split at the limit and loses nothing, is counted as if it were cut."
        if inspection.is_mixed
        else None,
        title="What a limit would cut",
        gap=0,
    )


def _paddings(inspection: Inspection) -> Document:
    own = inspection.paddings[""].computed
    rows = [
        (
            Text(settings) if settings else Text("as in the recipe", "bold"),
            f"{padding.num_rows:,}",
            f"{padding.computed:,}",
            f"{padding.share:.1%}",
            f"{padding.computed / own - 1:+.1%}" if settings else "",
        )
        for settings, padding in inspection.paddings.items()
    ]
    rows_per_batch = counted(inspection.rows_per_batch, "row")
    return Document(
        Table(("", "rows", "computed", "padding", "change"), rows, left=("",)),
        title=f"Tokens that an epoch computes, in micro-batches of {rows_per_batch}",
        gap=0,
    )


def _not_looked_at(inspection: Inspection) -> str:
    if inspection.num_streamed is not None:
        return " The template was tried only on the first row of the stream."
    if inspection.num_examples <= MOST_KINDS:
        return ""
    return (
        f" The template was tried on the kinds of rows among the first {NUM_CHECKED_EXAMPLES:,} of each source, on "
        f"{MOST_KINDS} kinds at most."
    )


def _warnings(inspection: Inspection) -> Document | Text:
    if not inspection.warnings:
        return Text(NOTHING_WRONG + _not_looked_at(inspection), "green")
    rows = [
        (f"{number}.", visible(warning.words)) for number, warning in enumerate(inspection.warnings, start=1)
    ]
    return Document(Pairs(rows, style="bold red", indent=0, gap=1), title="What is wrong", gap=0)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if part else "0"
