"""Memory of a script's ranks on this processor, over gloo, next to the estimate of one of as many.

    PYTHONPATH=scripts python -m measuring.real_ranks 2 train.py ARGS...

prints what ``real_script.py`` prints, for each rank. Two things are gloo's own, and are kept out of the numbers: it
frees tensors in threads that the profiler does not see, so each collective waits here until it has let go of them; and
it copies what a reduce-scatter takes, so that is a sum in place here, of which each rank takes its part.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives
from measuring.real_script import REAL, RealScript, compare, measure
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import distributed_c10d

SECONDS_TO_LET_GO = 0.005
"""Seconds after a collective in which gloo's thread drops its tensors: a hundred times what it takes."""

_COLLECTIVES = ("all_gather_into_tensor", "all_gather_single", "all_reduce", "broadcast")
_SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


def run_ranks_for_real(
    num_processes: int, script: str, arguments: Sequence[str] = (), more: Mapping[str, str] | None = None
) -> list[RealScript]:
    """Run a script in several new processes on this processor, as torchrun would.

    Args:
        num_processes: their number.
        script: its file.
        arguments: what it finds in ``sys.argv``.
        more: further variables of its environment.

    Raises:
        RuntimeError: if one fails, with the end of its errors.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(num_processes):
        launched = {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), f"{rank}"),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), f"{num_processes}"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{port}",
        }
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(script), *arguments],
                env={**os.environ, **REAL, "CUDA_VISIBLE_DEVICES": "", **(more or {}), **launched},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = [(rank, *rank.communicate()) for rank in ranks]
    for rank, _, errors in ended:
        if rank.returncode:
            raise RuntimeError(f"{script} failed:\n{errors[-3000:]}")
    return [RealScript(**json.loads(said.splitlines()[-1])) for _, said, _ in ended]


_RANK = f"""
import sys
sys.path[:0] = [{os.path.dirname(os.path.dirname(os.path.abspath(__file__)))!r}]
from measuring.real_ranks import measure_rank
measure_rank(sys.argv[1], sys.argv[2:])
"""


def measure_rank(script: str, arguments: list[str]) -> None:
    """Run a script in this process, one of several, and print its memory as JSON."""
    for module in (dist, distributed_c10d):
        for name in filter(lambda name: hasattr(module, name), _COLLECTIVES):
            setattr(module, name, _let_go(getattr(module, name)))
        for name in filter(lambda name: hasattr(module, name), _SCATTERS):
            setattr(module, name, _scatter)
    dist._broadcast_coalesced = _broadcast_flat
    functional: Any = torch.distributed._functional_collectives
    functional.wait_tensor = _wait_long(functional.wait_tensor)
    print(json.dumps(vars(measure(script, arguments))))


def _let_go(collective: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        is_async = kwargs.pop("async_op", False)
        work = collective(*args, async_op=True, **kwargs)
        if work is not None:
            work.wait()
            time.sleep(SECONDS_TO_LET_GO)
        return work if is_async else None

    return call


def _wait_long(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Return a wait for a ring's exchange, whose tensors the ring holds until then."""

    def call(tensor: Tensor) -> Tensor:
        arrived = wait(tensor)
        time.sleep(SECONDS_TO_LET_GO)
        return arrived

    return call


def _scatter(
    output: Tensor, input: Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    work = dist.all_reduce(input, op, group, async_op=True)
    own = input.chunk(dist.get_world_size(group))[dist.get_rank(group)]
    output.copy_(own.view_as(output))
    return work if async_op else None


def _broadcast_flat(group: Any, tensors: Sequence[Tensor], num_bytes: int, source: int = 0) -> None:
    """Send small models' weights as torch's C++ does: the tensors of a type together."""
    for dtype in {tensor.dtype: None for tensor in tensors}:
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = _flatten_dense_tensors(alike)
        dist.broadcast(flat, source, group=group)
        for tensor, received in zip(alike, _unflatten_dense_tensors(flat, alike), strict=True):
            tensor.copy_(received)


def main() -> None:
    """Compare each rank with the estimate of the first one."""
    from lowmem_ft.planning.script_runs import estimate_script

    number, script, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    found = estimate_script(script, arguments, gpu=f"{number}xcpu")
    for rank, real in enumerate(run_ranks_for_real(number, script, arguments)):
        print(f"rank {rank}")
        compare(real, found)


if __name__ == "__main__":
    main()
