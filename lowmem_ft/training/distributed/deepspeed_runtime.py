"""The surroundings of a run whose gradients and optimizer state DeepSpeed shares out: ZeRO-2, and ZeRO-3 with weights.

The engine has an optimizer of its own around torch's AdamW, sums gradients and clips them; ours is the forward pass,
what the step makes of it, and the files. A window's end is told to the engine, which would count micro-batches by
itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration, patch_environment
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lowmem_ft.foundation.packages import require_package
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.recipe.training_config import require_tracker
from lowmem_ft.techniques.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.gradients.norm import norm_in_float32
from lowmem_ft.training.accelerate_runtime import (
    AccelerateRuntime,
    leave_processes_at_exit,
    refuse_another_launch,
)
from lowmem_ft.training.checkpoints.session_files import (
    save_trained,
    saved_state,
    weights_saved_in,
    write_state,
)
from lowmem_ft.training.checkpoints.sharded_files import save_gathered
from lowmem_ft.training.distributed.deepspeed_state import EngineState
from lowmem_ft.training.session import Session


class DeepSpeedRuntime(AccelerateRuntime):
    """A :class:`~lowmem_ft.training.runtime.RunRuntime` in several processes of DeepSpeed.

    Args:
        accelerator: with a DeepSpeed plugin.
        distributed: as launched; ``strategy`` is zero2 or zero3.
    """

    def __init__(self, accelerator: Accelerator, distributed: DistributedConfig) -> None:
        super().__init__(accelerator, "no", distributed=distributed)
        self._shares_weights = self._loads_on_host = distributed.strategy == "zero3"
        self._offloads = bool(distributed.cpu_offload)
        self._engine: Any = None
        self._state: Any = None
        self._first_micro_step = 0

    @staticmethod
    def create(
        config: TrainingConfig, output_dir: Path, distributed: DistributedConfig = ONE_PROCESS
    ) -> DeepSpeedRuntime:
        """Join the other processes of the launcher.

        Accelerate passes over DeepSpeed without a word if it is told of a CPU; it is not, and what it makes is checked.

        Raises:
            MissingPackageError: if DeepSpeed or a tracker of ``training.report_to`` is not installed.
            UserError: if Accelerate makes something else of the launch than the recipe says.
        """
        require_package(f"distributed.strategy={distributed.strategy}", "deepspeed", "deepspeed")
        for tracker in config.report_to:
            require_tracker(tracker)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # Of DeepSpeed 0.19's own calls, at each of them; torch 2.13 still has the names.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        if config.use_cpu:
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
        AcceleratorState._reset_state()  # of an Accelerator in this process that has a precision
        if config.use_cpu:
            PartialState(cpu=True)  # knows the processes, and is what the next one takes for known
        with patch_environment(
            ACCELERATE_USE_DEEPSPEED="true",
            ACCELERATE_USE_FSDP="false",
            # What a configuration file says was read and agreed to; Accelerate takes it for a contradiction to ours.
            ACCELERATE_CONFIG_DS_FIELDS="",
            # Or it notices its own value in place of the engine's, and warns.
            ACCELERATE_GRADIENT_ACCUMULATION_STEPS=config.gradient_accumulation_steps,
        ):
            accelerator = Accelerator(
                mixed_precision="no",
                deepspeed_plugin=DeepSpeedPlugin(
                    hf_ds_config=_configuration(config, distributed), zero3_init_flag=False
                ),
                log_with=list(config.report_to) or None,
                project_config=ProjectConfiguration(
                    project_dir=str(output_dir), logging_dir=str(output_dir / "logs")
                ),
            )
        # Or transformers would cut weights as it reads them, before the techniques have seen them.
        unset_hf_deepspeed_config()
        refuse_another_launch(accelerator, distributed, ("DEEPSPEED",))
        leave_processes_at_exit()
        return DeepSpeedRuntime(accelerator, distributed)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Hand both to the engine."""
        self._state = EngineState(model, optimizer)
        self._engine, prepared = self.accelerator.prepare(model, optimizer)
        if self._shares_weights:
            _gather_head_with_model(cast(PreTrainedModel, model))
        self._state.of(self._engine.optimizer)
        self._first_micro_step = self._engine.optimizer.micro_step_id
        vars(model).pop("_is_accelerate_prepared", None)
        return self._engine, prepared

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Tells the engine where a window ends."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        """The engine's, which averages over processes; the loss is normalised by its window already."""
        self._engine.backward(loss * self.num_processes, scale_wrt_gas=False)

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> torch.Tensor:
        """The global norm of what the engine has; it clips by itself, as it steps."""
        squares = [norm_in_float32(part).square() for part in self._gradients()]
        here = torch.stack(squares).sum() if squares else torch.zeros((), device=self.device)
        return self.sum_over_processes(here).sqrt()

    def _gradients(self) -> Iterator[torch.Tensor]:
        """This process's part of each gradient, of which another process has no copy."""
        if self._offloads:
            parts = (part.grad for part in self._state.flat_parts())
            yield from (part for part in parts if part is not None)
            return
        for group in self._engine.optimizer.averaged_gradients.values():
            yield from (part for part in group or () if part is not None and part.numel())

    def update_weights(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
        """Let the engine step, or forget its gradients: it would apply those that are not finite."""
        if finite:
            self._engine.step()
        else:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Forget gradients."""
        self._engine.optimizer.zero_grad()
        if self._offloads:
            for part in self._gradients():
                part.zero_()
        self._engine.optimizer.averaged_gradients = {}
        self._engine.optimizer.micro_step_id = (
            self._first_micro_step
        )  # or the next would be added to what is left

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """The engine has."""

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """As ``from_pretrained`` loads it, by the main process, to which cut weights are gathered one at a time."""
        if self._shares_weights:
            save_gathered(session, tokenizer, folder, is_main=self.is_main)
        elif self.is_main:
            save_trained(session, tokenizer, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """By the main process, to which the state is gathered a parameter at a time: as one process writes it."""
        assert self._state is not None, "there is an engine"
        problem: Exception | None = None
        try:
            self.save_trained(session, tokenizer, folder)
        except Exception as error:  # whatever it is: the others would wait for what is not gathered here
            problem = error
        write_state(self._state.tensors(), folder, writes=self.is_main and problem is None)
        if problem is not None:
            raise problem
        return self._state.scalars()

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """From what one process wrote, or several."""
        assert self._state is not None, "there is an engine"
        session.techniques.load(folder)
        self._state.load(saved_state(folder, optimizer_scalars), weights_saved_in(folder))


def _gather_head_with_model(model: PreTrainedModel) -> None:
    """Have the engine gather the head's weight in backward, too, where it is used outside its own module's forward."""
    head = model.get_output_embeddings()
    if head is not None:
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.zero.register_external_parameter(model, head.weight)


def _offload(config: TrainingConfig, distributed: DistributedConfig) -> dict[str, Any]:
    """What waits on the host, where torch's AdamW makes the updates: DeepSpeed's own there would be compiled first."""
    if not distributed.cpu_offload:
        return {}
    on_host = {"device": "cpu", "pin_memory": not config.use_cpu}
    of_weights = {"offload_param": on_host} if distributed.strategy == "zero3" else {}
    return {"offload_optimizer": on_host, **of_weights}


_BUCKET_ELEMENTS = 50_000_000
"""Of what goes over the link together: 200 MB in float32. DeepSpeed's own 500 million would be 2 GB in each process."""


def _configuration(config: TrainingConfig, distributed: DistributedConfig) -> dict[str, Any]:
    """The engine's, of what the recipe says; weights are float32."""
    return {
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "zero_optimization": {
            "stage": 3 if distributed.strategy == "zero3" else 2,
            "reduce_bucket_size": _BUCKET_ELEMENTS,
            "allgather_bucket_size": _BUCKET_ELEMENTS,
            **_offload(config, distributed),
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": False},
        "steps_per_print": 2**31,
    }
