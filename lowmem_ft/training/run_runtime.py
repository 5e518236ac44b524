"""The surroundings of a run in one process, in plain torch: of its step, and of the loop around that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.host.mapped_files import MappedFiles
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.foundation.virtual_device import refuse_after_virtual_gpu
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.master_weights import MasterWeights, load_master_weights
from lowmem_ft.models.weights_on_disk import weights_in_files
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.techniques.distributed.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.training.checkpoints.run_files import RunFiles
from lowmem_ft.training.generation.greedy import greedy_answer
from lowmem_ft.training.out_of_memory.budget_cap import THIS_HOST, Host
from lowmem_ft.training.random_state import import_random_state
from lowmem_ft.training.runtime import Runtime
from lowmem_ft.training.schedule import create_scheduler

if TYPE_CHECKING:
    from lowmem_ft.training.session import Session
    from lowmem_ft.training.step import StepResult


class RunRuntime(Runtime, RunFiles):
    """Everything outside a run that its loop uses; see :class:`lowmem_ft.training.runtime.Runtime`.

    Attributes:
        host: source of the host memory readings that are compared with budgets.
        computes_values: whether tensors have values, whose time can be measured; not in a rehearsal.
        progress_console: the console on which this process shows the run's progress; None: it shows none.
    """

    host: Host = THIS_HOST
    computes_values: bool = True
    progress_console: Console | None = None

    def __init__(
        self, mixed_precision: str, device: torch.device, distributed: DistributedConfig = ONE_PROCESS
    ) -> None:
        refuse_after_virtual_gpu(device)
        super().__init__(mixed_precision, device, distributed)

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
        """Read the weights directly to their final place; see :func:`lowmem_ft.models.loading.load_model`."""
        with self.failing_together(), self._reading_weights(config, host) as device:
            return load_model(
                config,
                hf_config,
                attn_implementation=attn_implementation,
                device=device,
                seed=seed,
                mixed_precision=self.mixed_precision,
            )

    @contextlib.contextmanager
    def _reading_weights(self, config: ModelConfig, host: HostMemory | None) -> Iterator[torch.device]:
        """Yield the device that weights are read to: the step's, or the CPU if they stay in ``host``."""
        if host is None:
            yield self.device
        else:
            with weights_in_files(host):
                yield torch.device("cpu")

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Call :func:`lowmem_ft.models.master_weights.load_master_weights` in all processes; they fail together."""
        with self.failing_together():
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

    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """Copy values from the device: the one point of a step where the host waits for it."""
        return tuple(torch.stack([value.float() for value in values]).tolist())

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Take an optimizer step over a window; a rehearsal takes one step for all windows of the same shape."""
        return step(window)

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the held-out batches to evaluate: all of them, or in a rehearsal one of each shape."""
        return batches

    def generate(
        self, session: Session, input_ids: Sequence[int], max_new_tokens: int, end_ids: Sequence[int]
    ) -> list[int] | None:
        """Return the tokens of the model's greedy answer to a prompt; None in a run without values."""
        return greedy_answer(session, input_ids, max_new_tokens, end_ids)

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Restore the random generators from the result of ``export_random_state``; do nothing in a run without values.

        Raises:
            ValueError: if it is not such a state; KeyError, TypeError and RuntimeError likewise.
        """
        import_random_state(state, self.device)

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and pass them the recipe."""

    def log(self, record: dict[str, Any]) -> None:
        """Pass one record of metrics, including its ``step``, to the trackers."""

    def end_trackers(self) -> None:
        """Flush and close the trackers."""
