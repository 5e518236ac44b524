"""The interface between the training step, or the run around it, and its device, processes and files.

Real runs implement it with Accelerate (``accelerate_runtime.py``); a trace on a virtual device has its own. The step
reaches everything outside itself through :class:`Runtime`, so that both execute the same step; the loop uses
:class:`RunRuntime` for everything else.
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
        """Return the model's architecture; a trace may take it from the catalogue, as it needs no weights."""
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
        """Return the model on the device or in ``host``, with weights from the checkpoint, or only sized in a trace."""
        ...

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Return the checkpoint's weights, on the host, if finer than the model's; otherwise, or in a trace, None."""
        ...

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return memory for offloaded tensors, most of them in files of ``folder`` if given; unlimited in a trace."""
        ...

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the learning rate schedule for ``num_training_steps`` optimizer steps; constant in a trace."""
        ...

    def shard(self, model: nn.Module, config: DistributedConfig) -> FullySharded | None:
        """Shard the model's parameters over the processes if ``distributed.strategy`` is fsdp2; else return None."""
        ...

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and optimizer that the step calls: wrapped for several processes and for loss scaling."""
        ...

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum finished gradients over all processes, unless the prepared model has done so in backward."""
        ...

    def autocast(self) -> AbstractContextManager[None]:
        """Return the mixed-precision context of a forward pass."""
        ...

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch; gradients need to be reduced only in the last one of a window."""
        ...

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate, loss-scaled if the precision needs it; the window's gradient is the sum over all processes."""
        ...

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """Unscale the gradients, clip their global norm to ``max_norm``, and return the norm before clipping."""
        ...

    def unscale(self, values: torch.Tensor) -> None:
        """Divide values computed from gradients by the fp16 loss scale, in place; see ``training/loss_scaling.py``."""
        ...

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, element by element."""
        ...

    def fetch(self, *values: torch.Tensor) -> tuple[float, ...]:
        """Return the values of 0-d tensors, with one device sync: the only one of a step, before the update."""
        ...

    def loss_scale_may_overflow(self) -> bool:
        """Return whether the fp16 loss scale alone may have caused a non-finite gradient."""
        ...

    def update_weights(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
        """Step if the gradients are finite; else keep the weights and lower the loss scale, if there is one."""
        ...

    def abandon_step(self) -> None:
        """Forget what :meth:`unscale` or :meth:`clip_grad_norm` recorded of a step that will not be completed."""
        ...

    def update_loss_scale(self) -> None:
        """Update the loss scale after a step that called :meth:`unscale` but not :meth:`update_weights`."""
        ...


class RunRuntime(Runtime, Protocol):
    """The part of the interface that only the loop of a run uses: other processes, trackers, saving and resuming."""

    process_index: int
    num_processes_here: int
    is_main: bool
    """True in the main process, rank 0, which writes every file that is written once."""
    host: Host
    """Source of the host memory readings that are compared with budgets."""
    progress_console: Console | None
    """Console on which this process shows the run's progress; None: it shows none."""

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Take an optimizer step over a window; a rehearsal takes one step for all windows of the same shape."""
        ...

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Return the held-out batches to evaluate: all of them, or in a rehearsal one of each shape."""
        ...

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the trained weights or adapters, and the tokenizer, so that vanilla libraries load them.

        Every process calls it; a process that alone holds everything writes alone.

        Raises:
            CheckpointError: if the folder, read back, does not hold the weights.
        """
        ...

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write the trained weights, the tokenizer and the optimizer's tensors, for :meth:`load_session`.

        Args:
            session: the session to save; every process calls this, and writes its own part if it holds only a part.
            tokenizer: the tokenizer to save.
            folder: the folder of a new checkpoint, the same for all processes.
            identity: the random name of that checkpoint.

        Returns:
            In the main process, the optimizer's values that are not tensors, in JSON types.

        Raises:
            CheckpointError: if the folder, read back, does not hold the trained weights.
        """
        ...

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Restore what :meth:`save_session` wrote, except the model's own weights: it was built from the folder.

        Args:
            session: receives adapters and the optimizer's state; every process calls this.
            folder: a checkpoint.
            optimizer_scalars: the result of :meth:`save_session`.

        Raises:
            CheckpointError: if they are not those of this run.
        """
        ...

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Restore the random generators from the result of ``export_random_state``; do nothing in a run without values.

        Raises:
            ValueError: if it is not such a state; KeyError, TypeError and RuntimeError likewise.
        """
        ...

    def loss_scale_state(self) -> dict[str, Any] | None:
        """Return the state of the fp16 loss scale, in JSON types; None: there is no loss scale."""
        ...

    def load_loss_scale_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the loss scale; without one, ignore it."""
        ...

    def any_process(self, flag: bool) -> bool:
        """Return whether the flag is set in any process."""
        ...

    def max_over_processes(self, value: int) -> int:
        """Return the largest of the processes' values."""
        ...

    def failing_together(self) -> AbstractContextManager[None]:
        """Return a context that raises one process's user error in all processes, so that none waits for a lost one."""
        ...

    def gather(self, value: list[Any]) -> list[Any]:
        """Return the concatenated lists of all processes."""
        ...

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this: a barrier."""
        ...

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and pass them the recipe."""
        ...

    def log(self, record: dict[str, Any]) -> None:
        """Pass one record of metrics, including its ``step``, to the trackers."""
        ...

    def end_trackers(self) -> None:
        """Flush and close the trackers."""
        ...
