"""HF's own flags for activation checkpointing and for Liger's kernels, replaced by ours.

``Trainer`` turns checkpointing on as training begins, TRL's trainers turn it off and on around passes without
gradients: each time every layer would be recomputed in HF's way, whichever layers a recipe names. Liger's kernels would
be patched into the model as training begins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lowmem_ft.foundation.handle import Handle
from lowmem_ft.recipe.trainers.trainer_kinds import Kind
from lowmem_ft.techniques.kernels.liger_patches import ARGUMENTS
from lowmem_ft.techniques.modules.model_parts import ModelParts, base_model
from lowmem_ft.techniques.modules.patching import set_attribute

if TYPE_CHECKING:
    from lowmem_ft.hf.trainers.agreement import Agreement

_FLAGS = ("activation_checkpointing", "gradient_checkpointing")
"""The training argument, and its older name."""

_LIGER, _LIGERS_LOSS = "use_liger_kernel", "fused_linear_cross_entropy"

_INSTEAD = {"offload": "offload.activations=inputs", "selective": "checkpointing.mode=selective"}
"""The recipe's settings that do the same as an option of ``gradient_checkpointing_kwargs``."""


def asked_by_flag(agreement: Agreement, args: Any) -> Iterator[str]:
    """Let the recipe recompute what the trainer's flag asks for; yield what it cannot take over, in words."""
    if not any(getattr(args, flag, False) for flag in _FLAGS):
        return
    options = dict(_options(args))
    options.pop("use_reentrant", None)  # both give the same numbers
    every_n_layers = options.pop("every_n_layers", 1)
    config = agreement.recipe.checkpointing
    for name, value in options.items():
        if value:
            yield (
                f"gradient_checkpointing_kwargs[{name!r}] has no counterpart in a recipe, got {value!r}. Leave it out; "
                f"{_INSTEAD.get(name, 'checkpointing.mode=full')} does it."
            )
    if config.mode == "none":
        agreement.set("checkpointing.mode", "full")
        agreement.set("checkpointing.every_n_layers", every_n_layers)
    elif every_n_layers not in (1, config.every_n_layers):
        yield (
            f"checkpointing.every_n_layers={config.every_n_layers} differs from the trainer's "
            f"every_n_layers={every_n_layers} in gradient_checkpointing_kwargs. Change one of them."
        )


def _options(args: Any) -> dict[str, Any]:
    for flag in _FLAGS:
        if options := getattr(args, f"{flag}_kwargs", None):
            return options
    return {}


def take_switch(model: Any, args: Any) -> Handle:
    """Leave recomputation to the technique that is on: turn the trainer's flag off, and let its switch control ours.

    Args:
        model: the model with the technique on; may be a PEFT model.
        args: the trainer's arguments.

    Returns:
        A handle whose ``remove()`` restores both.
    """
    causal_lm = base_model(model)
    return Handle(*flags_off(args), *_switch(causal_lm))


def flags_off(args: Any) -> Iterator[Callable[[], object]]:
    """Turn the trainer's own checkpointing flags off, and yield the calls that restore them.

    Args:
        args: the trainer's arguments.
    """
    for flag in _FLAGS:
        if hasattr(args, flag):
            yield functools.partial(setattr, args, flag, getattr(args, flag))
            setattr(args, flag, False)


def _switch(causal_lm: Any) -> Iterator[Callable[[], object]]:
    layers: list[Any] = [layer for stack in ModelParts(causal_lm).stacks.values() for layer in stack]
    chosen = [getattr(layer, "gradient_checkpointing", False) for layer in layers]

    def enable(*_: Any, **__: Any) -> None:
        for layer, is_checkpointed in zip(layers, chosen, strict=True):
            layer.gradient_checkpointing = is_checkpointed

    def disable() -> None:
        for layer in layers:
            layer.gradient_checkpointing = False

    for flag in _FLAGS:
        for name, switch in ((f"{flag}_enable", enable), (f"{flag}_disable", disable)):
            if hasattr(causal_lm, name):
                yield set_attribute(causal_lm, name, switch)


def liger_asked_by_flag(agreement: Agreement, args: Any, kind: Kind) -> Iterator[str]:
    """Let the recipe take the operators that the trainer's flag asks for; yield what it cannot take over, in words."""
    if not getattr(args, _LIGER, False):
        return
    config = args.liger_kernel_config or {}
    left_out = [name for name, value in config.items() if name in ARGUMENTS and not value]
    if left_out:
        yield (
            f"liger_kernel_config leaves out {', '.join(left_out)}, and model.kernels has no such choice. Leave "
            "liger_kernel_config out, or set use_liger_kernel=False."
        )
    # TRL's trainers have losses of their own, and leave Liger's out.
    if config.get(_LIGERS_LOSS, kind == "Trainer") and agreement.recipe.loss.chunk_tokens is None:
        yield (
            "TrainingArguments.use_liger_kernel=True also replaces the loss, which hf.attach does not support, and the "
            f"recipe's loss.chunk_tokens=null does not replace it. Set loss.chunk_tokens=1024, or liger_kernel_config="
            f"{{'{_LIGERS_LOSS}': False}}."
        )
    if agreement.recipe.model.kernels == "none":
        agreement.set("model.kernels", "liger")


def liger_flag_off(args: Any) -> Iterator[Callable[[], object]]:
    """Turn the trainer's own flag off, and yield the call that restores it.

    Args:
        args: the trainer's arguments.
    """
    if getattr(args, _LIGER, False):
        yield functools.partial(setattr, args, _LIGER, True)
        setattr(args, _LIGER, False)
