"""The model to train: its source, type and quantisation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.knob import NO_EFFECT, Effect, knob
from lowmem_ft.foundation.memory.least_memory import PARTS, Held, StepFacts, as_it_is
from lowmem_ft.foundation.packages import require_package

_IN_16_BITS = Effect(fidelity="unbiased rounding")
_QUANTIZED = Effect(cost="time", fidelity="other mathematics")

_QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1.0}
"""Bytes of an element without its scales."""


def _quantized(held: Held, value: str, step: StepFacts) -> Held:
    as_stored = step.packed_itemsize if value == "none" else None
    itemsize = _QUANTIZED_BYTES.get(value, as_stored or step.weight_itemsize)
    return held.scaled(itemsize / step.weight_itemsize)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model and its tokenizer: any HuggingFace causal LM by hub id, local folder or GGUF file."""

    name_or_path: str | None = knob(
        None, "Hub id, name from `lowmem-ft models`, local folder, or a .gguf file."
    )
    revision: str | None = knob(None, "Hub branch, tag or commit; null: the default branch.")
    gguf_file: str | None = knob(None, "Name of the .gguf file inside the hub repository or folder.")
    tokenizer_name_or_path: str | None = knob(
        None, ("Hub id or folder of another tokenizer; null: the model's own.")
    )
    add_tokens: tuple[str, ...] = knob(
        (),
        "New tokens, in the tokenizer and as rows of the embedding and head, drawn around the mean of the others by "
        "training.seed. Adapters need adapter.train_new_tokens=true, or "
        "adapter.modules_to_save=[embed_tokens, lm_head], to train them.",
    )
    add_special_tokens: tuple[str, ...] = knob(
        (), "The same for special tokens, which decoding may skip: [<|im_start|>, <|im_end|>]."
    )
    weights: Literal["pretrained", "random"] = knob(
        "pretrained",
        "random: initialise from the config alone, seeded by training.seed (tests, pretraining).",
    )
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = knob(
        "float32",
        "Type of the weights; auto: the checkpoint's own.",
        frees="in 16 bits, 2 bytes a parameter for weights and 2 for gradients",
        costs=(
            "bfloat16: activations and gradients have 8 bits of precision; it needs master weights (see "
            "optimizer.master)"
        ),
        effects={"bfloat16": _IN_16_BITS, "float16": _IN_16_BITS, "auto": _IN_16_BITS},
        search_values=("float32", "bfloat16", "float16"),
        remaining_bytes=dict.fromkeys(PARTS, as_it_is),
    )
    quantization: Literal["none", "nf4", "int8", "dequantize"] = knob(
        "none",
        "Frozen weights of the decoder layers in 4 bits (NF4, double quantisation; fused experts, too) or 8 "
        "(LLM.int8); needs an adapter. none: as the checkpoint has them: one in MXFP4 or blockwise FP8 stays packed, "
        "and needs an adapter, too; dequantize: such a one is unpacked to model.dtype.",
        frees="nf4: 1.48 of 2 bytes a weight of a linear layer; int8: 1",
        costs="rounded weights, unpacked for each use",
        effects={
            "nf4": dataclasses.replace(_QUANTIZED, consent="qlora"),
            "int8": dataclasses.replace(_QUANTIZED, consent="qlora", engines=("ddp",)),
            "dequantize": NO_EFFECT,  # of the values: plain weights, which take what any others take
        },
        search_values=("none", "nf4"),
        remaining_bytes={"layers": _quantized, "gathered": _quantized},
    )
    quantize_partly: bool = knob(
        False, "Accept that model.quantization leaves more than 5% of the decoder's weights in their type."
    )
    attn_implementation: Literal[
        "auto", "varlen_attn", "sdpa", "flash_attention_2", "flex_attention", "eager"
    ] = knob(
        "auto",
        "Attention kernel; auto picks the available one that needs least memory and logs why. varlen_attn: torch's "
        "own flash kernel, which needs no mask for packed rows.",
        search_values=("auto",),
    )
    kernels: Literal["auto", "liger", "none"] = knob(
        "none",
        "Kernels of norms, rotary embeddings and gated activations; liger: one fused kernel each, of the package "
        "liger-kernel; auto: those of them that agree with transformers' own in a trial on the device; none: "
        "transformers' own.",
        frees="most of what a norm, a rotary embedding and a gated activation keep for backward, and temporaries",
        costs="nothing: fewer, larger kernels; fewer roundings",
        effects=dict.fromkeys(("auto", "liger"), Effect(engines=("ddp", "fsdp2"))),
        remaining_bytes=dict.fromkeys(PARTS, as_it_is),
        is_kernel=True,
    )
    trust_remote_code: bool = knob(False, "Run Python code from the model's repository; also pin a revision.")

    @property
    def is_gguf(self) -> bool:
        """True if the weights are in a GGUF file."""
        return self.gguf_file is not None or (self.name_or_path or "").endswith(".gguf")

    @property
    def quantizes(self) -> bool:
        """True if plain weights are rounded to fewer bits while they are read, by bitsandbytes."""
        return self.quantization in _QUANTIZED_BYTES

    @property
    def new_tokens(self) -> tuple[str, ...]:
        """All tokens to add, special or not."""
        return (*self.add_tokens, *self.add_special_tokens)

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        tokens = self.new_tokens
        if twice := sorted({token for token in tokens if tokens.count(token) > 1}):
            yield (
                f"model.add_tokens and model.add_special_tokens name each token once, got {', '.join(twice)} twice. "
                "Leave one out."
            )
        if any(not token.strip() for token in tokens):
            yield f"model.add_tokens names tokens with characters, got {list(tokens)}. Leave the empty one out."

    def require_packages(self) -> None:
        """Reject quantisation, kernels or a GGUF file if the package for it is not installed.

        Raises:
            MissingPackageError: if it is not installed.
        """
        if self.quantizes:
            require_package(f"model.quantization={self.quantization}", "bitsandbytes", "bitsandbytes")
        if self.kernels == "liger":
            require_package(f"model.kernels={self.kernels}", "liger-kernel", "liger")
        if self.is_gguf:
            require_package("A GGUF model", "gguf", "gguf")
