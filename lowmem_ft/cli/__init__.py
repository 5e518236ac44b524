"""The command ``lowmem-ft``: one file per subcommand, each imported only when it is called."""

from __future__ import annotations

import contextlib
import importlib
import shlex
from collections.abc import Sequence

import lowmem_ft
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError, did_you_mean
from lowmem_ft.foundation.system.launch_variables import alone

COMMANDS = {
    "train": "fine-tune a model: train recipe=NAME|PATH [key=value ...]",
    "estimate": "what a run needs, and which GPUs it fits: estimate model=NAME",
    "plan": "choose the memory settings for a budget: plan model=NAME budget=24GiB",
    "rehearse": "the complete run without a GPU: rehearse recipe=NAME --gpu NAME",
    "data": "what the model reads, and what is wrong: data recipe=NAME data=FILE",
    "report": "results of runs, with estimated and measured memory: report RUN_DIR",
    "evaluate": "loss and perplexity of a model, an adapter or a run: evaluate MODEL data=X",
    "chat": "talk to a model, an adapter or a run: chat MODEL",
    "merge": "add a LoRA adapter to its base model: merge RUN|ADAPTER OUT_DIR",
    "export": "a plain, 4-bit or GGUF model: export RUN_DIR OUT_DIR --gguf q8_0",
    "ui": "estimates and plans on a page in the browser of this machine",
    "measure-host": "how fast this host issues work, for estimates of its GPU",
    "gpus": "list the GPUs with their memory, rates and prices, or show one",
    "models": "list the models whose architecture ships here, or show one",
    "recipes": "list the shipped recipes, or print one with every key explained",
    "docs": "list the pages of documentation, or print one",
}

_LAUNCHED = ("train",)
"""Commands that may be one of several processes; any other always speaks, whatever variables a launch left behind."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Run one subcommand.

    Args:
        arguments: the arguments after the program's name.

    Returns:
        The exit code: 0 done, 2 the user's input is at fault, 3 it does not fit the budget, or may not, 4 the data has
        something that would be lost or learnt wrongly, 130, 143, 129 or 138 stopped by Ctrl-C,
        SIGTERM, SIGHUP or SIGUSR1.
    """
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    if arguments[0] == "help":  # as other programs take it
        arguments = [*arguments[1:2], "--help"]
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        raise UserError(_no_command(arguments))
    command = parser.parse_args(arguments[:1]).command
    with contextlib.nullcontext() if command in _LAUNCHED else alone():
        return importlib.import_module(f"lowmem_ft.cli.commands.{command.replace('-', '_')}").main(
            arguments[1:]
        )


def _no_command(arguments: Sequence[str]) -> str:
    first = arguments[0]
    if "=" in first:
        names = {argument.partition("=")[0] for argument in arguments}
        # A model alone can be estimated; training takes a recipe, or a budget and data, too.
        command = "train" if "recipe" in names else "estimate" if "model" in names else "train recipe=demo"
        return (
            f"The first argument is a command, got {first}. Write for instance `lowmem-ft {command} "
            f"{shlex.join(arguments)}`."
        )
    return (
        f"Unknown command {first!r}.{did_you_mean(first, COMMANDS)} Commands: {', '.join(COMMANDS)}; `lowmem-ft "
        "--help` says what each does."
    )


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft",
        description=lowmem_ft.__doc__,
        epilog="commands:\n"
        + "\n".join(f"  {name:<13}{what}" for name, what in COMMANDS.items())
        + "\n\nStart with what fits: `lowmem-ft estimate model=NAME --gpu all`, or `lowmem-ft recipes`. `lowmem-ft "
        "COMMAND --help` explains a command; `lowmem-ft docs` lists pages by question.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"lowmem-ft {lowmem_ft.__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    return parser
