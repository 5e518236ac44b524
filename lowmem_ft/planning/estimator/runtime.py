"""The training step's runtime on a tracing machine: the counterpart of ``AccelerateRuntime`` on a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.local_shards import rows_of
from lowmem_ft.foundation.tensors.logical_size import logical_numel
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import compute_dtype, load_model_config, other_parts_of, weights_dtype
from lowmem_ft.models.loading import model_of_config
from lowmem_ft.models.master_weights import MasterWeights
from lowmem_ft.models.new_tokens import set_new_rows
from lowmem_ft.models.other_parts import set_other_parts
from lowmem_ft.models.quantizing.quantization import check_quantization, quantization_config, quantize_weights
from lowmem_ft.models.quantizing.stored_quantizers import pack_as_stored, packed_format
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.techniques.distributed.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded, enable_fsdp2
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.training.runtime import Runtime
from lowmem_ft.virtual_gpu.distributed.data_parallel import TracedDataParallel
from lowmem_ft.virtual_gpu.recording.recorder import Recorder
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


def model_on_meta(
    config: ModelConfig, hf_config: PretrainedConfig, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """Return the model's modules and shapes, without weights."""
    return model_of_config(config, hf_config, attn_implementation, torch.device("meta"))


def pack_as_loaded(
    model: PreTrainedModel, config: ModelConfig, hf_config: PretrainedConfig, mixed_precision: str = "no"
) -> None:
    """Give a model's weights the form that loading gives them: fewer bits, or those of the checkpoint's files."""
    bits = quantization_config(config, compute_dtype(weights_dtype(config, hf_config), mixed_precision))
    if bits is not None:
        quantize_weights(model, bits)
    elif config.quantization != "dequantize" and packed_format(hf_config) is not None:
        pack_as_stored(model, hf_config)


def bytes_of_weights(model: PreTrainedModel) -> int:
    """Return the bytes of weights as ``from_pretrained`` counts them.

    Half a byte for a 4-bit weight, one for an 8-bit one, no scales.
    """
    bytes_by_type = {"Params4bit": 0.5, "Int8Params": 1}
    return int(
        sum(
            logical_numel(parameter) * bytes_by_type[kind]
            if (kind := type(parameter).__name__) in bytes_by_type
            else parameter.nbytes
            for parameter in model.parameters()
        )
    )


@dataclass(frozen=True)
class _VirtualFiles:
    """Files on a disk of unlimited size, which the machine's timeline shows as such.

    Args:
        folder: the recipe's name for it; nothing is created there.
        recorder: the recorder of the machine.
    """

    folder: Path
    recorder: Recorder

    def check(self, num_bytes: int, purpose: str) -> None:
        """Accept any size: there is always room."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return bytes without values."""
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self.recorder.mark_place(memory, "disk")
        return memory


class VirtualRuntime(Runtime):
    """The surroundings of a traced step: one process, possibly of several, and no values.

    Args:
        machine: where the model goes.
        config: for its precision.
        distributed: what the processes share.
        process_index: the rank that is traced.
        device: the device by which callers name the machine; None: its own.
    """

    def __init__(
        self,
        machine: TracingMachine,
        config: TrainingConfig,
        distributed: DistributedConfig = ONE_PROCESS,
        process_index: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(config.mixed_precision, device or machine.device, distributed)
        self.machine = machine
        self.num_processes = distributed.num_processes or 1
        self.process_index = process_index

    def load_config(self, config: ModelConfig) -> PretrainedConfig:
        """Load the config from the catalogue if that has the model, gated ones included, without a network."""
        return load_model_config(config, architecture_only=True)

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
        keeps_rows = self._is_sharded and (config.weights != "random" or device.type != "cpu")
        if config.weights == "random" and not keeps_rows:
            # Initialised where they will be: a tied head has its own weights until the end.
            model = model_of_config(config, hf_config, attn_implementation, device)
            pack_as_loaded(model, config, hf_config, self.mixed_precision)
        else:
            with _disable_current_modes():
                model = model_on_meta(config, hf_config, attn_implementation)
                pack_as_loaded(model, config, hf_config, self.mixed_precision)
            if host is None and not keeps_rows:
                self.machine.warm_up_allocator(bytes_of_weights(model))
        model = self.machine.place(model, device, self._without_memory if keeps_rows else None)
        set_other_parts(model, other_parts_of(config))
        if config.new_tokens:
            num_rows = len(model.get_input_embeddings().weight)  # type: ignore[union-attr,arg-type]
            set_new_rows(model, range(num_rows - len(config.new_tokens), num_rows))
        if keeps_rows:
            self._keep_rows(model)
        if host is not None and host.files_for("parameter") is not None:
            for parameter in model.parameters():
                self.machine.recorder.mark_place(parameter, "disk")
        if config.quantizes:
            check_quantization(model, config)
        return model

    def _without_memory(self, weight: nn.Parameter) -> torch.Tensor:
        """Return a stand-in of a weight's shape, as ``weights_in_shards`` leaves where this process keeps its rows."""
        self.machine.recorder.mark_place(
            weight, "host"
        )  # one that was quantised: a run quantises where it reads the weight
        return torch.empty((), dtype=weight.dtype, device=self.device).expand(weight.shape)

    def _keep_rows(self, model: PreTrainedModel) -> None:
        for weight in model.parameters():
            first, end = rows_of(len(weight), self.num_processes, self.process_index)
            shape = (end - first, *weight.shape[1:])
            self._rows[weight] = torch.empty(shape, dtype=weight.dtype, device=self._device_of_rows)
            self.machine.mark(self._rows[weight], "parameter", of=weight)

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Return None: master weights would pass through the host chunk by chunk, and leave nothing."""
        return None

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return host memory without a limit: the estimate says whether it is within the budget."""
        files = None if folder is None else _VirtualFiles(Path(folder), self.machine.recorder)
        return HostMemory(
            self.device, is_limited=False, files=files, on_allocation=self.machine.take_host_memory
        )

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a schedule that changes nothing: a learning rate is a value, and a trace has none."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def shard(self, parts: ModelParts, config: DistributedConfig) -> FullySharded | None:
        """Call :func:`enable_fsdp2`, for several processes of which one exists."""
        if self._is_sharded:
            self.machine.attribution.name_modules(
                parts.model
            )  # with its adapters, while its parameters are whole
            mesh = init_device_mesh(self.device.type, (self.num_processes,))
            around = self.machine.attribution.within
            self._sharded = enable_fsdp2(parts, config, mesh, self._rows, around)
            self.machine.attribution.name_modules(parts.model)
        return self._sharded

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model as Accelerate does, where there are several processes and each holds all of it."""
        self.machine.mark_state(optimizer)
        if self.num_processes == 1 or self._is_sharded or self.goes_without_ddp(model, takes_mean=False):
            return model, optimizer
        wrapped = TracedDataParallel(model, self.device, self.machine.mark)
        self.machine.attribution.takes_for_outermost(wrapped)
        return wrapped, optimizer

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Record where each micro-batch begins and ends; gradients are exchanged as in a run."""
        with contextlib.ExitStack() as within:
            within.enter_context(self.machine.micro_batch())
            if self._sharded is not None:
                self._sharded.begin_micro_batch(is_last=is_last)
            elif isinstance(model, TracedDataParallel) and not is_last:
                within.enter_context(model.no_sync())
            yield
            if isinstance(model, TracedDataParallel) and is_last:
                model.finish()
        if self._sharded is not None:
            self.machine.mark_weights(model)  # FSDP2 pads the last rows, and sets gradients, by itself

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """All-reduce the value, or return it unchanged in a single process."""
        if self.num_processes > 1:
            torch.distributed.all_reduce(value)
        return value

    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """Return zeros: a trace has no values, and it follows the step that succeeds."""
        stacked = torch.stack([value.float() for value in values])
        self.machine.recorder.orderings.host_reads(stacked)
        return (0.0,) * len(values)

    def loss_scale_may_overflow(self) -> bool:
        """Return False: the traced step succeeds."""
        return False
