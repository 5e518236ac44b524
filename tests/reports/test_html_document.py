"""Documents as HTML."""

from __future__ import annotations

from rich.table import Table as Grid
from rich.text import Text

from lowmem_ft.reports.text.document import Command, Document, Pairs, Table
from lowmem_ft.reports.text.html_document import html_of


def test_texts_keep_their_styles_and_are_escaped():
    html = html_of(Document(Text.assemble(("a<b", "bold green"), " c\nd"), "plain & simple", title="T<"))
    assert html == (
        '<h4>T&lt;</h4><p><span class="bold green">a&lt;b</span> c<br>d</p><p>plain &amp; simple</p>'
    )


def test_blocks_become_lists_tables_and_commands():
    table = Table(("GPU", "GiB"), [("l4", Text("22", "red"))], left=("GPU",))
    html = html_of(
        Document(Pairs([("peak", "in forward")], style="bold"), table, Command("lowmem-ft", "a b"))
    )
    assert '<dt><span class="bold">peak</span></dt><dd>in forward</dd>' in html
    assert '<th>GPU</th><th class="number">GiB</th>' in html
    assert '<td>l4</td><td class="number"><span class="red">22</span></td>' in html
    assert "<code>lowmem-ft &#x27;a b&#x27;</code>" in html


def test_a_block_of_rich_is_laid_out_as_on_a_terminal():
    grid = Grid(show_header=False)
    grid.add_row("a<b")
    assert "a&lt;b" in html_of(Document(grid))
