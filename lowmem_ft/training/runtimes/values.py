"""The values of a run: the weights that it begins with, and the steps, evaluations and answers that compute others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import patch_environment
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.master_weights import MasterWeights, load_master_weights
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.greedy import greedy_answer
from lowmem_ft.training.step.machine import Machine
from lowmem_ft.training.step.random_state import import_random_state
from lowmem_ft.training.step.schedule import create_scheduler

if TYPE_CHECKING:
    from lowmem_ft.training.step.session import Session
    from lowmem_ft.training.step.step import StepResult


class Values:
    """The plain case, with real values. Traces and rehearsals have none, and override what reads or makes values.

    Args:
        machine: holds the model.
        ranks: read the weights together, each its part.

    Attributes:
        are_real: whether tensors have values, whose computation can be timed.
    """

    are_real: bool = True

    def __init__(self, machine: Machine, ranks: Ranks) -> None:
        self._machine, self._ranks = machine, ranks

    def load_config(self, config: ModelConfig) -> PretrainedConfig:
        """Return the model's architecture: the config that comes with the weights."""
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
        """Return the model on the device or in ``host``; see :func:`lowmem_ft.models.loading.load_model`."""
        with (
            self._ranks.failing_together(),
            _weights_for_every_process(),
            self._ranks.reading_weights(config, host) as device,
        ):
            return load_model(
                config,
                hf_config,
                attn_implementation=attn_implementation,
                device=device,
                seed=seed,
                mixed_precision=self._machine.mixed_precision,
            )

    def master_weights(self, config: ModelConfig, hf_config: PretrainedConfig) -> MasterWeights | None:
        """Return the checkpoint's weights on the host if they are more precise than the model's; all fail together."""
        with self._ranks.failing_together(), _weights_for_every_process():
            return load_master_weights(config, hf_config)

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the learning rate schedule for ``num_training_steps`` optimizer steps, as transformers makes it."""
        return create_scheduler(optimizer, config, num_training_steps)

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
        import_random_state(state, self._machine.device)


def _weights_for_every_process() -> AbstractContextManager[None]:
    """Make transformers read weights in every process; `accelerate launch` sets it to one process per machine."""
    return patch_environment(FSDP_CPU_RAM_EFFICIENT_LOADING="false")
