"""The surroundings of a run on a real device, by Accelerate."""

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
from lowmem_ft.training.distributed.rendezvous import Arrival, refusals
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
        mixed_precision: what the step casts to: ``no``, ``bf16`` or ``fp16``.
        device: None: the accelerator's.
        distributed: what the processes share.
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
        # Shared with the log.
        self.progress_console: Console | None = rich.get_console() if self.is_main else None
        self._reduce_after_backward: Callable[[Iterable[nn.Parameter]], object] = lambda parameters: None

    @staticmethod
    def create(
        config: TrainingConfig, output_dir: Path, distributed: DistributedConfig = ONE_PROCESS
    ) -> AccelerateRuntime:
        """Join the other processes of the launcher, if any, and take a device.

        Accelerate is told nothing of FSDP, which it would leave out on a CPU without a word: the model is cut in
        :meth:`shard`, in the same way everywhere.

        Args:
            config: for trackers, device and precision.
            output_dir: where trackers write.
            distributed: as launched, see :func:`lowmem_ft.training.distributed.launch.as_launched`.

        Raises:
            MissingPackageError: if a tracker of ``training.report_to`` is not installed.
            UserError: if Accelerate makes something else of the launch than the recipe says.
        """
        for tracker in config.report_to:
            require_tracker(tracker)
        AcceleratorState._reset_state()  # of an Accelerator in this process that has a precision
        with patch_environment(ACCELERATE_USE_FSDP="false"):
            accelerator = Accelerator(
                # The step has its own autocast: Accelerate's copies all outputs to fp32, logits too. Never None, or
                # `accelerate launch --mixed_precision` would switch it on.
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
        """That which the weights come with."""
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
        """Read the weights straight to where they go; see :func:`lowmem_ft.models.load_model`."""
        device = self.device
        with self.failing_together(), contextlib.ExitStack() as loading:
            loading.enter_context(_weights_for_every_process())
            if host is not None:
                device = torch.device("cpu")
                loading.enter_context(weights_in_files(host))
            elif self._is_sharded:
                device = torch.device("cpu")
                if config.weights != "random":  # whose values are drawn in place
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
        """See :func:`lowmem_ft.models.load_master_weights`."""
        with self.failing_together(), _weights_for_every_process():
            return load_master_weights(config, hf_config)

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """What the machine, its container and ``budget.host`` leave, and what the disk of ``folder`` does."""
        return HostMemory(
            self.device,
            budget_bytes=budget.host_bytes(self.num_processes_here),
            files=None if folder is None else MappedFiles(expand_user(folder)),
        )

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """That of transformers."""
        return create_scheduler(optimizer, config, num_training_steps)

    def shard(self, model: nn.Module, config: DistributedConfig) -> FullySharded | None:
        """By :func:`lowmem_ft.techniques.fully_sharded.enable_fsdp2`, over all processes."""
        if self._is_sharded:
            is_saved = all(parameter.requires_grad for parameter in model.parameters())  # else adapters are
            if is_saved:
                refuse_unsaveable(cast(PreTrainedModel, model))
            mesh = init_device_mesh(self.device.type, (self.num_processes,))
            self._sharded = enable_fsdp2(model, config, mesh, self._rows)
        return self._sharded

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model for data parallelism, where there are several processes and each holds all of it.

        A launcher's single process is not wrapped either: Accelerate would, and DDP refuses float32 sums of gradients.
        """
        if self.num_processes == 1 or self._is_sharded or self.goes_without_ddp(model, takes_mean=False):
            return model, optimizer
        # Weights are where they belong, on the host some of them.
        prepared = self.accelerator.prepare(model, device_placement=[False])
        prepared.register_comm_hook(None, sum_bucket)
        # Or another Accelerator would take a model that this run is done with for prepared.
        vars(model).pop("_is_accelerate_prepared", None)
        return prepared, optimizer

    def goes_without_ddp(self, model: nn.Module, *, takes_mean: bool) -> bool:
        """Whether this model's gradients are none that DDP takes: then they are reduced after backward from now on.

        Args:
            model: in each process.
            takes_mean: whether each loss will be taken times the number of processes; else they are parts of one.
        """
        if self.num_processes == 1 or ddp_takes(model):
            return False
        self._reduce_after_backward = average_gradients if takes_mean else sum_gradients
        copy_from_main_process(model)
        return True

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Those that DDP does not take: sums of 16-bit gradients in float32."""
        self._reduce_after_backward(parameters)

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """DDP's ``no_sync`` for all but the last micro-batch of a window, or FSDP2's."""
        if self._sharded is not None:
            self._sharded.begin_micro_batch(is_last=is_last)
            return contextlib.nullcontext()
        return contextlib.nullcontext() if is_last else self.accelerator.no_sync(model)

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """All-reduce, or the value itself in a single process."""
        if self.num_processes == 1:
            return value
        return self.accelerator.reduce(value, reduction="sum")  # type: ignore[return-value]

    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """Asks the device: the one point of a step where the host waits."""
        return tuple(torch.stack([value.float() for value in values]).tolist())

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Each window is a step."""
        return step(window)

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """All of them."""
        return batches

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """As ``from_pretrained`` loads it, by the main process; what is cut among several is gathered to it."""
        if self._is_sharded:
            save_gathered(session, tokenizer, folder, is_main=self.is_main)
        elif self.is_main:
            save_trained(session, tokenizer, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """By the main process, or by each its part; see ``session_files.py`` and ``sharded_files.py``."""
        if self._is_sharded:
            writer = ShardWriter(folder, identity, self.process_index, self.num_processes)
            return save_shards(session, tokenizer, folder, writer, is_main=self.is_main)
        return save_session(session, tokenizer, folder) if self.is_main else {}

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """From these files; see :func:`lowmem_ft.training.checkpoints.session_files.load_session`."""
        load_session(session, folder, optimizer_scalars)

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Of all generators; see ``random_state.py``."""
        import_random_state(state, self.device)

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        return self.max_over_processes(int(flag)) > 0

    def max_over_processes(self, value: int) -> int:
        """The largest of the processes' values."""
        if self.num_processes == 1:
            return value
        values: Any = self.accelerator.gather(torch.tensor([value], device=self.device))
        return int(values.max())

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise a user's error of one process in all of them, so that none waits for another that is gone.

        Raises:
            UserError: this process's own, or that of another.
        """
        own: UserError | None = None
        try:
            yield
        except UserError as error:
            own = error
        if self.any_process(own is not None):
            problems = () if own is None else own.problems
            said = list(refusals(self.gather([Arrival(socket.gethostname(), problems)])))
            raise user_error(UserError if own is None else type(own), tuple(said)) from own

    def gather(self, value: list[Any]) -> list[Any]:
        """The lists of all processes, one after the other."""
        return value if self.num_processes == 1 else gather_object(value)

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and tell them the recipe."""
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
        """A barrier."""
        self.accelerator.wait_for_everyone()


def _weights_for_every_process() -> AbstractContextManager[None]:
    """`accelerate launch` sets what makes transformers fill the weights of one process of a machine alone."""
    return patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false")


def refuse_another_launch(
    accelerator: Accelerator, distributed: DistributedConfig, kinds: tuple[str, ...]
) -> None:
    """Refuse what Accelerate has made of a launch, if it is not what the recipe says.

    Args:
        accelerator: has joined the processes.
        distributed: as launched.
        kinds: Accelerate's names of what may have come of it.

    Raises:
        UserError: naming both.
    """
    kind, num_processes = accelerator.distributed_type.value, accelerator.num_processes
    if kind not in kinds or num_processes != distributed.num_processes:
        raise UserError(
            f"distributed.strategy={distributed.strategy} with {distributed.num_processes} processes was launched, "
            f"but Accelerate makes {kind} with {num_processes} of it. Run `accelerate launch --num_processes N -m "
            "lowmem_ft train ...` without further options, or choose another configuration with `accelerate "
            "config`."
        )


def leave_processes_at_exit() -> None:
    """See to it that the process group is destroyed while nothing waits for it."""
    atexit.register(_leave_processes)


def _leave_processes() -> None:
    """Destroy the process group once nothing uses it: at the end of the process, after every DDP model is gone.

    If a DDP model's reducer is the last to hold a gloo group, its destructor waits for gloo's threads without
    releasing the GIL, which they need to drop the tensors of the last collective: a deadlock, seen in one exit of five.
    """
    gc.collect()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"training": {"seed": 1}}`` as ``{"training.seed": 1}``; values that trackers cannot show become text."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
