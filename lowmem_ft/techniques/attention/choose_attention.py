"""Choice of the attention kernel that a model trains with, and the reason for it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

from lowmem_ft.foundation.devices import compute_capability as compute_capability_of
from lowmem_ft.foundation.devices import is_virtual, kernels_of
from lowmem_ft.foundation.errors import MissingPackageError, ModelError, UserError, raise_problems
from lowmem_ft.foundation.upstream.layer_configs import layer_configs
from lowmem_ft.techniques.attention.grouped_attention import (
    REPEATED_HEADS,
    classes_of,
    model_needs_repeated_heads,
    reads_its_attentions_name,
    register_repeated_heads,
)
from lowmem_ft.techniques.attention.ring_attention import (
    RING_ATTENTION,
    register_ring_attention,
    ring_has_kernels,
)
from lowmem_ft.techniques.attention.varlen_attention import VARLEN_ATTENTION, register_varlen_attention
from lowmem_ft.techniques.device_rules import (
    attention_problems,
    flash_attention_obstacle,
    varlen_attention_obstacle,
)

AttentionImplementation = Literal[
    "auto", "varlen_attn", "sdpa", "flash_attention_2", "flex_attention", "eager"
]

_KEY = "model.attn_implementation"

_SOFT_CAP = "attn_logit_softcapping"
_CHANGES_OF_SCORES = (
    _SOFT_CAP,
    *("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
)
"""Config fields of soft caps, and of dropout by the names that architectures give it."""

_ROPES_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose angles follow the last position that they are given: in a part of a row, another."""

_SUPPORT_FLAGS = {
    "flash_attention_2": "_supports_flash_attn",
    "sdpa": "_supports_sdpa",
    "flex_attention": "_supports_flex_attn",
}


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The ``attn_implementation`` to load a model with, and one clause for the log that says why."""

    implementation: Literal[
        "varlen_attn",
        "sdpa",
        "sdpa_repeated_heads",
        "ring_attn",
        "flash_attention_2",
        "flex_attention",
        "eager",
    ]
    reason: str


class _MissingFlashAttentionError(MissingPackageError):
    """flash-attn is not installed; it needs an install line of its own."""

    def __init__(self) -> None:
        UserError.__init__(
            self,
            f"{_KEY}=flash_attention_2 needs the package flash-attn, which is not installed for this device. "
            f"Run: pip install flash-attn --no-build-isolation",
        )


def choose_attention(
    requested: AttentionImplementation,
    *,
    config: PreTrainedConfig,
    device: torch.device,
    compute_dtype: torch.dtype,
    packing: bool = False,
    compute_capability: tuple[int, int] | None = None,
    makes_batches: bool = True,
    context: int = 1,
) -> AttentionChoice:
    """Choose the attention kernel of a model: the requested one if it can train here, or the leanest that can.

    On a CUDA device ``auto`` takes varlen_attn where it runs, torch's own flash kernel, which needs only the boundaries
    of packed documents, while sdpa needs a mask of tokens x tokens bytes a row; else flash_attention_2, which also
    needs only boundaries; else sdpa; else eager. On a virtual GPU it never takes flash_attention_2, as it is unknown
    whether the machine of the run will have flash-attn.

    Args:
        requested: the recipe's value.
        config: the model's config. An architecture that transformers does not know (remote code) is not checked here:
            transformers itself rejects at load what its class does not support.
        device: the device that the model trains on.
        compute_dtype: the type that queries and keys will have: autocast's, or else the weights'.
        packing: whether rows hold several documents.
        compute_capability: the CUDA device's; None: query the device.
        makes_batches: whether our own loop feeds the model: batches of other loops may need masks, which varlen_attn
            does not have.
        context: processes that share the tokens of each row.

    Returns:
        The implementation and the reason for it. If it is varlen_attn, transformers knows it from now on.

    Raises:
        ModelError: if the architecture does not support the requested kernel.
        UserError: if the device or the compute type cannot train with it.
        _MissingFlashAttentionError: if flash-attn is requested and not installed.
    """
    supported = _supported_by(config)
    facts = _facts(device, compute_dtype, compute_capability)
    needs_kernel = packing or _has_windows(config)
    if not makes_batches:
        supported = tuple(name for name in supported if name != VARLEN_ATTENTION)
    if context > 1:
        _refuse_outside_ring(config, supported)
        if not ring_has_kernels(device):
            raise UserError(
                f"distributed.context={context} needs GPUs: torch's ring runs their fused attention kernels, and has "
                f"no handler for that of {device}. Set distributed.context=1."
            )
        register_ring_attention()
        return AttentionChoice(implementation=RING_ATTENTION, reason=f"distributed.context={context}")
    if requested == "auto":
        choice = _leanest(supported, config, device, packing=packing, needs_kernel=needs_kernel, facts=facts)
        if choice.implementation == VARLEN_ATTENTION:
            register_varlen_attention()
        return _with_fused_kernel(choice, config, compute_dtype, facts["compute_capability"])
    if requested == VARLEN_ATTENTION and not makes_batches:
        raise UserError(
            f"{_KEY}={VARLEN_ATTENTION} takes batches without padding masks, as lowmem-ft train makes them; batches "
            f"of another trainer may have masks. Set {_KEY}=auto."
        )
    if requested not in supported:
        raise ModelError(
            f"{_KEY}={requested} needs an architecture that supports it; {config.model_type} supports "
            f"{', '.join(supported)}. Set {_KEY} to one of them, or to auto."
        )
    raise_problems(attention_problems(requested, **facts, needs_kernel=needs_kernel))
    if requested == "flash_attention_2" and not is_virtual(device) and not is_flash_attn_2_available():
        raise _MissingFlashAttentionError
    if requested == VARLEN_ATTENTION:
        register_varlen_attention()
    choice = AttentionChoice(implementation=requested, reason=f"requested by {_KEY}")
    return _with_fused_kernel(choice, config, compute_dtype, facts["compute_capability"])


def _refuse_outside_ring(config: PreTrainedConfig, supported: tuple[str, ...]) -> None:
    """Refuse a model in which more than plain causal attention mixes the tokens of a row, or attention is not plain.

    Raises:
        ModelError: names all that its config shows.
    """
    layers = layer_configs(config.get_text_config())
    found = list(dict.fromkeys(what for layer in layers for what in _outside_ring(layer)))
    classes = classes_of(config)
    if any(getattr(cls, "_is_stateful", False) for cls in classes):
        found.append("recurrent layers")
    if any("s_aux=" in inspect.getsource(inspect.getmodule(cls) or cls) for cls in classes):
        found.append("attention sinks")
    if not found and VARLEN_ATTENTION not in supported:
        found.append("attention of its own" if classes else "code of its own")
    if found:
        raise ModelError(
            "distributed.context spreads rows over processes for plain causal attention alone, but "
            f"{config.model_type} has {', '.join(found)}. Set distributed.context=1."
        )


def _outside_ring(layer: Any) -> Iterator[str]:
    """Yield what a layer's config asks for and a ring of causal attention does not have."""
    if getattr(layer, "sliding_window", None) is not None:
        yield f"sliding windows (sliding_window={layer.sliding_window})"
    for name in _CHANGES_OF_SCORES:
        if value := getattr(layer, name, None):
            yield f"{'soft caps' if name == _SOFT_CAP else 'dropout of scores'} ({name}={value})"
    if getattr(layer, "output_router_logits", False):
        yield "a loss of its routers over whole rows (output_router_logits=true)"
    if others := set(getattr(layer, "layer_types", None) or ()) - {"full_attention"}:
        yield f"layers of other kinds ({', '.join(sorted(others))})"
    ropes = getattr(layer, "rope_parameters", None) or getattr(layer, "rope_scaling", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if (kind := rope.get("rope_type", rope.get("type"))) in _ROPES_BY_LENGTH:
            yield f"positions that depend on the length of the row (rope_type={kind})"


def _with_fused_kernel(
    choice: AttentionChoice,
    config: PreTrainedConfig,
    compute_dtype: torch.dtype,
    compute_capability: tuple[int, int] | None,
) -> AttentionChoice:
    """Return sdpa with repeated heads for sdpa, where grouped heads would send it to the unfused operators."""
    if choice.implementation != "sdpa" or compute_capability is None:
        return choice
    needs_them = model_needs_repeated_heads(config, compute_dtype, compute_capability)
    if not needs_them or reads_its_attentions_name(config):
        return choice
    register_repeated_heads()
    return AttentionChoice(
        implementation=REPEATED_HEADS,
        reason=f"{choice.reason}; heads are repeated, as no fused kernel takes grouped ones here",
    )


def _supported_by(config: PreTrainedConfig) -> tuple[str, ...]:
    classes = classes_of(config)
    if not classes:
        return (*_SUPPORT_FLAGS, "eager")  # remote code
    flags = {
        name for name, flag in _SUPPORT_FLAGS.items() if all(getattr(cls, flag, False) for cls in classes)
    }
    if getattr(config, "alibi", False):  # Falcon's class claims support, and its forward then raises
        flags.discard("flash_attention_2")
    if any(getattr(layer, _SOFT_CAP, None) for layer in layer_configs(config.get_text_config())):
        flags.discard("sdpa")  # transformers' function leaves the cap out, which not all versions' flags say
    takes_functions = all(getattr(cls, "_supports_attention_backend", False) for cls in classes)
    if (
        takes_functions
        and {"flash_attention_2", "sdpa"} <= flags
        and all(map(_is_plain, layer_configs(config.get_text_config())))
    ):
        return (VARLEN_ATTENTION, *(name for name in _SUPPORT_FLAGS if name in flags), "eager")
    return (*(name for name in _SUPPORT_FLAGS if name in flags), "eager")


def _is_plain(config: PreTrainedConfig) -> bool:
    """Return whether torch's kernel covers all that a layer does with scores; flash-attn's extras do not count."""
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    has_more = any(getattr(config, name, None) for name in _CHANGES_OF_SCORES)
    return not has_more and (size <= 192 or 224 < size <= 256)  # sizes in between do not work on every device


def _has_windows(config: PreTrainedConfig) -> bool:
    """Return whether layers may see only a window of tokens, which the kernel supports; sdpa needs a mask for it."""
    layers = layer_configs(config.get_text_config())
    return any(getattr(layer, "sliding_window", None) is not None for layer in layers)


def _leanest(
    supported: tuple[str, ...],
    config: PreTrainedConfig,
    device: torch.device,
    *,
    packing: bool,
    needs_kernel: bool,
    facts: dict[str, Any],
) -> AttentionChoice:
    no_varlen = varlen_attention_obstacle(**facts, needs_kernel=needs_kernel)
    if VARLEN_ATTENTION in supported and no_varlen is None:
        why = (
            "torch's flash kernel separates packed documents"
            if packing
            else ("rows need no mask with this kernel")
        )
        return AttentionChoice(implementation=VARLEN_ATTENTION, reason=f"auto: {why}")
    no_flash = flash_attention_obstacle(**facts)
    if "flash_attention_2" not in supported:
        no_flash = f"an architecture that supports it, got {config.model_type}"
    elif no_flash is None and is_virtual(device):
        no_flash = (
            f"the package flash-attn, which the machine of the run may not have; set {_KEY}=flash_attention_2 to rely "
            "on it"
        )
    elif no_flash is None and not is_flash_attn_2_available():
        no_flash = "the package flash-attn, which is not installed"
    if no_flash is None:
        why = (
            ("packed rows need no mask with this kernel")
            if packing
            else "it is installed and runs on this device"
        )
        return AttentionChoice(implementation="flash_attention_2", reason=f"auto: {why}")
    if "sdpa" in supported:
        cost = "; packed rows cost a mask of tokens x tokens" if packing else ""
        return AttentionChoice(
            implementation="sdpa", reason=f"auto: flash_attention_2 needs {no_flash}{cost}"
        )
    return AttentionChoice(
        implementation="eager",
        reason=f"auto: {config.model_type} supports neither flash_attention_2 here nor sdpa",
    )


def _facts(
    device: torch.device, compute_dtype: torch.dtype, compute_capability: tuple[int, int] | None
) -> dict[str, Any]:
    """Return the facts about a device that the rules of ``device_rules.py`` take."""
    kernels = kernels_of(device)
    if kernels == "cuda":
        compute_capability = compute_capability or compute_capability_of(device)
    return {
        "device_type": device.type,
        "kernels": kernels,
        "compute_type": str(compute_dtype).removeprefix("torch."),
        "compute_capability": compute_capability,
    }
