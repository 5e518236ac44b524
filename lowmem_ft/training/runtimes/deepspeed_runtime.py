"""A run under DeepSpeed, which shards gradients and optimizer state: ZeRO-2, and ZeRO-3 with weights.

The engine wraps torch's AdamW in its own optimizer, sums gradients and clips them; lowmem_ft does the forward pass, the
rest of the step, and the files. The ranks mark the end of each window for the engine, which would count
micro-batches by itself.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin, patch_environment
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from lowmem_ft.foundation.devices import with_index
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.techniques.distributed.config import ONE_PROCESS, DistributedConfig
from lowmem_ft.techniques.gradients.norm import norm_in_float32
from lowmem_ft.training.folder.run_files import saved_state, weights_saved_in, write_state
from lowmem_ft.training.processes.launch import processes_here
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.accelerate_runtime import (
    AccelerateFiles,
    AccelerateRanks,
    leave_processes_at_exit,
    make_accelerator,
    refuse_another_launch,
)
from lowmem_ft.training.runtimes.deepspeed_state import EngineState
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.runtimes.values import Values
from lowmem_ft.training.step.machine import Machine
from lowmem_ft.training.step.session import Session


class _Engine:
    """DeepSpeed's engine, once it has the model and the optimizer.

    Args:
        accelerator: an accelerator with a DeepSpeed plugin.
        distributed: as launched; ``strategy`` is zero2 or zero3.
    """

    def __init__(self, accelerator: Accelerator, distributed: DistributedConfig) -> None:
        self._accelerator = accelerator
        self._holds_part = distributed.plan().shares_weights
        self._offloads = bool(distributed.cpu_offload)
        self._engine: Any = None
        self._state: EngineState | None = None
        self._first_micro_step = 0

    def take(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Pass model and optimizer to the engine; return what the step calls in place of them."""
        self._state = EngineState(model, optimizer)
        self._engine, prepared = self._accelerator.prepare(model, optimizer)
        if self._holds_part:
            _gather_head_with_model(cast(PreTrainedModel, model))
        self._state.of(self._engine.optimizer)
        self._first_micro_step = self._engine.optimizer.micro_step_id
        vars(model).pop("_is_accelerate_prepared", None)
        return self._engine, prepared

    @property
    def state(self) -> EngineState:
        """The state of the optimizer and the float32 weights."""
        assert self._state is not None, "there is an engine"
        return self._state

    def end_window(self, *, is_last: bool) -> None:
        """Tell the engine whether the micro-batch that begins ends a window."""
        self._engine.set_gradient_accumulation_boundary(is_boundary=is_last)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine's backward, which averages over processes."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield this process's part of each gradient, of which no other process has a copy."""
        if self._offloads:
            parts = (part.grad for part in self.state.flat_parts())
            yield from (part for part in parts if part is not None)
            return
        for group in self._engine.optimizer.averaged_gradients.values():
            yield from (part for part in group or () if part is not None and part.numel())

    def step(self) -> None:
        """Clip the gradients and step."""
        self._engine.step()

    def discard_gradients(self) -> None:
        """Discard the gradients of this window."""
        self._engine.optimizer.zero_grad()
        if self._offloads:
            for part in self.gradients():
                part.zero_()
        self._engine.optimizer.averaged_gradients = {}
        # Else the next gradients would be added to the old ones.
        self._engine.optimizer.micro_step_id = self._first_micro_step


class _DeepSpeedRanks(AccelerateRanks):
    """The processes of DeepSpeed; :class:`AccelerateRanks` has the other arguments.

    Args:
        engine: takes the model, and sums its gradients.
    """

    def __init__(
        self, accelerator: Accelerator, device: torch.device, distributed: DistributedConfig, engine: _Engine
    ) -> None:
        super().__init__(accelerator, device, distributed)
        self._engine = engine

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Pass model and optimizer to the engine."""
        return self._engine.take(model, optimizer)

    def micro_batch(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Tell the engine whether this micro-batch ends a window."""
        self._engine.end_window(is_last=is_last)
        return contextlib.nullcontext()


class _DeepSpeedMachine(Machine):
    """A device whose backward and update are the engine's.

    Args:
        device: the device of this process.
        ranks: the processes that the engine averages over.
        engine: the engine.
    """

    def __init__(self, device: torch.device, ranks: Ranks, engine: _Engine) -> None:
        super().__init__(device, num_processes_here=processes_here(ranks.num_processes))
        self._ranks, self._engine = ranks, engine

    def backward(self, loss: torch.Tensor) -> None:
        """Run the engine's backward, which averages over processes; the loss is already normalised by its window."""
        self._engine.backward(loss * self._ranks.plan.in_all(1))

    def clip_grad_norm(
        self, optimizer: torch.optim.Optimizer, max_norm: float, loss: torch.Tensor
    ) -> torch.Tensor:
        """Return the global norm of the engine's gradients; the engine itself clips them in its step."""
        squares = [norm_in_float32(part).square() for part in self._engine.gradients()]
        here = torch.stack(squares).sum() if squares else torch.zeros((), device=self.device)
        return self._ranks.sum(here).sqrt()

    def update_weights(self, optimizer: torch.optim.Optimizer, is_finite: Callable[[], bool]) -> None:
        """Step the engine, or discard its gradients if they are not finite: the engine would apply them."""
        if is_finite():
            self._engine.step()
        else:
            self.abandon_step()

    def abandon_step(self) -> None:
        """Discard the engine's gradients."""
        self._engine.discard_gradients()


class _DeepSpeedFiles(AccelerateFiles):
    """The files of the engine's model and state; :class:`AccelerateFiles` has the other arguments.

    Args:
        engine: has the optimizer's state.
    """

    def __init__(self, ranks: Ranks, accelerator: Accelerator, engine: _Engine) -> None:
        super().__init__(ranks, accelerator)
        self._engine = engine

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write a single process's files in the main process, to which state is gathered a parameter at a time."""
        state, problem = self._engine.state, None
        try:
            self.save_trained(session, tokenizer, folder)
        except Exception as error:
            # Of any type: the other processes would wait for what this one does not gather.
            problem = error
        write_state(state.tensors(), folder, writes=self._ranks.is_main and problem is None)
        if problem is not None:
            raise problem
        return state.scalars()

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Restore adapters and optimizer state from files that one process wrote, or several."""
        state = self._engine.state
        session.techniques.load(folder)
        state.load(saved_state(folder, optimizer_scalars), weights_saved_in(folder))


def deepspeed_runtime(
    config: TrainingConfig, output_dir: Path, distributed: DistributedConfig = ONE_PROCESS
) -> Runtime:
    """Join the other processes of the launcher.

    Accelerate silently ignores DeepSpeed with ``cpu=True``: this function does not pass it, and checks the result.

    Raises:
        MissingPackageError: if DeepSpeed or a tracker of ``training.report_to`` is not installed.
        UserError: if Accelerate interprets the launch differently than the recipe says.
    """
    require_package(f"distributed.strategy={distributed.strategy}", "deepspeed", "deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed 0.19's own calls raise this warning, each time; torch 2.13 still has the names.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    if config.use_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when deepspeed is imported
    if config.use_cpu:
        PartialState(cpu=True)  # joins the processes; the Accelerator below reuses this state
    with patch_environment(
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_USE_FSDP="false",
        # The configuration file was read and checked before; Accelerate would regard it as contradicting ours.
        ACCELERATE_CONFIG_DS_FIELDS="",
        # Else Accelerate compares its own value with the engine's, and warns.
        ACCELERATE_GRADIENT_ACCUMULATION_STEPS=config.gradient_accumulation_steps,
    ):
        plugin = DeepSpeedPlugin(hf_ds_config=_configuration(config, distributed), zero3_init_flag=False)
        accelerator = make_accelerator(config, output_dir, deepspeed_plugin=plugin)
    # Else transformers would shard weights while reading them, before the techniques have seen them.
    unset_hf_deepspeed_config()
    refuse_another_launch(accelerator, distributed, ("DEEPSPEED",))
    leave_processes_at_exit()
    engine, device = _Engine(accelerator, distributed), with_index(accelerator.device)
    ranks = _DeepSpeedRanks(accelerator, device, distributed, engine)
    machine = _DeepSpeedMachine(device, ranks, engine)
    files = _DeepSpeedFiles(ranks, accelerator, engine)
    return Runtime(machine=machine, ranks=ranks, files=files, values=Values(machine, ranks))


def _gather_head_with_model(model: PreTrainedModel) -> None:
    """Register the head's weight, so that the engine gathers it in backward outside its own module's forward, too."""
    head = model.get_output_embeddings()
    if head is not None:
        deepspeed = importlib.import_module("deepspeed")
        deepspeed.zero.register_external_parameter(model, head.weight)


def _offload(config: TrainingConfig, distributed: DistributedConfig) -> dict[str, Any]:
    """Return the settings of CPU offload; torch's AdamW makes the updates, as DeepSpeed's would have to be compiled."""
    if not distributed.cpu_offload:
        return {}
    on_host = {"device": "cpu", "pin_memory": not config.use_cpu}
    of_weights = {"offload_param": on_host} if distributed.plan().shares_weights else {}
    return {"offload_optimizer": on_host, **of_weights}


_BUCKET_ELEMENTS = 50_000_000
"""Elements per communication bucket: 200 MB in float32. DeepSpeed's default, 500 million, takes 2 GB per process."""


def _configuration(config: TrainingConfig, distributed: DistributedConfig) -> dict[str, Any]:
    """Return the engine's configuration for a recipe; weights are float32."""
    return {
        "train_micro_batch_size_per_gpu": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm or 0.0,
        "zero_optimization": {
            "stage": 3 if distributed.plan().shares_weights else 2,
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
