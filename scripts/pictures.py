"""Draw the pictures of the README: an estimate in the terminal, and the memory of the step that it estimates.

    python scripts/pictures.py            # docs/estimate.svg and docs/memory.svg
    python scripts/pictures.py --check    # exit code 1 if the first shows other numbers than the command prints now

Both are what `lowmem-ft estimate recipe=8b-24gb --gpu rtx-4090` says, and need no GPU. The terminal has 54 columns, so
that a phone shows letters of 11 pixels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from command_line import parser_of
from rich.console import Console
from rich.segment import Segment
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TERMINAL, MEMORY = ROOT / "docs/estimate.svg", ROOT / "docs/memory.svg"

COMMAND = ("lowmem-ft", "estimate", "recipe=8b-24gb", "--gpu", "rtx-4090")
COLUMNS = 54
LAST_LABEL = "cost"
"""Label of the last lines that are shown: then come choices and versions."""

FONT, LETTER, ROW = 12, 7.2, 17
MARGIN, TITLE = 14, 30
ANSI = ("dim", "red", "green", "yellow", "blue", "magenta", "cyan", "ink")
"""The colours of a terminal, by their numbers."""

BLOCKS = " ▏▎▍▌▋▊▉█"

STYLE = f"""
text {{ white-space: pre;
  font: {FONT}px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
svg {{ --ink: #1f2328; --paper: #f6f8fa; --edge: #d1d9e0; --dim: #c5ccd3; --green: #1a7f37; --yellow: #9a6700;
  --red: #cf222e; --cyan: #1b7c83; --blue: #0969da; --magenta: #8250df; }}
@media (prefers-color-scheme: dark) {{ svg {{ --ink: #e6edf3; --paper: #151b23; --edge: #3d444d; --dim: #4a525c;
  --green: #3fb950; --yellow: #d29922; --red: #ff7b72; --cyan: #39c5cf; --blue: #58a6ff; --magenta: #bc8cff; }} }}
.bold {{ font-weight: 700; }}
"""


def printed(*further: str) -> str:
    """Return what the command prints on a terminal.

    Args:
        further: options in addition.
    """
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "FORCE_COLOR": "1"}
    environment.pop("NO_COLOR", None)
    words = [sys.executable, "-m", "lowmem_ft", *COMMAND[1:], *further]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return done.stdout


def shown_lines(output: str) -> list[Text]:
    """Return the lines up to those of ``LAST_LABEL``, and one that represents the others."""
    lines = [Text.from_ansi(line) for line in output.splitlines()]
    labels = [number for number, line in enumerate(lines) if re.match(r"[a-z]", line.plain)]
    last = next(number for number in labels if lines[number].plain.startswith(LAST_LABEL))
    end = next((number for number in labels if number > last), len(lines))
    return [*lines[:end], Text("[...]", "dim")]


def terminal_svg(lines: Sequence[Text]) -> str:
    """Draw lines as a terminal, light or dark as its reader prefers."""
    width, height = 2 * MARGIN + COLUMNS * LETTER, TITLE + ROW * (len(lines) + 2) + MARGIN
    rows = [Text(f"$ {' '.join(COMMAND)}"), Text(), *lines]
    body = "\n".join(
        element for number, line in enumerate(rows) for element in _row(line, TITLE + ROW * (number + 1))
    )
    label = escape(f"A terminal: {' '.join(COMMAND)}: {lines[0].plain} {lines[1].plain}")
    dots = "".join(f'<circle cx="{18 + 16 * place}" cy="16" r="5" fill="var(--edge)"/>' for place in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{label}">\n<style>{STYLE}</style>\n'
        f'<rect x=".5" y=".5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="8" fill="var(--paper)" '
        f'stroke="var(--edge)"/>\n{dots}\n{body}\n</svg>\n'
    )


def _row(line: Text, baseline: int) -> Iterator[str]:
    column = 0
    for segment in line.render(Console(width=200)):
        words = segment.text.rstrip("\n")
        if words.strip():
            start = len(words) - len(words.lstrip())
            yield _run(segment, words.strip(), MARGIN + (column + start) * LETTER, baseline)
        column += len(words)


def _run(segment: Segment, words: str, x: float, baseline: int) -> str:
    style = segment.style
    colour = "ink"
    if style is not None and style.color is not None and style.color.number is not None:
        colour = ANSI[style.color.number]
    elif style is not None and style.dim:
        colour = "dim"
    if set(words) <= set(BLOCKS):
        eighths = sum(map(BLOCKS.index, words))
        size = f'width="{eighths / 8 * LETTER:.1f}" height="{FONT}"'
        return f'<rect x="{x:.1f}" y="{baseline - FONT + 2}" {size} fill="var(--{colour})"/>'
    bold = ' class="bold"' if style is not None and style.bold else ""
    length = f'textLength="{len(words) * LETTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x:.1f}" y="{baseline}" {length} fill="var(--{colour})"{bold}>{escape(words)}</text>'


def main() -> int:
    """Draw both pictures, or check the first."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if the numbers differ"
    )
    options = parser.parse_args()
    picture = terminal_svg(shown_lines(printed()))
    if options.check:
        is_same = TERMINAL.read_text("utf-8") == picture
        print(f"{TERMINAL} {'shows what is printed' if is_same else 'differs: run scripts/pictures.py'}")
        return int(not is_same)
    TERMINAL.write_text(picture, "utf-8")
    printed("--plot", str(MEMORY), "--overwrite")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
