"""The surroundings of the training step: its device, its model, its gradients and the other processes.

The step reaches everything outside itself through a :class:`Runtime`, so that a real run and a trace execute the same
step. It has three parts: the device is :class:`Runtime` itself, with
:class:`~lowmem_ft.training.mixed_precision.MixedPrecision`; the
:class:`~lowmem_ft.training.distributed.processes.Processes` are one alone; and in a whole run
(:class:`~lowmem_ft.training.run_runtime.RunRuntime`) there are
:class:`~lowmem_ft.training.checkpoints.run_files.RunFiles`. Each implements the plain case, and an implementation
overrides what differs: ``accelerate_runtime.py`` for several processes, ``planning/estimator/runtime.py`` for traces.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.master_weights import MasterWeights
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.techniques.distributed.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.training.distributed.gradient_averaging import (
    average_gradients,
    copy_from_main_process,
    ddp_takes,
    sum_gradients,
)
from lowmem_ft.training.distributed.processes import Processes
from lowmem_ft.training.mixed_precision import MixedPrecision


class Runtime(MixedPrecision, Processes, ABC):
    """Device, model, precision, gradients and the other processes, as the training step sees them.

    Args:
        mixed_precision: the type of the step's autocast: ``no``, ``bf16`` or ``fp16``.
        device: the device of the step.
        distributed: how the processes share the model.
    """

    def __init__(
        self, mixed_precision: str, device: torch.device, distributed: DistributedConfig = ONE_PROCESS
    ) -> None:
        super().__init__(mixed_precision, device)
        self._is_sharded = distributed.strategy == "fsdp2"
        self._device_of_rows = torch.device("cpu") if distributed.cpu_offload else self.device
        self._rows: dict[nn.Parameter, torch.Tensor] = {}
        self._sharded: FullySharded | None = None
        self._reduce_after_backward: Callable[[Iterable[nn.Parameter]], object] = lambda parameters: None

    @abstractmethod
    def load_config(self, config: ModelConfig) -> PretrainedConfig:
        """Return the model's architecture; a trace may take it from the catalogue, as it needs no weights."""

    @abstractmethod
    def load_model(
        self,
        config: ModelConfig,
        hf_config: PretrainedConfig,
        *,
        attn_implementation: str,
        seed: int,
        host: HostMemory | None = None,
    ) -> PreTrainedModel:
        """Return the model on the device or in ``host``, with weights from the checkpoint, or only sized in a trace."""

    @abstractmethod
    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Return the checkpoint's weights on the host if they are more precise than the model's; None in a trace."""

    @abstractmethod
    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return memory for offloaded tensors, most of them in files of ``folder`` if given; unlimited in a trace."""

    @abstractmethod
    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the learning rate schedule for ``num_training_steps`` optimizer steps; constant in a trace."""

    def shard(self, parts: ModelParts, config: DistributedConfig) -> FullySharded | None:
        """Shard the model's parameters over the processes if ``distributed.strategy`` is fsdp2; else return None."""
        return None

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and optimizer that the step calls: wrapped for several processes and for loss scaling."""
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

    @abstractmethod
    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """Return the values of 0-d tensors, with one device sync: the only one of a step, before the update."""
