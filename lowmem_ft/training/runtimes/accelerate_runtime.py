"""The ranks and files of a run on a real device, in one process or several, implemented with Accelerate."""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import rich
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, gather_object, patch_environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedTokenizerBase

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.shard_files import ShardWriter
from lowmem_ft.models.gathering import refuse_unsaveable
from lowmem_ft.models.sharded_weights import weights_in_shards
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.training_config import require_tracker
from lowmem_ft.techniques.distributed.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.distributed.fully_sharded import FullySharded, enable_fsdp2
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.folder.sharded_files import save_gathered, save_shards
from lowmem_ft.training.processes.gradient_averaging import sum_bucket
from lowmem_ft.training.processes.launch import processes_here
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.runtimes.values import Values
from lowmem_ft.training.step.machine import Machine
from lowmem_ft.training.step.session import Session


class AccelerateRanks(Ranks):
    """The processes that Accelerate knows, one or several.

    Args:
        accelerator: knows the other processes.
        device: the device of this one.
        distributed: how the processes share the model.
    """

    def __init__(
        self, accelerator: Accelerator, device: torch.device, distributed: DistributedConfig = ONE_PROCESS
    ) -> None:
        super().__init__(device, distributed, accelerator.num_processes, accelerator.process_index)
        self._accelerator = accelerator

    @contextlib.contextmanager
    def reading_weights(self, config: ModelConfig, host: HostMemory | None) -> Iterator[torch.device]:
        """Yield the device, or for a sharded model the host: each process then keeps only its rows."""
        if host is not None or not self.plan.shares_weights:
            with super().reading_weights(config, host) as device:
                yield device
        elif self.plan.shards_rows and config.weights != "random":  # random values are drawn in place
            place = self.num_processes, self.process_index, self._device_of_rows
            with weights_in_shards(*place) as self._rows:
                yield torch.device("cpu")
        else:
            yield torch.device("cpu")

    def shard(self, parts: ModelParts, config: DistributedConfig) -> FullySharded | None:
        """Shard with :func:`enable_fsdp2`, over all processes."""
        if self.plan.shards_rows:
            # If some are frozen, adapters are saved.
            is_saved = all(parameter.requires_grad for parameter in parts.model.parameters())
            if is_saved:
                refuse_unsaveable(parts.model)
            mesh = init_device_mesh(self._device.type, (self.num_processes,))
            self._sharded = enable_fsdp2(parts, config, mesh, self._rows)
        return self._sharded

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model for data parallelism if there are several processes and each holds the whole model.

        The only process of a launch is not wrapped: Accelerate would wrap it, and DDP refuses float32 sums of
        gradients.
        """
        if self.num_processes == 1 or self.plan.shards_rows or self.goes_without_ddp(model, takes_mean=False):
            return model, optimizer
        # No device placement: weights are where they belong already, some of them on the host.
        prepared = self._accelerator.prepare(model, device_placement=[False])
        prepared.register_comm_hook(None, sum_bucket)
        # Else another Accelerator would regard this model as prepared after the run has ended.
        vars(model).pop("_is_accelerate_prepared", None)
        return prepared, optimizer

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return DDP's ``no_sync``, or use FSDP2's equivalent, except for the last micro-batch of a window."""
        if self._sharded is not None:
            self._sharded.begin_micro_batch(is_last=is_last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if is_last else self._accelerator.no_sync(model)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the all-reduced sum, or the value itself in a single process."""
        if self.num_processes == 1:
            return value
        return self._accelerator.reduce(value, reduction="sum")  # type: ignore[return-value]

    def max(self, value: int) -> int:
        """Return the largest of the processes' values."""
        if self.num_processes == 1:
            return value
        values: Any = self._accelerator.gather(torch.tensor([value], device=self._device))
        return int(values.max())

    def gather(self, value: list[Any]) -> list[Any]:
        """Return the concatenated lists of all processes."""
        return value if self.num_processes == 1 else gather_object(value)

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this: a barrier."""
        self._accelerator.wait_for_everyone()


class AccelerateFiles(RunFiles):
    """The files of processes that may each hold a part of the model, and Accelerate's trackers.

    Args:
        ranks: the processes.
        accelerator: has the trackers.
    """

    def __init__(self, ranks: Ranks, accelerator: Accelerator) -> None:
        # The log uses the same console.
        super().__init__(ranks, rich.get_console() if ranks.is_main else None)
        self._accelerator = accelerator

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write files for ``from_pretrained`` in the main process; sharded weights are gathered to it."""
        if self._ranks.plan.shares_weights:
            save_gathered(session, tokenizer, folder, is_main=self._ranks.is_main)
        else:
            super().save_trained(session, tokenizer, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write all in the main process, or a part in each; see ``run_files.py`` and ``sharded_files.py``."""
        if self._ranks.plan.shards_rows:
            ranks = self._ranks
            writer = ShardWriter(folder, identity, ranks.process_index, ranks.num_processes)
            return save_shards(session, tokenizer, folder, writer, is_main=ranks.is_main)
        return super().save_session(session, tokenizer, folder, identity)

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and pass them the recipe."""
        config = recipe.training
        run_name = config.run_name or Path(self._accelerator.project_dir).name
        self._accelerator.init_trackers(
            config.project,
            config=_flat({path: key.value_in(recipe) for path, key in recipe_keys().items()}),
            init_kwargs={"wandb": {"name": run_name}, "trackio": {"name": run_name}},
        )

    def log(self, record: dict[str, Any]) -> None:
        """Pass one record of metrics to the trackers."""
        self._accelerator.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def end_trackers(self) -> None:
        """Flush and close the trackers."""
        # Not Accelerator.end_training(): it also destroys the process group, see _leave_processes.
        for tracker in self._accelerator.trackers:
            tracker.finish()


def launched_runtime(
    config: TrainingConfig, output_dir: Path, distributed: DistributedConfig = ONE_PROCESS
) -> Runtime:
    """Join the other processes of the launcher, if any, and take a device.

    Accelerate gets no FSDP settings, which it would silently ignore on a CPU: :meth:`AccelerateRanks.shard` shards the
    model in the same way everywhere.

    Args:
        config: for trackers, device and precision.
        output_dir: the folder in which trackers write.
        distributed: as launched, see :func:`lowmem_ft.training.processes.launch.as_launched`.

    Raises:
        MissingPackageError: if a tracker of ``training.report_to`` is not installed.
        UserError: if Accelerate interprets the launch differently than the recipe says.
    """
    with patch_environment(ACCELERATE_USE_FSDP="false"):
        accelerator = make_accelerator(config, output_dir, cpu=config.use_cpu)
    refuse_another_launch(accelerator, distributed, ("NO", "MULTI_GPU", "MULTI_CPU"))
    num_processes = accelerator.num_processes
    if num_processes > 1:
        leave_processes_at_exit()
    machine = Machine(
        accelerator.device, config.mixed_precision, num_processes_here=processes_here(num_processes)
    )
    ranks = AccelerateRanks(accelerator, machine.device, distributed)
    files = AccelerateFiles(ranks, accelerator)
    return Runtime(machine=machine, ranks=ranks, files=files, values=Values(machine, ranks))


def make_accelerator(config: TrainingConfig, output_dir: Path, **arguments: Any) -> Accelerator:
    """Return an Accelerator of this launch with the trackers of ``training.report_to``.

    Raises:
        MissingPackageError: if one of them is not installed.
    """
    for tracker in config.report_to:
        require_tracker(tracker)
    AcceleratorState._reset_state()  # drops the precision of an earlier Accelerator in this process
    return Accelerator(
        # The step has its own autocast: Accelerate's copies all outputs to fp32, including logits. Never None, or
        # `accelerate launch --mixed_precision` would enable it.
        mixed_precision="no",
        log_with=list(config.report_to) or None,
        project_config=ProjectConfiguration(
            project_dir=str(output_dir), logging_dir=str(output_dir / "logs")
        ),
        **arguments,
    )


def refuse_another_launch(
    accelerator: Accelerator, distributed: DistributedConfig, kinds: tuple[str, ...]
) -> None:
    """Refuse a launch that Accelerate interprets differently than the recipe says.

    Args:
        accelerator: has joined the processes.
        distributed: as launched.
        kinds: Accelerate's names for the distributed types that are allowed.

    Raises:
        UserError: if they differ; it names both.
    """
    kind, num_processes = accelerator.distributed_type.value, accelerator.num_processes
    if kind not in kinds or num_processes != distributed.num_processes:
        raise UserError(
            f"distributed.strategy={distributed.strategy} with {distributed.num_processes} processes was launched, "
            f"but Accelerate started {kind} with {num_processes} processes. Run `accelerate launch --num_processes N "
            "-m lowmem_ft train ...` without further options, or choose another configuration with `accelerate "
            "config`."
        )


def leave_processes_at_exit() -> None:
    """Register the destruction of the process group for the exit of this process."""
    atexit.register(_leave_processes)


def _leave_processes() -> None:
    """Destroy the process group once nothing uses it: at the exit of the process, after every DDP model is freed.

    If a DDP model's reducer is the last to hold a gloo group, its destructor waits for gloo's threads without
    releasing the GIL, which they need to drop the tensors of the last collective: a deadlock, seen in one exit of five.
    """
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten ``{"training": {"seed": 1}}`` to ``{"training.seed": 1}``; turn values unfit for trackers into text."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
