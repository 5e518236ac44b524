"""Training runs that others have measured on a GPU and published, as programs for the virtual one.

Each is a short loop over a LoRA model: its settings are data, its numbers lie in ``tests/data/measured/public-*.json``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import peft  # pyright: ignore[reportMissingImports]  # an optional package
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.integrations import replace_with_bnb_linear

from lowmem_ft.memory.caching_allocator import CachingAllocator
from lowmem_ft.memory.replay import replay
from lowmem_ft.models import ModelConfig
from lowmem_ft.models.architecture import catalogue_config
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

NUM_STEPS = 3
_CLEARS_CACHE_SINCE = (0, 20)
"""PEFT's preparation of quantised models gives cached memory back since then."""


@dataclass(frozen=True, kw_only=True)
class PublicRun:
    """What decides the memory of a run.

    Args:
        gpu: name in the catalogue.
        model: name in the catalogue.
        dtype: of the weights, and of 4-bit products.
        quantization: of the linear layers but the head: ``none``, ``nf4`` or ``nf4-double``.
        lora_rank: adapters are in float32, on all of ``target_modules``.
        target_modules: names of linear layers.
        attention: ``eager``, or ``sdpa-efficient``: the memory-efficient kernel, with keys repeated where heads share.
        batch_size: sequences in a batch, all of one length.
        length: tokens in a sequence.
        peft: version that it ran with.
    """

    gpu: str
    model: str
    dtype: str
    quantization: str
    lora_rank: int
    target_modules: tuple[str, ...]
    attention: str
    batch_size: int
    length: int
    peft: str

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> PublicRun:
        """The run of a row of ``public-*.json``."""
        settings = dict(row["settings"])
        targets = tuple(settings.pop("target_modules"))
        return cls(**settings, gpu=row["gpu"], target_modules=targets, peft=row["versions"]["peft"])


def estimate_run(run: PublicRun) -> dict[str, Any]:
    """The peaks of a run in bytes: allocated by phase and of all steps, reserved, and of the process."""
    with VirtualGPU(run.gpu) as gpu:
        loaded, *moments = _train(run, gpu)
    report = gpu.report()
    replayed = replay(gpu.recorder.timeline, CachingAllocator())
    steps = [moments[first : first + 4] for first in range(0, len(moments), 4)]

    def peak(begin: int, end: int) -> int:
        return max(replayed.allocated_bytes[begin - 1 : end])

    forward, backward, step, end = steps[-1]
    return {
        "allocated": {
            "load": replayed.allocated_bytes[loaded - 1],
            "forward": peak(forward, backward),
            "backward": peak(backward, step),
            "optimizer_step": peak(step, end),
            "run": peak(steps[1][0], end),
        },
        "reserved": report.reserved_peak_bytes,
        "process": report.process_peak_bytes,
    }


def _train(run: PublicRun, gpu: VirtualGPU) -> list[int]:
    """Run the loop; the moment at which the model is there, then for each step those of its phases and of its end."""
    model = _build(run, gpu)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    moments: list[int] = []

    def note() -> None:
        moments.append(len(gpu.recorder.timeline.events))

    def step() -> None:  # its logits go when it returns
        optimizer.zero_grad(set_to_none=True)
        note()
        output = model(input_ids=tokens, labels=tokens)
        note()
        output.loss.backward()
        note()
        optimizer.step()
        note()

    note()
    vocabulary = model.config.vocab_size
    tokens = torch.randint(0, vocabulary, (run.batch_size, run.length), device=gpu.device)
    with _attention(run):
        for _ in range(NUM_STEPS):
            step()
    return moments


def _build(run: PublicRun, gpu: VirtualGPU) -> Any:
    model = _on_meta(run)
    if run.quantization != "none":
        gpu.warm_up_allocator(_bytes_of_checkpoint(model))
    model = gpu.place(model)
    model.config.use_cache = False
    if run.quantization != "none":
        version = tuple(map(int, run.peft.split(".")[:2]))
        model = peft.prepare_model_for_kbit_training(
            model, use_gradient_checkpointing=True, auto_clear_cache=version >= _CLEARS_CACHE_SINCE
        )
    config = peft.LoraConfig(
        r=run.lora_rank, target_modules=list(run.target_modules), task_type="CAUSAL_LM", lora_dropout=0.0
    )
    adapted: Any = peft.get_peft_model(model, config)
    adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted.enable_input_require_grads()
    return adapted.train()


def _on_meta(run: PublicRun) -> PreTrainedModel:
    dtype: torch.dtype = getattr(torch, run.dtype)
    config = catalogue_config(ModelConfig(name_or_path=run.model))
    attention = "eager" if run.attention == "eager" else "sdpa"
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
    """As ``from_pretrained`` counts them: half a byte for a quantised weight, a tied head once."""
    sizes = (
        parameter.numel() / 2 if type(parameter).__name__ == "Params4bit" else parameter.nbytes
        for parameter in model.parameters()
    )
    return int(sum(sizes))


@contextlib.contextmanager
def _attention(run: PublicRun) -> Iterator[None]:
    if run.attention == "eager":
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
