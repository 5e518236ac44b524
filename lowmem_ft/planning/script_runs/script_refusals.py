"""Refusal of what an estimate of a script cannot follow: a keyboard, other processes, engines that cannot be traced.

Where a script itself starts as many processes as there are GPUs, its function is called as one of them calls it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch.multiprocessing

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.foundation.upstream.patches import replace
from lowmem_ft.planning.script_runs.launch import Launch


class _ScriptRefusal(UserError):
    """The script does what an estimate cannot follow."""


def refuse_what_cannot_be(undo: contextlib.ExitStack, launch: Launch) -> None:
    """Refuse all of it until a stack is undone.

    Args:
        undo: undoes it.
        launch: which of how many processes the script runs in.
    """
    replace(undo, builtins, "input", _refuse_to_ask)
    replace(undo, sys, "stdin", _NoKeyboard())
    for module in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        for name in ("start_processes", "spawn"):
            replace(undo, module, name, functools.partial(_spawn_here, launch))
    for owner in ("launchers", ""):
        launched = functools.partial(_launch_here, launch)
        wrap_when_imported(undo, "accelerate", owner, "notebook_launcher", launched)
    for module, owner, name in (
        ("deepspeed", "", "initialize"),
        ("accelerate.utils.dataclasses", "DeepSpeedPlugin", "__post_init__"),
    ):
        wrap_when_imported(undo, module, owner, name, _refuse_deepspeed)
    wrap_when_imported(
        undo, "transformers.training_args", "TrainingArguments", "__post_init__", _without_deepspeed
    )
    wrap_when_imported(
        undo,
        "transformers.distributed.configuration_utils",
        "DistributedConfig",
        "__init__",
        _refuse_parallel,
    )
    of_axes = functools.partial(_with_known_axes, launch)
    wrap_when_imported(undo, "accelerate.parallelism_config", "ParallelismConfig", "__post_init__", of_axes)


def _refuse_to_ask(*args: Any) -> NoReturn:
    raise _ScriptRefusal(
        "A script that is estimated gets no input, but it called input() or read stdin. Pass the values as arguments, "
        "after `--`."
    )


class _NoKeyboard(io.TextIOBase):
    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def read(self, size: int | None = -1) -> str:
        _refuse_to_ask()

    readline = read  # type: ignore[assignment]


def _spawn_here(
    launch: Launch, function: Callable[..., Any], args: Any = (), nprocs: int = 1, *others: Any, **kwargs: Any
) -> None:
    """Call what each process of ``torch.multiprocessing.spawn`` would call, as the one that is estimated."""
    _check_number(nprocs, launch)
    function(launch.process_index, *args)


def _launch_here(
    launch: Launch,
    start: object,
    function: Callable[..., Any],
    args: Any = (),
    num_processes: Any = None,
    **kwargs: Any,
) -> None:
    _check_number(num_processes or launch.num_processes, launch)
    function(*args)


def _check_number(number: int, launch: Launch) -> None:
    if number == launch.num_processes:
        return
    if launch.num_processes > 1:
        raise _ScriptRefusal(
            f"There are {launch.num_processes} GPUs with one process each, but the script starts {number} processes. "
            "Let it start as many as torch.cuda.device_count()."
        )
    raise _ScriptRefusal(
        "A script is estimated in one process, on one GPU, but it starts other processes to train in. Call their "
        "function from a separate script, in one process; or name as many GPUs, such as --gpu 2xrtx-4090."
    )


def _without_deepspeed(check: Callable[[Any], None], arguments: Any) -> None:
    if arguments.deepspeed:
        _refuse_deepspeed()
    check(arguments)


def _refuse_deepspeed(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ScriptRefusal(
        "DeepSpeed's engine cannot be traced, which the script asks for. Estimate it with FSDP2 (fsdp_config, or "
        "--accelerate-config FILE), which shards what ZeRO-3 shards."
    )


def _refuse_parallel(*args: Any, **kwargs: Any) -> NoReturn:
    raise _ScriptRefusal(
        "Weights that from_pretrained spreads over GPUs (tp_plan, distributed_config) are not followed by an estimate, "
        "which the script asks for. Estimate it with FSDP2 (fsdp_config, or --accelerate-config FILE)."
    )


def _with_known_axes(launch: Launch, check: Callable[[Any], None], config: Any) -> None:
    """Let Accelerate check its parallel axes, and refuse those that cannot be traced, or that do not fit the GPUs."""
    check(config)
    axes = {
        name: getattr(config, name)
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
        if getattr(config, name, 1) > 1
    }
    words = ", ".join(f"{name}={size}" for name, size in axes.items())
    if axes.keys() & {"tp_size", "cp_size", "sp_size"}:
        raise _ScriptRefusal(
            f"Tensor, context and sequence parallelism of Accelerate are not followed by an estimate, got {words}. "
            "Estimate the script with dp_shard_size alone, which is FSDP2."
        )
    if axes and math.prod(axes.values()) != launch.num_processes:
        raise _ScriptRefusal(
            f"The axes of a ParallelismConfig multiply to the number of processes, got {words} for "
            f"{launch.num_processes}, one on each GPU. Correct them, or name as many GPUs."
        )
