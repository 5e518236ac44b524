"""``lowmem-ft data``: what the model reads, and what would be lost, before anything is trained."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lowmem_ft.cli.console.asking import libraries_loading, settled
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.system.interrupts import on_interrupt

ROWS_SHOWN = 2

_USAGE = """lowmem-ft data recipe=NAME|PATH [key=value ...] [--show N]
                      [--json FILE|-] [--overwrite]"""
_EXAMPLES = """\
examples:
  lowmem-ft data recipe=tiny
  lowmem-ft data recipe=7b-lora data=chats.jsonl --show 5
  lowmem-ft data recipe=7b-lora data=chats.jsonl data.max_length=4096 data.packing=true
  lowmem-ft data recipe=my.yaml --json data.json

Rows are tokenized as in training, which then finds them in the cache. It needs the tokenizer, and no weights: without
access to the hub, name a folder with model.tokenizer_name_or_path=FOLDER. Rows that are tokens already (input_ids)
are counted without one, and shown as ids.

Exit codes: 0 all is well; 4 the data can be used, but training would lose or wrongly learn some of it, and warns of
that too; 2 the data cannot be used, or the input is at fault."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Show what the model reads of the data that the settings name.

    Args:
        arguments: ``recipe=NAME|PATH``, ``key=value`` settings and options.

    Returns:
        The exit code: 0 if all is well; 4 if there is something that training warns of.
    """
    with on_interrupt("while reading data: only what was tokenized is kept, in the cache."):
        options, words = _parser().parse_options(arguments)
        request = settled("data", words, problems=_problems(options))
        with libraries_loading():
            from lowmem_ft.cli.answers.data import show_data
        return show_data(request, options)


def _problems(options: argparse.Namespace) -> Iterator[str]:
    if options.show < 0:
        yield f"--show is at least 0, got {options.show}."
    yield from file_problems(options, "json")


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft data",
        usage=_USAGE,
        description="Show what the model reads, with what it learns marked; what data.max_length cuts; padding; and "
        "what is wrong with the data and the chat template.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--show",
        type=int,
        default=ROWS_SHOWN,
        metavar="N",
        help=f"show the first N rows, N that are cut, and the longest (default: {ROWS_SHOWN}; 0: none)",
    )
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE|-",
        help="write the result as JSON; - or no FILE: to stdout, and nothing else there",
    )
    parser.add_overwrite()
    return parser
