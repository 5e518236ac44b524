"""The training step's runtime on a tracing machine: the counterpart of ``accelerate_runtime.py`` on a real one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.runtimes.values import Values
from lowmem_ft.training.step.budget_cap import THIS_HOST, Host
from lowmem_ft.training.step.machine import Machine, Sent
from lowmem_ft.virtual_gpu.costs.data_parallel import TracedDataParallel
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


class VirtualMachine(Machine):
    """A tracing machine, as the step sees it.

    Args:
        tracing: holds the tensors, and records what happens to them.
        mixed_precision: the type of the step's autocast.
        device: the device by which callers name the machine; None: its own.
        host: source of the host memory readings that are compared with budgets.
    """

    def __init__(
        self,
        tracing: TracingMachine,
        mixed_precision: str,
        device: torch.device | None = None,
        host: Host = THIS_HOST,
    ) -> None:
        super().__init__(device or tracing.device, mixed_precision, host=host)
        self._tracing = tracing

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return host memory without a limit: the estimate says whether it is within the budget."""
        files = None if folder is None else _VirtualFiles(Path(folder), self._tracing.recorder)
        return HostMemory(
            self._tracing.device, is_limited=False, files=files, on_allocation=self._tracing.take_host_memory
        )

    def fetch(self, sent: Sent) -> tuple[float, ...]:
        """Return zeros: a trace has no values. Finite zeros make the step take its normal path."""
        if sent.end is not None:
            sent.end.synchronize()
        self._tracing.recorder.orderings.host_reads(sent.values)
        return (0.0,) * len(sent.values)


class VirtualRanks(Ranks):
    """One process on a tracing machine, possibly of several.

    Args:
        tracing: where the model is.
        device: the device by which the step names the machine.
        distributed: what the processes share.
        process_index: the rank that is traced.
    """

    def __init__(
        self,
        tracing: TracingMachine,
        device: torch.device,
        distributed: DistributedConfig = ONE_PROCESS,
        process_index: int = 0,
    ) -> None:
        super().__init__(device, distributed, distributed.num_processes or 1, process_index)
        self._tracing = tracing

    def keep_rows(self, model: PreTrainedModel) -> None:
        """Keep the rows of each weight that are this process's, for :meth:`shard`."""
        for weight in model.parameters():
            first, end = rows_of(len(weight), self.num_processes, self.process_index)
            shape = (end - first, *weight.shape[1:])
            self._rows[weight] = torch.empty(shape, dtype=weight.dtype, device=self._device_of_rows)
            self._tracing.mark(self._rows[weight], "parameter", of=weight)

    def shard(self, parts: ModelParts, config: DistributedConfig) -> FullySharded | None:
        """Call :func:`enable_fsdp2`, for several processes of which one exists."""
        if self.plan.shards_rows:
            attribution = self._tracing.attribution
            attribution.name_modules(parts.model)  # with its adapters, while its parameters are whole
            mesh = init_device_mesh(self._device.type, (self.num_processes,))
            self._sharded = enable_fsdp2(parts, config, mesh, self._rows, attribution.within)
            attribution.name_modules(parts.model)
        return self._sharded

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model as Accelerate does, where there are several processes and each holds all of it."""
        self._tracing.mark_state(optimizer)
        if self.num_processes == 1 or self.plan.shards_rows or self.goes_without_ddp(model, takes_mean=False):
            return model, optimizer
        wrapped = TracedDataParallel(model, self._device, self._tracing.mark)
        self._tracing.attribution.takes_for_outermost(wrapped)
        return wrapped, optimizer

    @contextlib.contextmanager
    def micro_batch(self, model: nn.Module, *, is_last: bool) -> Iterator[None]:
        """Record where each micro-batch begins and ends; gradients are exchanged as in a run."""
        with contextlib.ExitStack() as within:
            within.enter_context(self._tracing.micro_batch())
            if self._sharded is not None:
                self._sharded.begin_micro_batch(is_last=is_last)
            elif isinstance(model, TracedDataParallel) and not is_last:
                within.enter_context(model.no_sync())
            yield
            if isinstance(model, TracedDataParallel) and is_last:
                model.finish()
        if self._sharded is not None:
            self._tracing.mark_weights(model)  # FSDP2 pads the last rows, and sets gradients, by itself

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """All-reduce the value, or return it unchanged in a single process."""
        if self.num_processes > 1:
            torch.distributed.all_reduce(value)
        return value


class NoValues(Values):
    """The stand-ins of values in a trace: a model of the right sizes, and a schedule that changes nothing.

    Args:
        tracing: gives every tensor a storage.
        machine: the same, as the step sees it.
        ranks: the traced process.
        keep_rows: keeps that process's rows of a model's weights; None: it holds all weights.
    """

    are_real = False

    def __init__(
        self,
        tracing: TracingMachine,
        machine: Machine,
        ranks: Ranks,
        keep_rows: Callable[[PreTrainedModel], None] | None = None,
    ) -> None:
        super().__init__(machine, ranks)
        self._tracing, self._keep_rows = tracing, keep_rows

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
        device = self._machine.device if host is None else torch.device("cpu")
        keep_rows = None if config.weights == "random" and device.type == "cpu" else self._keep_rows
        if config.weights == "random" and keep_rows is None:
            # Initialised where they will be: a tied head has its own weights until the end.
            model = model_of_config(config, hf_config, attn_implementation, device)
            pack_as_loaded(model, config, hf_config, self._machine.mixed_precision)
        else:
            with _disable_current_modes():
                model = model_on_meta(config, hf_config, attn_implementation)
                pack_as_loaded(model, config, hf_config, self._machine.mixed_precision)
            if host is None and keep_rows is None:
                self._tracing.warm_up_allocator(bytes_of_weights(model))
        model = self._tracing.place(model, device, None if keep_rows is None else self._without_memory)
        set_other_parts(model, other_parts_of(config))
        if config.new_tokens:
            num_rows = len(model.get_input_embeddings().weight)  # type: ignore[union-attr,arg-type]
            set_new_rows(model, range(num_rows - len(config.new_tokens), num_rows))
        if keep_rows is not None:
            keep_rows(model)
        if host is not None and host.files_for("parameter") is not None:
            for parameter in model.parameters():
                self._tracing.recorder.mark_place(parameter, "disk")
        if config.quantizes:
            check_quantization(model, config)
        return model

    def _without_memory(self, weight: nn.Parameter) -> torch.Tensor:
        """Return a stand-in of a weight's shape, as ``weights_in_shards`` leaves where this process keeps its rows."""
        self._tracing.recorder.mark_place(
            weight, "host"
        )  # one that was quantised: a run quantises where it reads the weight
        return torch.empty((), dtype=weight.dtype, device=self._machine.device).expand(weight.shape)

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Return None: master weights would pass through the host chunk by chunk, and leave nothing."""
        return None

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return a schedule that changes nothing: a learning rate is a value, and a trace has none."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def virtual_runtime(
    tracing: TracingMachine,
    config: TrainingConfig,
    distributed: DistributedConfig = ONE_PROCESS,
    process_index: int = 0,
) -> Runtime:
    """Return the surroundings of a traced step: one process, possibly of several, and no values.

    Args:
        tracing: where the model goes.
        config: for its precision.
        distributed: what the processes share.
        process_index: the rank that is traced.
    """
    machine = VirtualMachine(tracing, config.mixed_precision)
    ranks = VirtualRanks(tracing, machine.device, distributed, process_index)
    keep_rows = ranks.keep_rows if ranks.plan.shards_rows else None
    values = NoValues(tracing, machine, ranks, keep_rows)
    return Runtime(machine=machine, ranks=ranks, files=RunFiles(ranks), values=values)
