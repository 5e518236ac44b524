"""Help that keeps its paragraphs and examples, in a terminal of any width."""

from __future__ import annotations

import argparse
import itertools
import textwrap
from collections.abc import Iterable, Iterator


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills paragraphs to the terminal's width; lines that are indented are examples, continued as a shell's are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = super()._fill_text(text, width, indent).splitlines()
        filled: list[str] = []
        for is_paragraph, group in itertools.groupby(lines, key=lambda line: line[:1].strip() != ""):
            block = list(group)
            filled += textwrap.wrap(" ".join(block), width) if is_paragraph else _continued(block, width)
        return "\n".join(filled)


def _continued(examples: Iterable[str], width: int) -> Iterator[str]:
    for line in examples:
        parts = textwrap.wrap(
            line, width - 2, subsequent_indent="      ", break_on_hyphens=False, break_long_words=False
        )
        yield " \\\n".join(parts)
