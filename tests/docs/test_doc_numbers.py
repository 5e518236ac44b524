"""Outputs, tables and counts of the documentation are what the commands print now."""

from __future__ import annotations

import re
import subprocess
import sys

import doc_numbers
import pytest
from doc_numbers import blocks_of, brought_up_to_date, pages, with_block, with_needs

WAY_OUT = "run `python scripts/doc_numbers.py`"

PAGE = """\
Some words.

```
$ lowmem-ft estimate recipe=tiny \\
      --gpu all
tiny fits on t4 with 10.0 GiB to spare
[...]
step    5.34 s for 100 tokens
traced  in 2.6 s, torch 2.13.0
[...]
```

In a list:

    $ lowmem-ft gpus --json
    one
      two

```
$ lowmem-ft estimate recipe=tiny        # its output is not shown
$ lowmem-ft train recipe=tiny
```
"""

OUTPUT = [
    "tiny fits on t4 with 9.00 GiB to spare",
    "41,120 parameters",
    "by phase  load 1 GiB",
    "step    6.00 s for 100 tokens",
    "traced  in 9.1 s, torch 2.14.1",
    "",
    "and more",
]


def test_every_command_that_can_be_run_anywhere_is_found():
    """What begins a block of its own; lists of commands show no output."""
    found = {
        (block.page.name, block.command) for page in pages() for block in blocks_of(page, page.read_text())
    }
    assert len(found) >= 7
    for page in pages():
        text = page.read_text(encoding="utf-8")
        fenced = re.findall(
            r"^```\w*\n\$ (lowmem-ft (?:estimate|plan|gpus|recipes|models)\b[^\n#\\]*)\n(?!```)", text, re.M
        )
        indented = re.findall(
            r"\n\n    \$ (lowmem-ft (?:estimate|plan|gpus|recipes|models)\b[^\n#\\]*)\n    ", text
        )
        assert {(page.name, command.strip()) for command in (*fenced, *indented)} <= found


def test_a_block_is_its_command_and_what_is_shown():
    first, second = blocks_of(pages()[0], PAGE)
    assert first.command == "lowmem-ft estimate recipe=tiny --gpu all"
    assert first.shown[0].startswith("tiny fits")
    assert first.shown[-1] == "[...]"
    assert (second.command, second.indent, second.shown) == (
        "lowmem-ft gpus --json",
        "    ",
        ("one", "  two"),
    )


def test_what_differs_is_replaced_and_what_is_left_out_stays_out():
    block = next(blocks_of(pages()[0], PAGE))
    lines = brought_up_to_date(block.shown, OUTPUT)
    assert lines == [OUTPUT[0], "[...]", *OUTPUT[3:5], "[...]"]
    page = with_block(PAGE, block, lines)
    assert page == PAGE.replace("\n".join(block.shown), "\n".join(lines))


def test_how_long_it_took_and_the_versions_do_not_count():
    block = next(blocks_of(pages()[0], PAGE))
    now = ["tiny fits on t4 with 10.0 GiB to spare", "x", "step    5.34 s for 100 tokens", OUTPUT[4], "y"]
    assert brought_up_to_date(block.shown, now) == list(block.shown)


def test_a_block_whose_place_is_gone_asks_for_a_hand():
    with pytest.raises(ValueError, match="nothing in the output is like the line `step"):
        brought_up_to_date(("first", "[...]", "step  5 s", "[...]"), ["first", "quite another thing"])


@pytest.mark.parametrize("name, command", [("which_gpu.md", ""), ("README.md", "lowmem-ft train recipe=")])
def test_the_table_of_recipes_has_what_they_need(name, command):
    page = next(page for page in pages() if page.name == name).read_text(encoding="utf-8")
    assert with_needs(page) == page, WAY_OUT
    row = f"| `{command}8b-8gb` | Qwen3-8B in full, everything streamed | "
    planted = page.replace(row, f"| `{command}8b-8gb` | x | ")
    wrong = re.sub(r"(8b-8gb` \| x \|) [\d.]+ GiB", r"\1 1.23 GiB", planted)
    assert wrong != planted
    assert with_needs(wrong) == planted


def test_a_planted_difference_is_told(monkeypatch, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    monkeypatch.setattr(doc_numbers, "ROOT", tmp_path)
    monkeypatch.setattr(doc_numbers, "pages", lambda: [page])
    monkeypatch.setattr(
        doc_numbers, "output_of", lambda command: OUTPUT if "tiny" in command else ["one", "  two"]
    )
    monkeypatch.setattr(sys, "argv", ["doc_numbers.py", "--check"])
    assert doc_numbers.main() == 1
    assert "+tiny fits on t4 with 9.00 GiB to spare" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == PAGE
    monkeypatch.setattr(sys, "argv", ["doc_numbers.py", "--only", "gpus"])
    assert doc_numbers.main() == 0
    assert page.read_text(encoding="utf-8") == PAGE
    monkeypatch.setattr(sys, "argv", ["doc_numbers.py"])
    assert doc_numbers.main() == 0
    assert "9.00 GiB" in page.read_text(encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["doc_numbers.py", "--check"])
    assert doc_numbers.main() == 0


@pytest.mark.slow
def test_the_pages_say_what_the_commands_print():
    words = [sys.executable, doc_numbers.__file__, "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, f"{WAY_OUT}\n{done.stdout}\n{done.stderr}"
