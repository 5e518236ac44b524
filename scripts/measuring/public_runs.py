"""Training runs that others have measured on a GPU and published, as programs for the virtual one.

Each is a short loop: its settings are data, its numbers are in ``tests/data/measured/public-*.json``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import bitsandbytes  # pyright: ignore[reportMissingImports]  # an optional package
import peft  # pyright: ignore[reportMissingImports]  # an optional package
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import replace_with_bnb_linear

from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import replay
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.architecture import catalogue_config
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.techniques.kernels.fused_operators import Kernels, enable_fused_operators
from lowmem_ft.virtual_gpu.calls.work import STEP_END
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

_CLEARS_CACHE_SINCE = (0, 20)
"""The version since which PEFT's preparation of quantised models gives cached memory back."""


@dataclass(frozen=True, kw_only=True)
class PublicRun:
    """The settings of a run on which its memory depends.

    Args:
        gpu: name in the catalogue.
        model: name in the catalogue.
        dtype: type of the weights, and of 4-bit products.
        quantization: format of the linear layers except the head: ``none``, ``nf4`` or ``nf4-double``.
        adapter: fields of a PEFT config; None: all is trained.
        adapter_dtype: ``float32``, as PEFT has a method's own weights, or ``weights``: the type of the weights.
        kernels: ``liger`` for Liger's norms, rotary embeddings and gated activations, or ``none``.
        attention: ``eager``, ``sdpa``, ``flash_attention_2``, or ``sdpa-efficient``: only the memory-efficient kernel,
            with keys repeated if heads share them.
        batch_size: sequences in a batch.
        length: tokens of the longest sequence in a batch.
        padding: tokens of padding in each sequence; None: all are of one length and there is no mask.
        checkpointing: ``full`` or ``none``.
        optimizer: ``adamw``, bitsandbytes' ``paged-adamw-8bit``, or ``none``: forward and backward passes alone.
        max_grad_norm: limit of clipping; None: gradients are not clipped.
        keeps_output: whether a step's logits live until the next step has its own.
        num_steps: number of optimizer steps.
        peft: version that it ran with; None: not published.
        prepared: whether PEFT prepares a quantised model: norms, embeddings and head in float32.
        autocast: whether the forward pass runs under autocast to ``dtype``.
        num_layers: layers of the model; None: all that it has.
    """

    gpu: str
    model: str
    dtype: str
    quantization: str = "none"
    adapter: Mapping[str, Any] | None = None
    adapter_dtype: str = "float32"
    kernels: Kernels = "none"
    attention: str = "sdpa"
    batch_size: int
    length: int
    padding: tuple[int, ...] | None = None
    checkpointing: str = "full"
    optimizer: str = "adamw"
    max_grad_norm: float | None = None
    keeps_output: bool = False
    num_steps: int = 3
    peft: str | None = None
    prepared: bool = True
    autocast: bool = False
    num_layers: int | None = None

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> PublicRun:
        """Make the run of a row of ``public-*.json``."""
        settings = dict(row["settings"])
        padding = settings.pop("padding", None)
        return cls(
            **settings,
            gpu=row["gpu"],
            padding=None if padding is None else tuple(padding),
            peft=row["versions"].get("peft"),
        )


def estimate_run(run: PublicRun) -> tuple[MemoryEstimate, dict[str, int]]:
    """Return a run's estimate, and its peaks of allocated bytes: by phase of the last step, and after the first."""
    with VirtualGPU(run.gpu) as gpu:
        loaded, *moments = train(run, gpu)
    replayed = replay(gpu.recorder.timeline, CachingAllocator())
    steps = [moments[first : first + 4] for first in range(0, len(moments), 4)]

    def peak(begin: int, end: int) -> int:
        return max(replayed.allocated_bytes[begin - 1 : end])

    forward, backward, step, end = steps[-1]
    return gpu.report(), {
        "load": replayed.allocated_bytes[loaded - 1],
        "forward": peak(forward, backward),
        "backward": peak(backward, step),
        "optimizer_step": peak(step, end),
        "run": peak(steps[1][0], end),
    }


def train(run: PublicRun, gpu: VirtualGPU) -> list[int]:
    """Run the loop; return the moment when the model is loaded, then each step's moments of its phases and its end."""
    model = _build(run, gpu)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None if run.optimizer == "none" else _optimizer(run, trained)
    batch = _batch(run, model.config.vocab_size, gpu.device)
    moments: list[int] = []

    def note() -> None:
        moments.append(len(gpu.recorder.timeline.events))

    def step() -> None:
        model.zero_grad(set_to_none=True)
        note()
        with torch.autocast("cuda", getattr(torch, run.dtype), enabled=run.autocast):
            kept["output"] = model(**batch)  # the output of the step before lives until here
        note()
        kept["output"].loss.backward()
        note()
        if run.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, run.max_grad_norm)
        if optimizer is None:
            gpu.work.mark(STEP_END)
        else:
            optimizer.step()
        note()
        if not run.keeps_output:
            kept.clear()

    kept: dict[str, Any] = {}
    note()
    with _attention(run):
        for _ in range(run.num_steps):
            step()
    return moments


def _optimizer(run: PublicRun, trained: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if run.optimizer == "paged-adamw-8bit":
        return bitsandbytes.optim.PagedAdamW8bit(trained, lr=2e-4)
    return torch.optim.AdamW(trained, lr=1e-4)


def _batch(run: PublicRun, vocabulary: int, device: torch.device) -> dict[str, Any]:
    tokens = torch.randint(0, vocabulary, (run.batch_size, run.length), device=device)
    if run.padding is None:
        return {"input_ids": tokens, "labels": tokens}
    mask = torch.ones(run.batch_size, run.length, dtype=torch.long)
    for row, padding in enumerate(run.padding):
        mask[row, run.length - padding :] = 0
    mask = mask.to(device)
    labels = tokens.clone()
    labels[mask == 0] = -100
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def _build(run: PublicRun, gpu: VirtualGPU) -> Any:
    model = model_on_meta(run)
    if run.quantization != "none":
        gpu.warm_up_allocator(_bytes_of_checkpoint(model))
    model = gpu.place(model)
    model.config.use_cache = False
    checkpoints = run.checkpointing == "full"
    if run.quantization != "none" and run.prepared:
        clears_cache = run.peft is not None and _numbers(run.peft) >= _CLEARS_CACHE_SINCE
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=checkpoints, auto_clear_cache=clears_cache
        )
    if run.adapter is not None:
        fields = dict(run.adapter)
        config_of_method = peft.PEFT_TYPE_TO_CONFIG_MAPPING[fields.pop("peft_type")]
        model = peft.get_peft_model(
            model,
            config_of_method(task_type="CAUSAL_LM", **fields),
            autocast_adapter_dtype=run.adapter_dtype == "float32",
        )
    dtype: torch.dtype = getattr(torch, run.dtype)
    enable_fused_operators(model, run.kernels, device=gpu.device, compute_dtype=dtype)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def model_on_meta(run: PublicRun) -> PreTrainedModel:
    """Return a run's model without values, its linear layers replaced if they are quantised."""
    dtype: torch.dtype = getattr(torch, run.dtype)
    config: Any = catalogue_config(ModelConfig(name_or_path=run.model))
    if run.num_layers is not None:
        config.num_hidden_layers = run.num_layers
        if getattr(config, "layer_types", None) is not None:
            config.layer_types = config.layer_types[: run.num_layers]
    attention = "sdpa" if run.attention == "sdpa-efficient" else run.attention
    with torch.device("meta"), _default_dtype(dtype):  # the checkpoint's type, which 4-bit weights remember
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if run.quantization != "none":
            quantization = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_compute_dtype=dtype,
                bnb_4bit_use_double_quant=run.quantization == "nf4-double",
            )
            replace_with_bnb_linear(model, ["lm_head"], quantization)
            model.is_loaded_in_4bit = True
    return model


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _bytes_of_checkpoint(model: PreTrainedModel) -> int:
    """Count bytes as ``from_pretrained`` does: half a byte for a quantised weight, a tied head once."""
    sizes = (
        parameter.numel() / 2 if type(parameter).__name__ == "Params4bit" else parameter.nbytes
        for parameter in model.parameters()
    )
    return int(sum(sizes))


@contextlib.contextmanager
def _attention(run: PublicRun) -> Iterator[None]:
    if run.attention != "sdpa-efficient":
        yield
        return
    attend = F.scaled_dot_product_attention

    def with_repeated_keys(
        query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **kwargs: Any
    ) -> Tensor:
        times = query.size(-3) // key.size(-3)
        if times > 1:
            key, value = key.repeat_interleave(times, dim=-3), value.repeat_interleave(times, dim=-3)
        return attend(query, key, value, *args, **kwargs)

    F.scaled_dot_product_attention = with_repeated_keys
    try:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            yield
    finally:
        F.scaled_dot_product_attention = attend
