"""The runtime of a run on a real device, implemented with Accelerate."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import rich
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration, gather_object, patch_environment
from rich.console import Console
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.budget import Budget
from lowmem_ft.data import Batch
from lowmem_ft.foundation.errors import UserError, user_error
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.host.mapped_files import MappedFiles
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.models import (
    MasterWeights,
    ModelConfig,
    load_master_weights,
    load_model,
    load_model_config,
    weights_in_files,
    weights_in_shards,
)
from lowmem_ft.models.files.shard_files import ShardWriter
from lowmem_ft.models.gathering import refuse_unsaveable
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.recipe.training_config import require_tracker
from lowmem_ft.techniques.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.fully_sharded import FullySharded, enable_fsdp2
from lowmem_ft.training.checkpoints.session_files import load_session, save_session, save_trained
from lowmem_ft.training.checkpoints.sharded_files import save_gathered, save_shards
from lowmem_ft.training.distributed.gradient_averaging import (
    average_gradients,
    copy_from_main_process,
    ddp_takes,
    sum_bucket,
    sum_gradients,
)
from lowmem_ft.training.distributed.launch import processes_here
from lowmem_ft.training.distributed.rendezvous import RankInfo, refusals
from lowmem_ft.training.mixed_precision import MixedPrecision
from lowmem_ft.training.out_of_memory.budget_cap import Host, ThisHost
from lowmem_ft.training.random_state import import_random_state
from lowmem_ft.training.schedule import create_scheduler
from lowmem_ft.training.session import Session
from lowmem_ft.training.step import StepResult


class AccelerateRuntime(MixedPrecision):
    """A :class:`~lowmem_ft.training.runtime.RunRuntime` on a real device, in one process or several.

    Args:
        accelerator: knows the other processes.
        mixed_precision: the type of the step's autocast: ``no``, ``bf16`` or ``fp16``.
        device: the device of the step; None: the accelerator's.
        distributed: how the processes share the model.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        mixed_precision: str,
        device: torch.device | None = None,
        distributed: DistributedConfig = ONE_PROCESS,
    ) -> None:
        super().__init__(mixed_precision, device or accelerator.device)
        self._is_sharded = distributed.strategy == "fsdp2"
        self._device_of_rows = torch.device("cpu") if distributed.cpu_offload else self.device
        self._loads_on_host = False
        self._rows: dict[nn.Parameter, torch.Tensor] = {}
        self._sharded: FullySharded | None = None
        self.accelerator = accelerator
        self.num_processes: int = accelerator.num_processes
        self.num_processes_here = processes_here(self.num_processes)
        self.process_index: int = accelerator.process_index
        self.is_main: bool = accelerator.is_main_process
        self.host: Host = ThisHost()
        # The log uses the same console.
        self.progress_console: Console | None = rich.get_console() if self.is_main else None
        self._reduce_after_backward: Callable[[Iterable[nn.Parameter]], object] = lambda parameters: None

    @staticmethod
    def create(
        config: TrainingConfig, output_dir: Path, distributed: DistributedConfig = ONE_PROCESS
    ) -> AccelerateRuntime:
        """Join the other processes of the launcher, if any, and take a device.

        Accelerate gets no FSDP settings, which it would silently ignore on a CPU: :meth:`shard` shards the model in the
        same way everywhere.

        Args:
            config: for trackers, device and precision.
            output_dir: the folder in which trackers write.
            distributed: as launched, see :func:`lowmem_ft.training.distributed.launch.as_launched`.

        Raises:
            MissingPackageError: if a tracker of ``training.report_to`` is not installed.
            UserError: if Accelerate interprets the launch differently than the recipe says.
        """
        for tracker in config.report_to:
            require_tracker(tracker)
        AcceleratorState._reset_state()  # drops the precision of an earlier Accelerator in this process
        with patch_environment(ACCELERATE_USE_FSDP="false"):
            accelerator = Accelerator(
                # The step has its own autocast: Accelerate's copies all outputs to fp32, including logits. Never None,
                # or `accelerate launch --mixed_precision` would enable it.
                mixed_precision="no",
                cpu=config.use_cpu,
                log_with=list(config.report_to) or None,
                project_config=ProjectConfiguration(
                    project_dir=str(output_dir), logging_dir=str(output_dir / "logs")
                ),
            )
        refuse_another_launch(accelerator, distributed, ("NO", "MULTI_GPU", "MULTI_CPU"))
        if accelerator.num_processes > 1:
            leave_processes_at_exit()
        return AccelerateRuntime(accelerator, config.mixed_precision, distributed=distributed)

    def load_config(self, config: ModelConfig) -> PretrainedConfig:
        """Return the config that comes with the weights."""
        return load_model_config(config)

    def load_model(
        self,
        config: ModelConfig,
        hf_config: PretrainedConfig,
        *,
        attn_implementation: str,
        seed: int,
        host: HostMemory | None = None,
    ) -> PreTrainedModel:
        """Read the weights directly to their final place; see :func:`lowmem_ft.models.load_model`."""
        device = self.device
        with self.failing_together(), contextlib.ExitStack() as loading:
            loading.enter_context(_weights_for_every_process())
            if host is not None:
                device = torch.device("cpu")
                loading.enter_context(weights_in_files(host))
            elif self._is_sharded:
                device = torch.device("cpu")
                if config.weights != "random":  # random values are drawn in place
                    shards = weights_in_shards(self.num_processes, self.process_index, self._device_of_rows)
                    self._rows = loading.enter_context(shards)
            elif self._loads_on_host:
                device = torch.device("cpu")
            return load_model(
                config,
                hf_config,
                attn_implementation=attn_implementation,
                device=device,
                seed=seed,
                mixed_precision=self.mixed_precision,
            )

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Call :func:`lowmem_ft.models.load_master_weights` in all processes; they fail together."""
        with self.failing_together(), _weights_for_every_process():
            return load_master_weights(config, hf_config)

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return memory limited by the machine, its container, ``budget.host`` and the disk of ``folder``."""
        return HostMemory(
            self.device,
            budget_bytes=budget.host_bytes(self.num_processes_here),
            files=None if folder is None else MappedFiles(expand_user(folder)),
        )

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the schedule of transformers."""
        return create_scheduler(optimizer, config, num_training_steps)

    def shard(self, model: nn.Module, config: DistributedConfig) -> FullySharded | None:
        """Shard with :func:`lowmem_ft.techniques.fully_sharded.enable_fsdp2`, over all processes."""
        if self._is_sharded:
            is_saved = all(
                parameter.requires_grad for parameter in model.parameters()
            )  # else adapters are saved
            if is_saved:
                refuse_unsaveable(cast(PreTrainedModel, model))
            mesh = init_device_mesh(self.device.type, (self.num_processes,))
            self._sharded = enable_fsdp2(model, config, mesh, self._rows)
        return self._sharded

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model for data parallelism if there are several processes and each holds the whole model.

        The only process of a launch is not wrapped: Accelerate would wrap it, and DDP refuses float32 sums of
        gradients.
        """
        if self.num_processes == 1 or self._is_sharded or self.goes_without_ddp(model, takes_mean=False):
            return model, optimizer
        # No device placement: weights are where they belong already, some of them on the host.
        prepared = self.accelerator.prepare(model, device_placement=[False])
        prepared.register_comm_hook(None, sum_bucket)
        # Else another Accelerator would regard this model as prepared after the run has ended.
        vars(model).pop("_is_accelerate_prepared", None)
        return prepared, optimizer

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
        """Reduce the gradients that DDP refuses: float32 sums of 16-bit gradients."""
        self._reduce_after_backward(parameters)

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return DDP's ``no_sync``, or use FSDP2's equivalent, except for the last micro-batch of a window."""
        if self._sharded is not None:
            self._sharded.begin_micro_batch(is_last=is_last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if is_last else self.accelerator.no_sync(model)

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """Return the all-reduced sum, or the value itself in a single process."""
        if self.num_processes == 1:
            return value
        return self.accelerator.reduce(value, reduction="sum")  # type: ignore[return-value]

    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """Copy values from the device: the one point of a step where the host waits for it."""
        return tuple(torch.stack([value.float() for value in values]).tolist())

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Take one step per window."""
        return step(window)

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return all batches."""
        return batches

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write files for ``from_pretrained`` in the main process; sharded weights are gathered to it."""
        if self._is_sharded:
            save_gathered(session, tokenizer, folder, is_main=self.is_main)
        elif self.is_main:
            save_trained(session, tokenizer, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write all in the main process, or a part in each; see ``session_files.py`` and ``sharded_files.py``."""
        if self._is_sharded:
            writer = ShardWriter(folder, identity, self.process_index, self.num_processes)
            return save_shards(session, tokenizer, folder, writer, is_main=self.is_main)
        return save_session(session, tokenizer, folder) if self.is_main else {}

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Call :func:`lowmem_ft.training.checkpoints.session_files.load_session`."""
        load_session(session, folder, optimizer_scalars)

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Restore all generators; see ``random_state.py``."""
        import_random_state(state, self.device)

    def any_process(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        return self.max_over_processes(int(flag)) > 0

    def max_over_processes(self, value: int) -> int:
        """Return the largest of the processes' values."""
        if self.num_processes == 1:
            return value
        values: Any = self.accelerator.gather(torch.tensor([value], device=self.device))
        return int(values.max())

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
        if self.any_process(own is not None):
            problems = () if own is None else own.problems
            said = list(refusals(self.gather([RankInfo(socket.gethostname(), problems)])))
            raise user_error(UserError if own is None else type(own), tuple(said)) from own

    def gather(self, value: list[Any]) -> list[Any]:
        """Return the concatenated lists of all processes."""
        return value if self.num_processes == 1 else gather_object(value)

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and pass them the recipe."""
        config = recipe.training
        run_name = config.run_name or Path(self.accelerator.project_dir).name
        self.accelerator.init_trackers(
            config.project,
            config=_flat(dataclasses.asdict(recipe)),
            init_kwargs={"wandb": {"name": run_name}, "trackio": {"name": run_name}},
        )

    def log(self, record: dict[str, Any]) -> None:
        """Pass one record of metrics to the trackers."""
        self.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])

    def end_trackers(self) -> None:
        """Flush and close the trackers."""
        # Not Accelerator.end_training(): it also destroys the process group, see _leave_processes.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this: a barrier."""
        self.accelerator.wait_for_everyone()


def _weights_for_every_process() -> AbstractContextManager[None]:
    """Make transformers read weights in every process; `accelerate launch` sets it to one process per machine."""
    return patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false")


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
