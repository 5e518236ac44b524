"""Help that keeps its paragraphs and examples, in a terminal of any width."""

from __future__ import annotations

import argparse
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator

from lowmem_ft.reports.text.wrapping import filled, shell_lines


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fill paragraphs to the terminal's width; indented lines are examples, continued as in a shell.

    An indented line with two blanks after its first word is not an example but an entry of a list.
    """

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = super()._fill_text(text, width, indent).splitlines()
        parts: list[str] = []
        for is_paragraph, group in itertools.groupby(lines, key=lambda line: line[:1].strip() != ""):
            block = list(group)
            parts += filled(" ".join(block), width) if is_paragraph else _indented(block, width)
        return "\n".join(parts)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return filled(" ".join(text.split()), width)


def _indented(block: Iterable[str], width: int) -> Iterator[str]:
    for line in block:
        entry = re.match(r"\s*\S+\s{2,}", line)
        if entry is not None:
            first, *others = filled(line[entry.end() :], width, indent=" " * entry.end())
            yield from (entry[0] + first.strip(), *others)
        elif line.strip():
            yield from shell_lines(shlex.split(line), width)
        else:
            yield ""
