"""Commands that answers and errors print: words of this program, to be copied and run as they are."""

from __future__ import annotations

import shlex
from collections.abc import Container, Sequence

from lowmem_ft.recipe.tree import Recipe


def command_line(name: str, *settings: str, gpu: str | None = None) -> list[str]:
    """Return the words of a command, unquoted.

    Args:
        name: ``estimate``, ``plan`` and so on.
        settings: what it is about, ``recipe=NAME`` or ``model=NAME``, and every setting that the answer used.
        gpu: the device, as ``--gpu`` takes it; None: the budget's, or this machine's.
    """
    return ["lowmem-ft", name, *settings, *([] if gpu is None else ["--gpu", gpu])]


def quoted(words: Sequence[str]) -> str:
    """Return a command for the middle of a sentence: between backticks, quoted for a shell."""
    return f"`{shlex.join(words)}`"


def launched(recipe: Recipe) -> list[str]:
    """Return the words before the settings that train a recipe: torchrun starts several processes."""
    config = recipe.distributed
    plan, machines = config.plan(), config.num_machines
    if not plan.several:
        return command_line("train")
    where = ["--standalone"]
    if machines > 1:
        where = [f"--nnodes={machines}", "--node_rank=RANK", "--master_addr=FIRST_MACHINE"]
    return ["torchrun", *where, f"--nproc_per_node={plan.per_machine}", "-m", "lowmem_ft", "train"]


def without(settings: Sequence[str], keys: Container[str]) -> list[str]:
    """Return the settings whose keys are not among those, such as keys that a plan sets otherwise."""
    return [setting for setting in settings if setting.partition("=")[0] not in keys]
