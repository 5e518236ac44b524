"""Norms, rotary embeddings and gated activations as one kernel each, from the package liger-kernel."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from lowmem_ft.foundation.devices import compute_capability, is_virtual, kernels_of
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.packages import is_installed, require_package, triton_lacks
from lowmem_ft.foundation.upstream.tested import installed_version
from lowmem_ft.techniques.kernels.kernel_trial import disagreements
from lowmem_ft.techniques.kernels.liger_patches import (
    ARCHITECTURES,
    OPERATORS,
    Operator,
    Patch,
    has_operators,
    ligers_patches,
    our_functions,
)
from lowmem_ft.techniques.modules.model_parts import ModelParts, base_model
from lowmem_ft.techniques.modules.patching import set_attribute, wrap_method
from lowmem_ft.techniques.technique import Technique

__all__ = ["FusedOperators", "enable_fused_operators"]

logger = logging.getLogger(__name__)

Kernels = Literal["auto", "liger", "none"]

_KEY, _PACKAGE = "model.kernels", "liger-kernel"

_OLDEST_PACKAGE = (0, 8, 5)
"""Releases before it rotate all of a head where the model rotates a part, and have other functions."""

_OLDEST = (8, 0)
"""Oldest compute capability: that of the GPUs for which the tests compile the kernels."""


class FusedOperators(Technique):
    """Fused operators that are enabled; see :func:`enable_fused_operators`.

    Attributes:
        operators: those that the model computes with.
    """

    def __init__(self, operators: Sequence[Operator] = (), *undo: Callable[[], object]) -> None:
        super().__init__(*undo)
        self.operators = tuple(operators)

    def kernels(self) -> dict[str, str]:
        """Return the operators and the version of the package."""
        if not self.operators:
            return {}
        return {_KEY: f"{_PACKAGE} {installed_version(_PACKAGE)}: {', '.join(self.operators)}"}


def enable_fused_operators(
    model: nn.Module | ModelParts, kernels: Kernels, *, device: torch.device, compute_dtype: torch.dtype
) -> FusedOperators:
    """Compute RMSNorm, rotary embeddings, SwiGLU and GEGLU by Liger's kernels, one for each.

    Frees: what transformers' operators keep for each other's backward, and most temporaries: a norm keeps its input and
    a number a row, a gated activation its two inputs, a rotary embedding its angles.
    Saves time: each is read and written once, where transformers' does so after each of its operators; and a decoder
    layer takes the host 0.7 to 0.8 of what it takes with those (``scripts/bench layer``, Intel Xeon, 2026-11-30).
    Costs: kernels are compiled as they are first used. With another release than 0.8.5, whose own functions launch
    them, the host takes longer than for transformers' operators.
    Equals: transformers' own up to rounding, fewer times. Before any of them is taken, output and gradients of each
    kind of module are compared on the device; on a virtual GPU, which computes nothing, agreement is assumed.
    Limits: compute capability 8.0; the architectures of ``liger_patches.ARCHITECTURES``; no experts of a mixture.
    Backward writes gradients over what was saved: a graph is good for one backward pass, a second one raises, and there
    is no second derivative. Losses and heads stay transformers', or those of ``loss.chunk_tokens``.
    Source: Liger Kernel, 2024 (arXiv:2410.10989).

    Args:
        model: a causal LM from transformers, wrapped or not, or its parts; adapters may be there already.
        kernels: ``liger`` requires them; ``auto`` takes those that work here, of an architecture that has any.
        device: the device to train on; weights may still be elsewhere.
        compute_dtype: the type that products compute in: autocast's, or the weights'.

    Returns:
        A handle whose ``remove()`` gives the modules their own forward back, and which says what is on.

    Raises:
        MissingPackageError: if they are required and the package is not installed.
        ModelError: if they are required and Liger does not know the architecture.
        UserError: if they are required and do not work on the device.
    """
    if kernels == "none":
        return FusedOperators()
    causal_lm = ModelParts.of(model).base
    if kernels == "liger":
        require_package(f"{_KEY}={kernels}", _PACKAGE, "liger")
    if (obstacle := _obstacle(causal_lm, device)) is not None:
        error, lacks = obstacle
        if kernels == "liger":
            raise error(f"{_KEY}=liger needs {lacks}. Set {_KEY}=none, or auto, which then takes none.")
        logger.info("Kernels: transformers' own; Liger's need %s.", lacks)
        return FusedOperators()
    patches = ligers_patches(causal_lm)
    problems = {}
    if not is_virtual(device):
        problems = disagreements(patches, causal_lm.config, device, causal_lm.dtype, compute_dtype)
    for operator, problem in problems.items():
        if kernels == "liger":
            raise UserError(
                f"{_KEY}=liger cannot take {operator} on {device}: {problem}. Set {_KEY}=none, or auto, which takes "
                "those that work."
            )
        logger.warning("Kernels: transformers' own %s, as of Liger's %s.", operator, problem)
    taken = [patch for patch in patches if patch.operator not in problems]
    operators: list[Operator] = [one for one in OPERATORS if any(patch.operator == one for patch in taken)]
    logger.info(
        "Kernels: Liger's %s in %d modules (%s %s%s).",
        ", ".join(operators) or "none",
        len(taken),
        _PACKAGE,
        installed_version(_PACKAGE),
        "" if is_virtual(device) else ", compared with transformers' own on this device",
    )
    if our_functions() is None:
        logger.info(
            "Kernels: Liger's own functions launch them, which takes the host longer than ours for 0.8.5."
        )
    return FusedOperators(operators, *(undo for patch in taken for undo in _switched_on(patch, device)))


def has_fused_operators(model: Any) -> bool:
    """Return whether the package is installed and has operators for a model's architecture, whatever the device.

    Args:
        model: a causal LM from transformers, wrapped or not.
    """
    return _package_lacks() is None and has_operators(base_model(model).config.model_type)


def _switched_on(patch: Patch, device: torch.device) -> Iterator[Callable[[], None]]:
    for name, value in patch.attributes.items():
        if name == "forward":
            yield wrap_method(patch.module, name, functools.partial(_on_the_device, value, device.type))
        else:
            yield set_attribute(patch.module, name, value)


def _on_the_device(
    ligers: Callable[..., Any], device_type: str, stock: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a forward by Liger's kernel for tensors of a device; a module that gets the host's has its own forward."""

    @functools.wraps(stock)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for one in args or kwargs.values():  # the first tensor decides: each call waits for this
            if isinstance(one, torch.Tensor):
                return (ligers if one.device.type == device_type else stock)(*args, **kwargs)
        return ligers(*args, **kwargs)

    return forward


def _obstacle(causal_lm: Any, device: torch.device) -> tuple[type[UserError], str] | None:
    """Return what all of the operators need that is not there, as a clause, and the kind of error that it is."""
    if (lacks := _package_lacks() or _lacks(device)) is not None:
        return UserError, lacks
    if not has_operators(causal_lm.config.model_type):
        return ModelError, (
            f"one of the architectures {', '.join(sorted(ARCHITECTURES))}, got {causal_lm.config.model_type} "
            f"({type(causal_lm).__name__})"
        )
    return None


def _package_lacks() -> str | None:
    """Return what is wrong with the package, as a clause."""
    if not is_installed(_PACKAGE):
        return f"the package {_PACKAGE}, which is not installed"
    version = installed_version(_PACKAGE) or ""
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < _OLDEST_PACKAGE:
        return f"{_PACKAGE} {'.'.join(map(str, _OLDEST_PACKAGE))} or newer, got {version}"
    return None


def _lacks(device: torch.device) -> str | None:
    """Return what the kernels need of a device and its machine that is not there."""
    if kernels_of(device) == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    is_nvidia = kernels_of(device) == "cuda" and (is_virtual(device) or torch.version.cuda is not None)
    if not is_nvidia:
        return f"an NVIDIA GPU, got {device}"
    if compute_capability(device) < _OLDEST:
        oldest, found = (".".join(map(str, one)) for one in (_OLDEST, compute_capability(device)))
        return f"compute capability {oldest}, got {found}"
    if is_virtual(device):
        has_triton = torch.get_device_module(device).has_triton()
        return None if has_triton else "Triton, which machines with this GPU do not have"
    lacks = triton_lacks()
    return None if lacks is None else f"Triton to compile them: {lacks.rstrip('.')}"
