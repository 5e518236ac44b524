"""The training step's surroundings on a virtual machine: what ``AccelerateRuntime`` is to a real one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lowmem_ft.budget import Budget
from lowmem_ft.errors import ModelError
from lowmem_ft.memory.host_memory import HostMemory
from lowmem_ft.models import (
    MasterWeights,
    ModelConfig,
    compute_dtype,
    log_quantization,
    quantization_config,
    quantize_linear_layers,
    weights_dtype,
)
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.techniques.config import DistributedConfig
from lowmem_ft.training.mixed_precision import MixedPrecision
from lowmem_ft.virtual_gpu.machine import VirtualMachine
from lowmem_ft.virtual_gpu.recorder import Recorder


def model_on_meta(
    config: ModelConfig, hf_config: PretrainedConfig, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """The model's modules and shapes, without weights.

    Raises:
        ModelError: if the config lacks what its architecture needs.
    """
    return _model_from_config(config, hf_config, attn_implementation, torch.device("meta"))


def _model_from_config(
    config: ModelConfig, hf_config: PretrainedConfig, attn_implementation: str, device: torch.device
) -> PreTrainedModel:
    try:
        with device:
            model = AutoModelForCausalLM.from_config(
                hf_config,
                dtype=weights_dtype(config, hf_config),
                attn_implementation=attn_implementation,
                trust_remote_code=config.trust_remote_code,
            )
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(
            f"The config of {config.name_or_path} does not make a {hf_config.model_type} model: "
            f"{type(error).__name__} {error}. "
            "Compare its config.json with that of a published model of the family."
        ) from error
    return cast(PreTrainedModel, model)


def _bytes_of_weights(model: PreTrainedModel) -> int:
    """As ``from_pretrained`` counts them: half a byte for a 4-bit weight, one for an 8-bit one, no scales."""
    bytes_by_type = {"Params4bit": 0.5, "Int8Params": 1}
    return int(
        sum(
            parameter.numel() * bytes_by_type.get(type(parameter).__name__, parameter.element_size())
            for parameter in model.parameters()
        )
    )


@dataclass(frozen=True)
class VirtualFiles:
    """Files on a disk without end, which the machine's timeline shows as such.

    Args:
        folder: by which the recipe calls it; nothing is made there.
        recorder: of the machine.
    """

    folder: Path
    recorder: Recorder

    def check(self, num_bytes: int, purpose: str) -> None:
        """There is room."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Bytes without values."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.recorder.mark_place(memory, "disk")
        return memory


class VirtualRuntime(MixedPrecision):
    """A :class:`lowmem_ft.training.runtime.Runtime` for traces: one process, no values.

    Args:
        machine: where the model goes.
        config: for its precision.
    """

    def __init__(self, machine: VirtualMachine, config: TrainingConfig) -> None:
        super().__init__(config.mixed_precision, machine.device)
        self.machine = machine
        self.num_processes = 1

    def load_model(
        self,
        config: ModelConfig,
        hf_config: PretrainedConfig,
        *,
        attn_implementation: str,
        seed: int,
        host: HostMemory | None = None,
    ) -> PreTrainedModel:
        """Build the model from its config alone and give every tensor a storage on the machine."""
        device = self.device if host is None else torch.device("cpu")
        if config.weights == "random":
            # Initialised where they will be: a tied head has weights of its own until the end.
            model = _model_from_config(config, hf_config, attn_implementation, device)
            self._quantize(model, config, hf_config)
        else:
            with _disable_current_modes():
                model = model_on_meta(config, hf_config, attn_implementation)
                self._quantize(model, config, hf_config)
            if host is None:
                self.machine.warm_up_allocator(_bytes_of_weights(model))
        model = self.machine.place(model, device)
        if host is not None and host.files_for("parameter") is not None:
            for parameter in model.parameters():
                self.machine.recorder.mark_place(parameter, "disk")
        if config.quantization != "none":
            log_quantization(model, config.quantization)
        return model

    def _quantize(self, model: PreTrainedModel, config: ModelConfig, hf_config: PretrainedConfig) -> None:
        dtype = compute_dtype(weights_dtype(config, hf_config), self.mixed_precision)
        bits = quantization_config(config, dtype)
        if bits is not None:
            quantize_linear_layers(model, bits)

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """None: they would pass through the host chunk by chunk, and leave nothing."""
        return None

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """As much as is asked for: the estimate says whether it is within the budget."""
        files = None if folder is None else VirtualFiles(Path(folder), self.machine.recorder)
        return HostMemory(
            self.device, is_limited=False, files=files, on_allocation=self.machine.take_host_memory
        )

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """None that changes anything: a learning rate is a value, and a trace has none."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def shard(self, model: nn.Module, config: DistributedConfig) -> None:
        """One process has all of it."""

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """One process wraps nothing."""
        self.machine.mark_state(optimizer)
        return model, optimizer

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """There is one process."""

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Notes where each micro-batch begins and ends."""
        return self.machine.micro_batch()

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """The value: there is one process."""
        return value

    def is_finite(self, value: torch.Tensor) -> bool:
        """A trace has no values; it follows the step that succeeds."""
        torch.isfinite(value)
        self.machine.work.synchronize()
        return True

    def loss_scale_may_overflow(self) -> bool:
        """Not in a step that succeeds."""
        return False
