"""Options of ``lowmem-ft estimate``, and checks that can fail before time is spent on it."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.accelerate_config import check_accelerate_config
from lowmem_ft.foundation.catalog.gpu_catalog import ALL_GPUS, CPU, split_count
from lowmem_ft.foundation.errors import UserError, raise_problems

if TYPE_CHECKING:
    from lowmem_ft.recipe.request.request import Request

FOR_THE_PROCESSOR = "This is an estimate for the processor. See GPUs with --gpu NAME or --gpu all."
STEPS_OF_SCRIPT, FEWEST_STEPS = 3, 2
MOST_ROWS, MOST_EPOCHS = 10**12, 10**6

ROWS_NEED_GPU = "--longest-rows is about a GPU's memory, got a processor. Name a GPU: --gpu NAME."
LENGTH_ARGUMENTS = (
    "max_length",
    "max_seq_length",
    "max_seq_len",
    "max_sequence_length",
    "sequence_length",
    "sequence_len",
    "seq_length",
    "seq_len",
    "block_size",
    "cutoff_len",
    "model_max_length",
    "context_length",
    "max_tokens",
)
"""Names that scripts give to the tokens of a row."""

_USAGE = (
    "lowmem-ft estimate recipe=NAME|PATH | model=NAME [key=value ...]\n"
    "       lowmem-ft estimate --script FILE.py [--steps N]\n"
    "           [--accelerate-config FILE] [options] -- ARGS\n"
    "       [--gpu NAME|all] [--rows N [--epochs E]] [--longest-rows] [--changes]\n"
    "       [--json FILE|-] [--plot FILE] [--snapshot FILE.pickle]\n"
    "       [--without-packages] [--overwrite]"
)
_EXAMPLES = """\
examples:
  lowmem-ft estimate recipe=7b-bf16 --gpu l40s
  lowmem-ft estimate model=llama-3.1-8b --gpu all
  lowmem-ft estimate model=llama-3.1-8b data.max_length=1500 --gpu all --rows 2000 --epochs 3
  lowmem-ft estimate model=qwen3-14b adapter.name=lora data.max_length=4096 budget=16GiB
  lowmem-ft estimate recipe=8b-bf16 data.max_length=8192 checkpointing.mode=none --gpu h100-80gb --plot memory.html
  lowmem-ft estimate recipe=my/recipe.yaml budget=24GiB --json -
  lowmem-ft estimate recipe=7b-lora checkpointing.mode=auto --gpu rtx-4090
  lowmem-ft estimate recipe=7b-lora --gpu rtx-4090 --longest-rows
  lowmem-ft estimate --script train.py --gpu rtx-4090 -- --learning_rate 1e-4
  lowmem-ft estimate --script train.py --gpu 4xrtx-4090 --accelerate-config fsdp.yaml

A model without a recipe is estimated in three ways, with the given settings: full fine-tuning, LoRA
(adapter.name=lora: only this) and QLoRA (model.quantization=nf4: only this), each by the fastest of a few settings
that fit the GPU: shipped recipes, rows of a micro-batch, checkpointed layers, fused kernels. Data is not read: rows
are assumed to be data.max_length long. The recipe's own step runs on a virtual GPU, without weights.
`lowmem-ft gpus` and `lowmem-ft models` list the names.

A script runs unchanged, on a virtual GPU, for a few optimizer steps: its weights are not read, it writes nothing, and
the words after `--` are its own arguments. On several GPUs it is one of as many processes, as torchrun or `accelerate
launch` starts them.

Traces are kept in the folder that LOWMEM_FT_TRACE_CACHE names, by default ~/.cache/lowmem_ft/traces; `off` keeps none.

Exit codes: 0 it fits, perhaps tightly, as the verdict says; 3 it does not fit, or may not, as the limit is within the
estimate's range; 2 the input is at fault."""


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the other words: a recipe or a model, and settings.

    Raises:
        UserError: if an option is impossible.
    """
    options, words = _parser().parse_options(arguments)
    if options.steps is not None:
        raise UserError(f"--steps is for --script, got {options.steps} without it. Leave it out.")
    if options.accelerate_config is not None:
        raise UserError(
            f"--accelerate-config is for --script, got {options.accelerate_config} without it. A recipe has the group "
            "`distributed`."
        )
    return options, words


def names_script(arguments: Sequence[str]) -> bool:
    """Return whether the command is for a script and not a recipe."""
    own = _before_dashes(arguments)
    return any(argument == "--script" or argument.startswith("--script=") for argument in own)


def parse_for_script(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the script's own arguments, which come after ``--``.

    Raises:
        UserError: if an option is impossible for a script.
    """
    from lowmem_ft.recipe.request.words import gpu_problems

    own = _before_dashes(arguments)
    options, others = _parser().parse_known_args(own)
    problems = [_problem_with_script(other) for other in others[:1]]
    if options.steps is not None and options.steps < FEWEST_STEPS:
        problems.append(
            f"--steps is at least {FEWEST_STEPS}, as the first step only makes the optimizer's state, "
            f"got {options.steps}."
        )
    if options.changes:
        problems.append("--changes needs a recipe, got --script. Leave it out.")
    if options.rows is not None:
        problems.append(
            "--rows needs a recipe or a model, got --script, whose rows may have any length. Leave it out: the answer "
            "has the price of a million tokens."
        )
    raise_problems(problems)
    raise_problems([*gpu_problems("estimate", options.gpu), *option_problems(options)])
    if options.accelerate_config is not None:
        check_accelerate_config(options.accelerate_config, split_count(options.gpu or "")[0])
    return options, list(arguments[len(own) + 1 :])


def _before_dashes(arguments: Sequence[str]) -> list[str]:
    return list(itertools.takewhile(lambda argument: argument != "--", arguments))


def _problem_with_script(word: str) -> str:
    if word.partition("=")[0] in ("--gpus", "--num_processes", "--nproc_per_node"):
        return (
            f"--gpu names the GPUs of a script, one for each process, got {word}. Ask for --gpu 4xrtx-4090."
        )
    if word.startswith(("recipe=", "model=")):
        return f"An estimate is of a recipe or a script, got --script and {word}. Leave one out."
    return f"--script takes the script's own arguments after `--`, got {word} before it. Write `-- {word}`."


def steps_of(options: argparse.Namespace) -> int:
    """Return the optimizer steps that a script runs."""
    return STEPS_OF_SCRIPT if options.steps is None else options.steps


def option_problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with options that do not name GPUs: files that could not be written, and the user's data."""
    yield from own_data_problems(options)
    yield from file_problems(options, "json", "plot", "snapshot")
    yield from _picture_problems(options)


def add_own_data(parser: Parser) -> None:
    """Add the options that tell how much data there is."""
    parser.add_once(
        {
            "--rows N": "rows of your data, for hours and dollars next to the price of a token; each is taken as full",
            "--epochs E": "with --rows: how often they are trained on, 1 by default",
        }
    )


def own_data_problems(options: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with ``--rows`` and ``--epochs``."""
    if options.rows is not None and not (options.rows.isdecimal() and 0 < int(options.rows) <= MOST_ROWS):
        yield f"--rows is a number of rows, from 1 to {MOST_ROWS:.0e}, got {options.rows}. Write it like --rows 2000."
    if options.epochs is None:
        return
    if options.rows is None:
        yield f"--epochs is for --rows, got {options.epochs} without it. Add --rows N, or leave it out."
    if not _is_positive(options.epochs):
        yield f"--epochs is a number above 0, got {options.epochs}. Write it like --epochs 3."


def _is_positive(word: str) -> bool:
    try:
        return 0 < float(word) <= MOST_EPOCHS
    except ValueError:
        return False


def _picture_problems(options: argparse.Namespace) -> Iterator[str]:
    snapshot = options.snapshot
    if options.plot is not None:
        from lowmem_ft.reports.plots.memory_plot import check_plot_path

        try:
            check_plot_path(Path(options.plot))
        except UserError as error:
            yield from error.problems
    if snapshot is not None and Path(snapshot).suffix != ".pickle":
        yield f"--snapshot writes a .pickle, got {snapshot}. Name it {Path(snapshot).stem}.pickle."
    for name in ("plot", "snapshot"):
        if getattr(options, name) is not None and options.gpu == ALL_GPUS:
            yield f"--{name} shows one GPU, got --gpu all. Name one, such as --gpu rtx-4090."
    if snapshot is not None and options.gpu == CPU:
        yield NO_SNAPSHOT_OF_CPU


NO_SNAPSHOT_OF_CPU = "--snapshot shows CUDA's caching allocator, got a CPU. Name a GPU: --gpu NAME."


def problems_of_model_alone(request: Request, options: argparse.Namespace) -> Iterator[str]:
    """Yield what is wrong with options that need a recipe."""
    without = f"got model={request.recipe.model.name_or_path} without"
    if options.plot is not None or options.snapshot is not None:
        yield (
            f"--plot and --snapshot show one run, {without} a recipe, for which each training method is estimated. "
            f"Name one, such as {request.with_recipe()}."
        )
    if options.changes:
        yield f"--changes needs a recipe, {without} one. Name one, such as {request.with_recipe()}."


def check_one_gpu(options: argparse.Namespace) -> None:
    """Raise an error where the longest rows are asked for on all GPUs, or together with what shows one length.

    Raises:
        UserError: if they are.
    """
    others = [name for name in ("plot", "snapshot", "rows", "changes") if getattr(options, name)]
    if options.gpu == ALL_GPUS:
        raise UserError(
            "--longest-rows searches on one GPU, got --gpu all. Name one, such as --gpu rtx-4090."
        )
    if options.gpu == CPU:
        raise UserError(ROWS_NEED_GPU)
    if others:
        raise UserError(
            f"--longest-rows tries many lengths, got --{others[0]}, which shows one. Leave one of them out."
        )


def length_argument(arguments: Sequence[str]) -> tuple[int, int, str]:
    """Return where the value of a script's argument for the tokens of a row is, the value, and what is before it.

    Args:
        arguments: the script's own.

    Returns:
        The index of the word, the tokens, and the part of the word before the number: ``--max_length=`` or nothing.

    Raises:
        UserError: if no argument names a length, or its value is no number.
    """
    for index, word in reversed([*enumerate(arguments)]):  # of several, argparse takes the last
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_").lower() not in LENGTH_ARGUMENTS:
            continue
        place = index if equals else index + 1
        if not equals:
            name, value = "", arguments[place] if place < len(arguments) else ""
        if value.isdecimal() and int(value):
            return place, int(value), f"{name}{equals}"
        raise UserError(
            f"--longest-rows changes {word.partition('=')[0]}, got {value or 'nothing'} for it. Give tokens."
        )
    raise UserError(
        "--longest-rows changes the script's own argument for the tokens of a row, got none after `--`. Name it, such "
        f"as `-- --max_length 1024`; known are {', '.join(LENGTH_ARGUMENTS)}."
    )


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft estimate",
        usage=_USAGE,
        description="Estimate what a run needs on a GPU: memory by use and phase, time, cost, and whether it fits.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_gpu(
        "a GPU of `lowmem-ft gpus`, several (8xrtx-4090), cpu, or all of them by the price of tokens; without: what "
        "this machine has",
        "NAME|all",
    )
    parser.add_once(
        {
            "--script FILE.py": "a training script of your own, or a notebook (.ipynb), in place of a recipe; its "
            "arguments follow --"
        }
    )
    add_own_data(parser)
    parser.add_once(
        {"--steps N": f"with --script: optimizer steps to run, {STEPS_OF_SCRIPT} by default"}, type=int
    )
    parser.add_once(
        {"--accelerate-config FILE": "with --script: start it as accelerate launch --config_file FILE would"}
    )
    parser.add_argument(
        "--longest-rows",
        action="store_true",
        help="search for the longest rows that fit, with all else unchanged; of a script, by the argument of its own "
        "that sets them, such as -- --max_length 1024",
    )
    parser.add_argument(
        "--changes",
        action=argparse.BooleanOptionalAction,
        help="if it does not fit, search for the cheapest changes that make it fit, which can take minutes; the "
        "default, except with --json (Ctrl-C ends the search and keeps what it has found)",
    )
    parser.add_once(
        {
            "--json FILE|-": "write the estimate as JSON; - is stdout, then JSON alone",
            "--plot FILE": "plot memory over a step: interactive .html, .svg, or .png",
            "--snapshot FILE.pickle": "write a snapshot that https://pytorch.org/memory_viz opens",
        }
    )
    parser.add_without_packages()
    parser.add_overwrite()
    return parser
