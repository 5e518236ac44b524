"""vLLM in a trainer of TRL (``use_vllm=True``): it is not run, and its memory is what the trainer's arguments say.

Its completions are as long as they may be. In the trainer's process (``vllm_mode="colocate"``) it takes a share of the
GPU's memory, which counts as held by another program while it is awake; what synchronises the weights is run up to
where vLLM would copy them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.virtual_gpu.calls.work import FOREIGN_BEGIN, FOREIGN_END
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.upstream.coarse_decoding import plain_token

_MODULE, _CLASS = "trl.generation.vllm_generation", "VLLMGeneration"


class VllmShare:
    """Stands for vLLM in the trainers of a script.

    Args:
        machine: the machine that the script runs on.

    Attributes:
        share: share of the GPU's memory that vLLM takes while it is awake; 0: it is not there.
        sleeps: whether it is awake only while it generates.
    """

    def __init__(self, machine: TracingMachine) -> None:
        self._machine = machine
        self.share = 0.0
        self.sleeps = False

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Stand for vLLM from now on, until the stack is undone."""
        for name, around in (
            ("_init_vllm", self._start),
            ("sync_weights", self._synchronize),
            ("generate", self._generate),
        ):
            wrap_when_imported(undo, _MODULE, _CLASS, name, around)
        # This trainer asks before it makes a VLLMGeneration.
        module = "trl.trainer.distillation_trainer"
        wrap_when_imported(undo, module, "", "is_vllm_available", lambda *args, **kwargs: True)

    def left_on(self, gpu: Gpu, replays: Replays) -> Gpu:
        """Return a GPU without what vLLM takes of it at the moment when both take the most.

        Args:
            gpu: the GPU.
            replays: those of the script's trace on such a GPU.
        """
        own = self._own_bytes(gpu)
        if not own:
            return gpu
        unlimited, awake = replays.unlimited, replays.trace.foreign
        beside = max(
            0, own + _most_in(awake, unlimited.reserved_bytes) - max(unlimited.reserved_bytes, default=0)
        )
        if own + _most_in(awake, unlimited.allocated_bytes) > gpu.available_bytes:
            beside = own  # no room that training leaves at other times helps
        return dataclasses.replace(gpu, held_by_others_bytes=(gpu.held_by_others_bytes or 0) + beside)

    def in_words(self, gpu: Gpu | None) -> str:
        """Return what vLLM takes of a GPU; empty if it is not there."""
        if gpu is None or not self.share:
            return ""
        when = (
            "while it generates. Then it sleeps at level 2, which leaves nothing on the GPU or the host, and the "
            "weights are copied to it again"
            if self.sleeps
            else "all the time; vllm_enable_sleep_mode=True would give it back while training"
        )
        return (
            f"vLLM: {format_bytes(self._own_bytes(gpu))} of the GPU are its own, as vllm_gpu_memory_utilization="
            f"{self.share:g} says, {when}"
        )

    def _own_bytes(self, gpu: Gpu) -> int:
        return int(self.share * gpu.memory_bytes)

    def _start(self, start: object, vllm: Any) -> None:
        length = vllm.max_completion_length
        self._machine.say(
            f"generation: not run, as vLLM does it; each completion is assumed to have {length:,} tokens "
            "(max_completion_length), and seconds and costs are without its own"
        )
        vllm.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )
        vllm._llm_weights_sleeping = vllm.enable_sleep_mode
        if vllm.mode == "server":
            self._machine.say("vLLM: on a server (vllm_mode=server), with nothing on this GPU")
            return
        if vllm.tensor_parallel_size != 1:
            raise UserError(
                f"vllm_tensor_parallel_size must be 1 in one process, got {vllm.tensor_parallel_size}: an estimate of "
                "a script is of one process."
            )
        most = vllm.max_model_length or vllm.model.config.max_position_embeddings
        vllm.llm = SimpleNamespace(
            llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=most))
        )
        self.share, self.sleeps = vllm.gpu_memory_utilization, vllm.enable_sleep_mode
        self._machine.work.mark(FOREIGN_BEGIN)
        if self.sleeps:
            self._machine.work.mark(FOREIGN_END)

    def _synchronize(self, synchronize: object, vllm: Any) -> None:
        if self._is_asleep(vllm):
            torch.cuda.empty_cache()
            self._machine.work.mark(FOREIGN_BEGIN)
            vllm._llm_weights_sleeping = False
        for _ in vllm._iter_named_params():
            pass  # adapters are merged meanwhile

    def _generate(
        self, generate: object, vllm: Any, prompts: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, list[list[int]], Any, None]:
        if self._is_asleep(vllm):
            self._synchronize(generate, vllm)
        number = vllm.max_completion_length
        token = plain_token(vllm.model.config, vllm.model.generation_config)
        if vllm.mode == "colocate" and vllm.enable_sleep_mode:
            self._machine.work.mark(FOREIGN_END)
            vllm._llm_weights_sleeping = True
        logprobs = None if vllm.logprobs is None else [[[0.0]] * number for _ in prompts]
        return prompts, [[token] * number for _ in prompts], logprobs, None

    def _is_asleep(self, vllm: Any) -> bool:
        return vllm.mode == "colocate" and vllm.enable_sleep_mode and vllm._llm_weights_sleeping


def _most_in(stretches: Iterable[tuple[int, int]], bytes_after: Sequence[int]) -> int:
    """Return the largest of the bytes after each event, in some stretches and just before them."""
    return max((max(bytes_after[max(0, begin - 1) : end], default=0) for begin, end in stretches), default=0)
