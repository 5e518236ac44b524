"""Run the commands that README and docs show, and update their outputs and the table of recipes.

    python scripts/doc_numbers.py                    # rewrite the pages in place
    python scripts/doc_numbers.py --check            # print what differs; exit code 1 if anything does
    python scripts/doc_numbers.py --only several_gpus --only 'recipe=1b-bf16'      # for one page, or for one command

A block is fenced, or indented by four, and begins with ``$ lowmem-ft estimate|plan|gpus|recipes|models``: commands that
need neither a GPU nor a run. Its output has 80 columns; a line ``[...]`` represents any omitted lines, and what
follows it is found by its first cell, whatever the numbers in it. Durations and versions are kept as they are. A plan
takes a minute.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import parser_of

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, split_count
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.recipe.shipped.needs import RecipeNeeds, needs_of_shipped_recipes
from lowmem_ft.reports.estimate_table import format_dollars

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("estimate", "plan", "gpus", "recipes", "models")
LEFT_OUT = "[...]"
COLUMNS = 80
IT_WAS_ANSWERED = (0, 3)

_VERSIONS = re.compile(r"\b(lowmem_ft|torch|transformers|accelerate|peft|bitsandbytes|python) \d[\w.+]*")
_SECONDS = re.compile(r"\bin [\d.,]+ s\b")
_NUMBER = re.compile(r"\b\d[\d.,]*\b")


@dataclass(frozen=True)
class Block:
    """A command and the output that a page shows for it.

    Args:
        page: the page.
        first: index of the output's first line, from 0.
        indent: blanks in front of each line.
        command: the command as typed.
        shown: the lines of output.
    """

    page: Path
    first: int
    indent: str
    command: str
    shown: tuple[str, ...]


def pages() -> list[Path]:
    """Return the README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    """Yield the blocks of a page whose command can run anywhere."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        indent = re.match(r" *", lines[number])[0]  # type: ignore[index]
        line = lines[number].strip()
        number += 1
        begins = line.startswith(tuple(f"$ lowmem-ft {command} " for command in COMMANDS))
        if not (begins or line in [f"$ lowmem-ft {command}" for command in COMMANDS]):
            continue
        before = lines[number - 2].strip() if number > 1 else ""
        is_fenced = before.startswith("```")
        if not is_fenced and (before or len(indent) < 4):
            continue  # one of several commands, whose output is not shown
        while line.endswith("\\"):
            line = f"{line[:-1].rstrip()} {lines[number].strip()}"
            number += 1
        first = number
        while number < len(lines) and _goes_on(lines[number], is_fenced, indent):
            number += 1
        last = number
        while last > first and not lines[last - 1].strip():
            last -= 1
        shown = tuple(shown_line.removeprefix(indent).rstrip() for shown_line in lines[first:last])
        if shown and not shown[0].startswith("$ "):  # else there are only commands
            yield Block(page, first, indent, line.partition("  #")[0].removeprefix("$ "), shown)


def _goes_on(line: str, is_fenced: bool, indent: str) -> bool:
    if is_fenced:
        return not line.strip().startswith("```")
    return not line.strip() or line.startswith(indent)


def output_of(command: str) -> list[str]:
    """Return what a command prints in 80 columns."""
    # A folder of its own: an estimate for a processor has the seconds that runs on this machine have left elsewhere.
    kept = {KEPT_FOLDER_VARIABLE: str(ROOT / ".cache" / "doc_numbers")}
    environment = {**os.environ, **kept, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"}
    words = [sys.executable, "-m", "lowmem_ft", *shlex.split(command)[1:]]
    if words[3] == "estimate" and "--changes" not in words:
        words.append("--no-changes")  # a search of minutes, which no page shows
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    if done.returncode not in IT_WAS_ANSWERED:
        raise SystemExit(f"`{command}` ended with {done.returncode}:\n{done.stderr}")
    return [line.rstrip() for line in done.stdout.rstrip().splitlines()]


def brought_up_to_date(shown: Sequence[str], output: Sequence[str]) -> list[str]:
    """Return the output to show, with the same lines left out.

    Args:
        shown: lines of the page; :data:`LEFT_OUT` represents any lines. As many lines as stand before one are shown.
        output: output of the command now.

    Raises:
        ValueError: if the output has no line with the first cell of one that follows an omission.
    """
    result: list[str] = []
    at = 0
    left = [line.strip() for line in shown]
    while LEFT_OUT in left:
        num_lines = left.index(LEFT_OUT)
        result += [*output[at : at + num_lines], LEFT_OUT]
        at += num_lines
        left = left[num_lines + 1 :]
        if left:
            at = _place_of(left[0], output, at)
    if left:
        result += output[at:]
    return list(shown) if _words(result) == _words(shown) else result


def _place_of(line: str, output: Sequence[str], first: int) -> int:
    for number in range(first, len(output)):
        if _first_cell(output[number]) == _first_cell(line):
            return number
    raise ValueError(f"the output has no line `{_first_cell(line)}`, which follows {LEFT_OUT}")


def _first_cell(line: str) -> str:
    return _NUMBER.sub("#", line.strip().partition("  ")[0])


def _words(lines: Sequence[str]) -> list[str]:
    """Return the words of an output, without those that differ from run to run and from machine to machine."""
    return _SECONDS.sub("in # s", _VERSIONS.sub(r"\1 #", " ".join(lines))).split()


def with_block(text: str, block: Block, lines: Sequence[str]) -> str:
    """Return a page with other lines in place of a block's."""
    all_lines = text.splitlines(keepends=True)
    new = [f"{block.indent}{line}".rstrip() + "\n" for line in lines]
    return "".join([*all_lines[: block.first], *new, *all_lines[block.first + len(block.shown) :]])


def with_needs(text: str) -> str:
    """Return a page whose recipe table has what ``recipes/needs.json`` and the prices say in its last four columns."""
    needs = needs_of_shipped_recipes()

    def row(found: re.Match[str]) -> str:
        name = found["name"]
        return " | ".join((found["before"], *cells_of(needs[name]))) + " |" if name in needs else found[0]

    cells = r" \| ".join([r"[\d.]+ [KMGT]iB"] * 2 + [r"[\d,]+", r"(?:[\d.]+|-)"])
    return re.sub(
        rf"^(?P<before>\|[^|]*\| `(?:[^`]*recipe=)?(?P<name>[^`]+)` \|[^|]*) \| {cells} \|$",
        row,
        text,
        flags=re.M,
    )


def cells_of(needs: RecipeNeeds) -> tuple[str, str, str, str]:
    """Return device and host memory, tokens per second of all GPUs, and dollars per million tokens."""
    tokens_per_second = needs.tokens_per_second or 0.0
    number, name = split_count(needs.gpu)
    price = find_gpu(name).cheapest_price
    dollars = "-"
    if price is not None and tokens_per_second:
        cost = (number or 1) * price.usd_per_hour * 1e6 / 3600 / tokens_per_second
        dollars = format_dollars(cost).removeprefix("$")
    memory = format_bytes(needs.process_peak_bytes), format_bytes(needs.host_peak_bytes)
    return *memory, f"{tokens_per_second:,.0f}", dollars


def updated(page: Path, text: str, wanted: Callable[[str], bool], say: Callable[[str], None]) -> str:
    """Return a page as it should be.

    Args:
        page: its path.
        text: its current text.
        wanted: decides by the page's name and the command whether to look at a block.
        say: receives progress messages.
    """
    new = text
    for block in reversed([*blocks_of(page, text)]):  # from below: line numbers above stay
        if not wanted(f"{page.name} {block.command}"):
            continue
        began = time.perf_counter()
        say(f"{page.name}: {block.command}")
        try:
            lines = brought_up_to_date(block.shown, output_of(block.command))
        except ValueError as error:
            raise SystemExit(f"{page.name}, `{block.command}`: {error}. Edit the page by hand.") from error
        say(
            f"  {'as it was' if tuple(lines) == block.shown else 'differs'}, {time.perf_counter() - began:.0f} s"
        )
        new = with_block(new, block, lines)
    if wanted(f"{page.name} recipes/needs.json"):
        new = with_needs(new)
    return new


def main() -> int:
    """Update all pages, or print the differences."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 if something differs"
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="look at blocks whose page or command contains it; `needs.json` names the table of recipes",
    )
    options = parser.parse_args()

    def wanted(name: str) -> bool:
        return not options.only or any(text in name for text in options.only)

    differs = False
    for page in pages():
        text = page.read_text(encoding="utf-8")
        new = updated(page, text, wanted, lambda words: print(words, file=sys.stderr, flush=True))
        if new == text:
            continue
        differs = True
        name = page.relative_to(ROOT)
        diff = difflib.unified_diff(
            text.splitlines(), new.splitlines(), str(name), f"{name}, now", lineterm=""
        )
        print("\n".join(diff), flush=True)
        if not options.check:
            page.write_text(new, encoding="utf-8")
    if options.check and differs:
        print("\nRun `python scripts/doc_numbers.py`.", file=sys.stderr)
    return int(options.check and differs)


if __name__ == "__main__":
    sys.exit(main())
