"""The ranks of a run: what its processes tell each other, how they share a model, and how they fail together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lowmem_ft.foundation.errors import UserError, user_error
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.weights_on_disk import weights_in_files
from lowmem_ft.techniques.distributed.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.training.processes.gradient_averaging import (
    average_gradients,
    copy_from_main_process,
    ddp_takes,
    sum_gradients,
)
from lowmem_ft.training.processes.rendezvous import RankInfo, refusals


class Ranks:
    """A single process. Ranks of several processes override all communication.

    Args:
        device: the device of this process.
        distributed: how the processes share the model.
        num_processes: all processes that train one model.
        process_index: the rank of this one.
    """

    def __init__(
        self,
        device: torch.device,
        distributed: DistributedConfig = ONE_PROCESS,
        num_processes: int = 1,
        process_index: int = 0,
    ) -> None:
        self.plan = distributed.plan(num_processes, process_index)
        self._device = device
        self._device_of_rows = torch.device("cpu") if distributed.cpu_offload else device
        self._rows: dict[nn.Parameter, torch.Tensor] = {}
        self._sharded: FullySharded | None = None
        self._reduce_after_backward: Callable[[Iterable[nn.Parameter]], object] = lambda parameters: None

    @property
    def num_processes(self) -> int:
        """Number of all processes that train one model."""
        return self.plan.num_processes

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self.plan.rank

    @property
    def is_main(self) -> bool:
        """True in the main process, rank 0, which writes every file that is written once."""
        return self.process_index == 0

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, element by element."""
        return value

    def max(self, value: int) -> int:
        """Return the maximum over all processes; for flags, whether any is set."""
        return value

    def gather(self, value: list[Any]) -> list[Any]:
        """Return the concatenated lists of all processes."""
        return value

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this: a barrier."""

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise one process's user error in all processes, so that none waits for a lost one.

        Raises:
            UserError: this process's own error, or that of another.
        """
        own: UserError | None = None
        try:
            yield
        except UserError as error:
            own = error
        if self.max(own is not None):
            problems = () if own is None else own.problems
            said = list(refusals(self.gather([RankInfo(socket.gethostname(), problems)])))
            raise user_error(UserError if own is None else type(own), tuple(said)) from own

    @contextlib.contextmanager
    def reading_weights(self, config: ModelConfig, host: HostMemory | None) -> Iterator[torch.device]:
        """Yield the device that weights are read to: the process's own, or the CPU if they stay in ``host``."""
        if host is None:
            yield self._device
        else:
            with weights_in_files(host):
                yield torch.device("cpu")

    def shard(self, parts: ModelParts, config: DistributedConfig) -> FullySharded | None:
        """Shard the model's parameters over the processes if ``distributed.strategy`` is fsdp2; else return None."""
        return None

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and optimizer that the step calls, wrapped if there are several processes."""
        return model, optimizer

    def goes_without_ddp(self, model: nn.Module, *, takes_mean: bool) -> bool:
        """Check whether DDP refuses this model's gradients; if so, reduce them after backward from now on.

        Args:
            model: the model, a copy in each process.
            takes_mean: whether each loss will be multiplied by the number of processes; else the losses are parts of
                one.
        """
        if self.num_processes == 1 or ddp_takes(model):
            return False
        self._reduce_after_backward = average_gradients if takes_mean else sum_gradients
        copy_from_main_process(model)
        return True

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum finished gradients over all processes, unless the prepared model has done so in backward."""
        self._reduce_after_backward(parameters)

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; gradients need to be reduced only in the last one of a window."""
        return contextlib.nullcontext()
