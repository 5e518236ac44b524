"""What the training step, and the run around it, need from their surroundings.

Real runs take it from Accelerate (``accelerate_runtime.py``); a trace on a virtual device brings its own. Whatever the
step asks of the outside goes through :class:`Runtime`, so that both execute the same step; what the loop asks further
goes through :class:`RunRuntime`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.console import Console
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.budget import Budget
from lowmem_ft.data import Batch
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.models import MasterWeights, ModelConfig
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.techniques.config import DistributedConfig
from lowmem_ft.techniques.fully_sharded import FullySharded
from lowmem_ft.training.out_of_memory.budget_cap import Host

if TYPE_CHECKING:
    from lowmem_ft.training.session import Session
    from lowmem_ft.training.step import StepResult


class Runtime(Protocol):
    """Device, model, precision, gradients and the other processes, as the training step sees them."""

    device: torch.device
    num_processes: int

    def load_config(self, config: ModelConfig) -> PretrainedConfig:
        """The model's architecture; in a trace that of the catalogue does, as no weights will be asked for."""
        ...

    def load_model(
        self,
        config: ModelConfig,
        hf_config: PretrainedConfig,
        *,
        attn_implementation: str,
        seed: int,
        host: HostMemory | None = None,
    ) -> PreTrainedModel:
        """The model on the device or in ``host``, its weights read from the checkpoint or, in a trace, only sized."""
        ...

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """The checkpoint's weights, on the host, where they are finer than the model's; else, and in a trace, None."""
        ...

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Where tensors of the device wait, most of them in files of ``folder`` if given; in a trace it has no end."""
        ...

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """What sets the learning rate of each of so many optimizer steps; in a trace it stays what it is."""
        ...

    def shard(self, model: nn.Module, config: DistributedConfig) -> FullySharded | None:
        """Cut the model's parameters among the processes, where ``distributed.strategy`` is fsdp2; else None."""
        ...

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """What the step calls in place of the two: wrapped for several processes and for loss scaling."""
        ...

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum finished gradients over all processes, where the prepared model has not done so in backward."""
        ...

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision for a forward pass."""
        ...

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Wraps one micro-batch; gradients need to reach the other processes only in the last one of a window."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate, scaled where the precision needs it: the window's gradient is the sum over all processes."""
        ...

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Unscale its gradients, scale them to ``max_norm`` if their global norm is above it; the norm before that."""
        ...

    def unscale(self, values: torch.Tensor) -> None:
        """Divide what came from gradients by the fp16 loss scale, in place; see ``training/loss_scaling.py``."""
        ...

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all processes, element by element."""
        ...

    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """What 0-d tensors hold, in one wait for the device: the only one of a step, before the update."""
        ...

    def loss_scale_may_overflow(self) -> bool:
        """Whether a non-finite gradient may be the fault of the fp16 loss scale alone."""
        ...

    def update_weights(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
        """Step if the gradients are finite; else leave the weights alone and lower the loss scale, if there is one."""
        ...

    def abandon_step(self) -> None:
        """Forget what :meth:`unscale` or :meth:`clip_grad_norm` has seen of a step that will not be ended."""
        ...

    def update_loss_scale(self) -> None:
        """End a step that :meth:`unscale` has seen the gradients of, and :meth:`update_weights` has not."""
        ...


class RunRuntime(Runtime, Protocol):
    """What the loop of a run asks beyond its steps: the other processes, trackers, saving and going on."""

    process_index: int
    num_processes_here: int
    is_main: bool
    """Whether this process writes what is written once: the first of all."""
    host: Host
    """What its memory is read from, where it is held against budgets."""
    progress_console: Console | None
    """Where this process shows how far the run is; None: nowhere."""

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Take an optimizer step over a window; a rehearsal takes one for all windows of a shape."""
        ...

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """The held-out batches that are really evaluated: all; in a rehearsal one of each shape."""
        ...

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write what is trained, and the tokenizer, as vanilla libraries load them.

        Every process calls it, and what only one of them holds all of, only that one writes.

        Raises:
            CheckpointError: if the folder, read back, does not hold it.
        """
        ...

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write what is trained, the tokenizer and the optimizer's tensors, for :meth:`load_session`.

        Args:
            session: what is saved; every process calls it, and writes its own part if it holds no more.
            tokenizer: likewise.
            folder: a new checkpoint's, the same for all.
            identity: of that checkpoint.

        Returns:
            In the main process, what of the optimizer is no tensor, as JSON holds it.

        Raises:
            CheckpointError: if the folder, read back, does not hold what is trained.
        """
        ...

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Take back what that wrote, but for the model's own weights: it was built from the folder.

        Args:
            session: takes adapters and the optimizer's state; every process calls it.
            folder: a checkpoint.
            optimizer_scalars: what :meth:`save_session` returned.

        Raises:
            CheckpointError: if they are not this run's.
        """
        ...

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Continue the random generators from what ``export_random_state`` saw of them; without values, do nothing.

        Raises:
            ValueError: if it is no such state; KeyError, TypeError and RuntimeError likewise.
        """
        ...

    def loss_scale_state(self) -> dict[str, Any] | None:
        """Of fp16, as JSON holds it; None: there is no loss scale."""
        ...

    def load_loss_scale_state(self, state: dict[str, Any]) -> None:
        """Take it back; without a loss scale, pass over it."""
        ...

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        ...

    def max_over_processes(self, value: int) -> int:
        """The largest of the processes' values."""
        ...

    def failing_together(self) -> AbstractContextManager[None]:
        """Raises a user's error of one process in all of them, so that none waits for another that is gone."""
        ...

    def gather(self, value: list[Any]) -> list[Any]:
        """The lists of all processes, one after the other."""
        ...

    def wait_for_everyone(self) -> None:
        """A barrier."""
        ...

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and tell them the recipe."""
        ...

    def log(self, record: dict[str, Any]) -> None:
        """Pass one record of metrics, its ``step`` among them, to the trackers."""
        ...

    def end_trackers(self) -> None:
        """Flush and close the trackers."""
        ...
