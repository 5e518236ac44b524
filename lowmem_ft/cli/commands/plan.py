"""``lowmem-ft plan``: choose the memory knobs with which a step is fastest inside a budget, and say why."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.asking import libraries_loading, settled
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.cli.estimating.estimate_options import add_own_data, own_data_problems
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.packages import may_have_gpu

if TYPE_CHECKING:
    from lowmem_ft.recipe.request.request import Request

_USAGE = (
    "lowmem-ft plan recipe=NAME|PATH | model=NAME [key=value ...] [--gpu NAME]\n"
    "       [--max-gpus N] [--rows N [--epochs E]] [--write FILE.yaml]\n"
    "       [--json FILE|-] [--without-packages] [--overwrite]"
)
_EXAMPLES = """\
examples:
  lowmem-ft plan model=llama-3.1-8b budget=24GiB budget.host=64GiB
  lowmem-ft plan recipe=7b-bf16 --gpu rtx-4090 --write my.yaml
  lowmem-ft plan recipe=8b-bf16 --gpu 8xrtx-4090
  lowmem-ft plan model=llama-3.1-70b --gpu h100-80gb --max-gpus 8
  lowmem-ft plan recipe=7b-bf16 budget=8GiB 'plan.keep=[optimizer.state]' 'plan.allow=[lora,qlora]'

A plan keeps the rows of a step and the mathematics, except for unbiased rounding. plan.allow=[...] names what it may
give up, the least important first, and plan.keep=[...] the keys that it must not change. A model alone is planned for
steps of 16 rows of 2048 tokens. With --gpu 8xNAME each GPU takes the recipe's batch, with --max-gpus they share the
rows of a step. Ctrl-C ends the search and keeps the best plan so far.

Exit codes: 0 a plan that fits; 3 nothing fits; 2 the input is at fault."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Plan what the settings describe.

    Args:
        arguments: ``recipe=NAME|PATH`` or ``model=NAME``, ``key=value`` settings and options.

    Returns:
        The exit code: 0 if the plan fits, else 3.
    """
    options, words = _parser().parse_options(arguments)
    request = settled(
        "plan",
        words,
        options.gpu,
        problems=_problems(options),
        further=lambda request: _refuse_no_device(request, arguments),
    )
    with libraries_loading():
        import torch

        from lowmem_ft.cli.answers.plan import plan_memory

    if _is_open(request) and not torch.cuda.is_available():
        raise UserError(_for_no_device(arguments))
    return plan_memory(request, options)


def _is_open(request: Request) -> bool:
    """Return whether neither a GPU nor a budget is named."""
    recipe = request.recipe
    return request.gpu is None and recipe.budget.device is None and not recipe.training.use_cpu


def _refuse_no_device(request: Request, arguments: Sequence[str]) -> None:
    if _is_open(request) and not may_have_gpu():
        raise UserError(_for_no_device(arguments))


def _for_no_device(arguments: Sequence[str]) -> str:
    """Return the error for neither GPU nor budget: planning for the processor takes minutes, and few users want it."""
    from lowmem_ft.recipe.command_lines import command_line, quoted

    on_gpu = quoted(command_line("plan", *arguments, gpu="rtx-4090"))
    within = quoted(command_line("plan", *arguments, "budget=24GiB"))
    return (
        f"A plan is for a GPU or a budget, got neither, and this machine has no GPU. Name a GPU, such as {on_gpu} "
        f"(`lowmem-ft gpus` lists them), or a budget, such as {within}; --gpu cpu plans for this machine's processor."
    )


def _problems(options: argparse.Namespace) -> Iterator[str]:
    yield from own_data_problems(options)
    if options.max_gpus not in (None, "1", "2", "4", "8"):
        yield (
            f"--max-gpus is a number of GPUs, 1, 2, 4 or 8, got {options.max_gpus}. Try --max-gpus 8, which tries the "
            "smaller numbers first, or leave it out."
        )
    yield from file_problems(options, "write", "json")
    if options.write is not None and Path(options.write).suffix not in (".yaml", ".yml"):
        yield f"--write names a recipe file, which ends in .yaml, got {options.write}."


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft plan",
        usage=_USAGE,
        description="Choose the memory settings with which a step is fastest inside a budget of device and host "
        "memory, and say why.",
        epilog=_EXAMPLES,
        allow_abbrev=False,
    )
    parser.add_gpu(
        "a GPU of `lowmem-ft gpus`, or cpu; without: this machine's GPU, or one of the budget's size"
    )
    parser.add_once(
        {
            "--max-gpus N": "if one GPU is not enough, try 2, 4, ... up to N of them, at most 8, that share the recipe",
            "--write FILE.yaml": "write the plan as a recipe that is ready to train",
            "--json FILE|-": "write the plan as JSON; - is stdout, then JSON alone",
        }
    )
    add_own_data(parser)
    parser.add_without_packages()
    parser.add_overwrite()
    return parser
