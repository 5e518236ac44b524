"""Rules that people use for the memory of fine-tuning, written down from their sources.

Each takes a run's model and settings and returns bytes, or None where the rule has no answer. None of them is code of
its source: `tests/scripts/test_proof_page.py` compares them with numbers that the sources publish or print.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from lowmem_ft.foundation.catalog.model_architectures import Architecture
from lowmem_ft.foundation.units import MIB

PEFT_TARGETS = ("q_proj", "v_proj")
"""Layers that PEFT 0.21 adapts in a Llama where its config names none."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that the rules ask of a run, apart from its model.

    Args:
        gpu: name in the catalogue.
        method: ``full``, ``lora`` or ``other adapter``.
        bits: bits of a frozen weight, 4 or 16; 16 in full fine-tuning.
        rank: rank of the adapter; 0 without one.
        targets: names of the linear layers that have an adapter.
        rows: sequences in a micro-batch.
        length: tokens of a sequence.
        checkpointing: whether each layer is checkpointed.
        eager: whether attention scores are stored.
        adam_bytes: bytes of AdamW's two moments of a parameter.
        double_quant: whether the scales of 4-bit blocks are quantised, too.
    """

    gpu: str
    method: str
    bits: int
    rank: int
    targets: tuple[str, ...]
    rows: int
    length: int
    checkpointing: bool
    eager: bool
    adam_bytes: int
    double_quant: bool


@dataclass(frozen=True, kw_only=True)
class Formula:
    """One rule.

    Args:
        title: heading of its column.
        words: the rule in words, as Markdown.
        source: the page or file that states it.
        num_bytes: the rule; None where it says nothing.
        is_minimum: whether its source calls the number a minimum.
    """

    title: str
    words: str
    source: str
    num_bytes: Callable[[Architecture, Settings], float | None]
    is_minimum: bool = False


def size(model: Architecture, field: str, default: int | None = None) -> int:
    """Return a field of a model's config.

    Raises:
        KeyError: if the config lacks it and there is no default.
    """
    value = model.text_config.get(field)
    value = default if value is None else value
    if value is None:
        raise KeyError(f"the config of {model.name} has no {field}")
    return int(value)


def _embedding(model: Architecture) -> int:
    """Return the parameters of the embedding, the largest module of every model of the page."""
    return size(model, "vocab_size") * size(model, "hidden_size")


def of_full(rule: Callable[[Architecture], float]) -> Callable[[Architecture, Settings], float | None]:
    """Return a rule that counts every parameter as trained, asked of full fine-tuning alone."""
    return lambda model, settings: rule(model) if settings.method == "full" else None


def accelerate_estimate(parameters: int) -> float:
    """Return twice the float32 weights: the largest of its four parts for 16-bit training, AdamW's state."""
    return 8.0 * parameters


def deepspeed_zero2(parameters: int, num_gpus: int = 1) -> float:
    """Return the bytes of model states of ZeRO-2 on each GPU, without offload: every parameter counts as trained."""
    return 4.0 * parameters + 16.0 * parameters / num_gpus


def deepspeed_zero3(parameters: int, largest: int, num_gpus: int = 1) -> float:
    """Return the same of ZeRO-3; ``largest`` is the number of parameters of the largest module."""
    return 4.0 * largest + 18.0 * parameters / num_gpus


UNSLOTH_GIGABYTES = {
    3: (3.5, 8),
    7: (5, 19),
    8: (6, 22),
    9: (6.5, 24),
    11: (7.5, 29),
    14: (8.5, 33),
    27: (22, 64),
    32: (26, 76),
    40: (30, 96),
    70: (41, 164),
    81: (48, 192),
    90: (53, 212),
    405: (237, 950),
}
"""Billions of parameters: GB for QLoRA and for LoRA, as the table states them, called the absolute minimum."""


def unsloth_table(model: Architecture, settings: Settings) -> float | None:
    """Return the row of the model's size by its name; the table knows LoRA and QLoRA alone."""
    size = re.search(r"-(\d+)b\b", model.name)
    if settings.method != "lora" or size is None or int(size[1]) not in UNSLOTH_GIGABYTES:
        return None
    qlora, lora = UNSLOTH_GIGABYTES[int(size[1])]
    return 1e9 * (qlora if settings.bits == 4 else lora)


FITCHECK_T4 = {
    (True, 4): (0.6442, 0.7518),
    (True, 16): (0.5808, 0.8468),
    (False, 4): (1.9683, 1.9683),
    (False, 16): (1.3181, 1.3181),
}
"""Fragmentation by whether attention is eager and by bits, fitted by its author to T4 runs, the page's among them: a
share of the smaller of two peaks, where the logits are the larger one and where a layer's recomputation is."""
FITCHECK_SHARE = 0.05
"""Other GPUs: a share of weights and activations."""
FITCHECK_CONTEXT = {"t4": 140.875 * MIB}
FITCHECK_OTHER_CONTEXT = 500.0 * MIB
"""Bytes of the process outside the allocator, which FitCheck adds to both."""


def fitcheck(model: Architecture, settings: Settings) -> float | None:
    """Return FitCheck's total less the context that it adds: what the allocator reserves."""
    if settings.method == "other adapter":
        return None
    weights = _fitcheck_weights(model, settings)
    trained = model.num_parameters if settings.method == "full" else _adapter_parameters(model, settings)
    state = settings.adam_bytes + (4 if settings.method == "full" else 0)  # a float32 master
    per_trained = state + (
        2 if settings.method == "full" else 4 + 4
    )  # gradients; an adapter and its gradients
    layer, logits, kept = _fitcheck_activations(model, settings)
    if not settings.checkpointing:
        activations = size(model, "num_hidden_layers") * layer.retained + logits
        return weights + trained * per_trained + activations + FITCHECK_SHARE * (weights + activations)
    activations = kept + max(logits, layer.recomputed)
    if settings.gpu == "t4":
        of_logits, of_layer = FITCHECK_T4[settings.eager, settings.bits]
        share = of_layer if layer.recomputed > logits else of_logits
        overhead = share * min(logits, layer.recomputed)
    else:
        overhead = FITCHECK_SHARE * (weights + activations)
    return weights + trained * per_trained + activations + overhead


def _fitcheck_weights(model: Architecture, settings: Settings) -> float:
    if settings.bits == 16:
        return 2.0 * model.num_parameters
    heads = 1 if model.text_config.get("tie_word_embeddings") else 2
    norms = (2 * size(model, "num_hidden_layers") + 1) * size(model, "hidden_size")
    in_float32 = heads * _embedding(model) + norms
    scales = 4 / 64 * (0.25390625 if settings.double_quant else 1.0)
    return 4.0 * in_float32 + (0.5 + scales) * (model.num_parameters - in_float32)


def _adapter_parameters(model: Architecture, settings: Settings) -> int:
    hidden, inner = size(model, "hidden_size"), size(model, "intermediate_size")
    queries, keys = _widths(model)
    sides = {
        "q_proj": hidden + queries,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": hidden + queries,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": hidden + inner,
    }
    return size(model, "num_hidden_layers") * settings.rank * sum(sides[name] for name in settings.targets)


def _widths(model: Architecture) -> tuple[int, int]:
    heads = size(model, "num_attention_heads")
    of_head = size(model, "head_dim", size(model, "hidden_size") // heads)
    return heads * of_head, size(model, "num_key_value_heads", heads) * of_head


@dataclass(frozen=True)
class _Layer:
    """Bytes of a layer's activations: while it is computed again, and kept where it is not checkpointed."""

    recomputed: float
    retained: float


def _fitcheck_activations(model: Architecture, settings: Settings) -> tuple[_Layer, float, float]:
    """Return a layer's bytes, the logits', and those of all checkpoints."""
    tokens, hidden = settings.rows * settings.length, size(model, "hidden_size")
    queries, keys = _widths(model)
    plain = 2.0 * tokens * (12 * hidden + 3 * queries + keys + 3 * size(model, "intermediate_size"))
    scores = 2.0 * settings.rows * size(model, "num_attention_heads") * settings.length**2
    copies = (9.0 if settings.bits == 4 else 7.4) if settings.eager else 0.0
    layer = _Layer(plain + copies * scores, plain + (2.9 * scores if settings.eager else 0.0))
    logits = (4.0 if settings.bits == 4 else 3.5) * 4.0 * tokens * size(model, "vocab_size")
    kept = (4.0 if settings.bits == 4 else 2.0) * size(model, "num_hidden_layers") * tokens * hidden
    return layer, logits, kept


FORMULAS = (
    Formula(
        title="accelerate",
        words="full 16-bit training with Adam: 8 bytes a parameter, the largest of its four parts (AdamW's float32 "
        "state). Under transformers 5 the command starts from a checkpoint's own type, and prints half for bfloat16",
        source="accelerate 1.15, `commands/estimate.py`, `estimate_training_usage`: the column *Training using Adam* "
        "of `accelerate estimate-memory`",
        num_bytes=of_full(lambda model: accelerate_estimate(model.num_parameters)),
    ),
    Formula(
        title="ZeRO-2",
        words="one GPU, no offload: 4 + 16 bytes a parameter, all of them trained. Activations are left to the user",
        source="[DeepSpeed, Memory Requirements](https://github.com/deepspeedai/DeepSpeed/blob/"
        "0cca5393114258967cbfe25e24356e43e81cc9e4/docs/code-docs/source/memory.rst), "
        "`estimate_zero2_model_states_mem_needs`",
        num_bytes=of_full(lambda model: deepspeed_zero2(model.num_parameters)),
    ),
    Formula(
        title="ZeRO-3",
        words="one GPU, no offload: 18 bytes a parameter, and 4 for each of the largest module",
        source="the same page, `estimate_zero3_model_states_mem_needs`",
        num_bytes=of_full(lambda model: deepspeed_zero3(model.num_parameters, _embedding(model))),
    ),
    Formula(
        title="FitCheck",
        words="weights (of 4-bit models embeddings, head and norms in float32), adapter, gradients, AdamW. Activations "
        "with checkpointing: a hidden state a layer, and the larger of the logits (3.5 float32 copies; 4 with 4-bit "
        "weights) and one layer. Shares for fragmentation, fitted to T4 runs by its author, 5% elsewhere. Its context "
        "is left out here, as the allocator's bytes are compared",
        source="[fitcheck-llm 0.3.1](https://pypi.org/project/fitcheck-llm/0.3.1/), `fitcheck/memory/` and "
        "`fitcheck/overhead_db.py`",
        num_bytes=fitcheck,
    ),
    Formula(
        title="Unsloth",
        words="a table by parameters: GB for QLoRA and LoRA, called the absolute minimum, with Unsloth's own kernels; "
        "its rows and lengths are not stated",
        source="[Unsloth Requirements]"
        "(https://unsloth.ai/docs/get-started/fine-tuning-for-beginners/unsloth-requirements), read 2026-11-27",
        num_bytes=unsloth_table,
        is_minimum=True,
    ),
)
