"""Outputs and tables of the documentation are what the commands print now."""

from __future__ import annotations

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


@pytest.mark.parametrize("name", ["which_gpu.md", "README.md"])
def test_the_table_of_recipes_has_what_they_need(name):
    page = next(page for page in pages() if page.name == name).read_text(encoding="utf-8")
    assert with_needs(page) == page, WAY_OUT
    assert with_needs(page.replace(" GiB | ", ".1 GiB | ")) == page
