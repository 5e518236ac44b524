"""``lowmem-ft rehearse``: a complete run without its values, before a GPU is rented."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lowmem_ft.cli.console.asking import libraries_loading, settled
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.system.interrupts import on_interrupt

_USAGE = (
    "lowmem-ft rehearse recipe=NAME|PATH [key=value ...] [--gpu NAME]\n"
    "       [--steps N] [--changes|--no-changes] [--json FILE|-]\n"
    "       [--without-packages] [--overwrite]"
)
_EXAMPLES = """\
examples:
  lowmem-ft rehearse recipe=7b-lora data=chats.jsonl --gpu rtx-4090
  lowmem-ft rehearse recipe=8b-24gb data=chats.jsonl --gpu rtx-4090 --steps 100
  lowmem-ft rehearse recipe=my.yaml --gpu l4 --json rehearsal.json

The run's own loop goes over the real data, tokenized and batched as in training; the model is built from its config
alone, on a virtual GPU. It needs the data and the tokenizer: without access to the hub, name a folder with
model.tokenizer_name_or_path=FOLDER. One step is traced for each shape of data, and the others of its shape are counted.

Exit codes: 0 it fits; 3 it does not, or may not; 2 the input is at fault."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Rehearse what the settings describe.

    Args:
        arguments: ``recipe=NAME|PATH``, ``key=value`` settings and options.

    Returns:
        The exit code: 0 if it fits; 3 if it does not, or may not.
    """
    with on_interrupt("while rehearsing: nothing was kept."):
        options, words = _parser().parse_options(arguments)
        request = settled("rehearse", words, options.gpu, problems=_problems(options))
        with libraries_loading():
            from lowmem_ft.cli.answers.rehearse import rehearse_run
        return rehearse_run(request, options)


def _problems(options: argparse.Namespace) -> Iterator[str]:
    if options.steps is not None and options.steps < 1:
        yield f"--steps is at least 1, got {options.steps}."
    yield from file_problems(options, "json")


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft rehearse",
        usage=_USAGE,
        description="Execute a complete training run on a virtual GPU, without values: memory over the real batches, "
        "hours, cost, files, warnings.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_gpu("a GPU of `lowmem-ft gpus`; without: what this machine has, or one of the budget's size")
    parser.add_once({"--steps N": "optimizer steps to rehearse, from the first; without: all"}, type=int)
    parser.add_once({"--json FILE|-": "write the result as JSON; - is stdout, then JSON alone"})
    parser.add_argument(
        "--changes",
        action=argparse.BooleanOptionalAction,
        help="if it does not fit, search for the smallest change with which it does and that trains the same numbers, "
        "and rehearse it, which takes minutes; the default, except with --json (Ctrl-C ends the search)",
    )
    parser.add_without_packages()
    parser.add_overwrite()
    return parser
