"""Changes that Liger's own functions make to one model, as attributes of that model's modules alone.

``apply_liger_kernel_to_*`` knows of each architecture which norms add 1 to their weight, round where, and may write a
gradient over another. Called for one model, it still replaces classes and functions of transformers for all models of
the process. So it runs, what it has set is taken down, and everything is put back; the technique then sets the
attributes of the model's modules by the idiom of ``techniques/modules/patching.py``. Rotary embeddings are a function
that an attention's forward finds in its module: such an attention gets its forward with another function under that
name, and so does an MLP with its gated activation.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lowmem_ft.foundation.upstream.patches import existing
from lowmem_ft.foundation.upstream.tested import installed_version
from lowmem_ft.techniques.kernels import liger_functions

Operator = Literal["rms_norm", "rotary", "swiglu", "geglu"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)

ARGUMENTS = frozenset(("rope", "rms_norm", "swiglu", "geglu"))
"""Arguments of Liger's functions that stay on where they are: losses, other norms and heads are not taken."""

ARCHITECTURES = frozenset(
    (
        *("exaone4", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "llama", "mistral", "mixtral"),
        *("olmo2", "olmo3", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
    )
)
"""Values of ``model_type`` whose gradients a test compares with transformers' own, for a whole model.

Liger supports more. But a norm may write its gradient over that of its output only where nothing else reads it,
which no trial of one module can see: an architecture is added once that test passes.
"""

_CLASSES: Mapping[str, Operator] = {"RMSNorm": "rms_norm", "SwiGLU": "swiglu", "GEGLU": "geglu"}
"""A part of the name of Liger's class whose forward a module gets, by which its operator is known."""


_GATED: Mapping[Operator, str] = {"swiglu": "_swiglu_dispatch", "geglu": "LigerGELUMulFunction"}
"""The name by which an MLP's forward finds the gated activation in Liger's module."""


@dataclass(frozen=True)
class Patch:
    """One module that computes by an operator of Liger's.

    Args:
        operator: the operator.
        module: the module.
        attributes: what is set on it, its ``forward`` among them.
        functions: for rotary embeddings, transformers' function and Liger's.
    """

    operator: Operator
    module: nn.Module
    attributes: Mapping[str, Any]
    functions: tuple[Callable[..., Any], Callable[..., Any]] | None = None


def has_operators(model_type: str) -> bool:
    """Return whether an architecture is one of ours that the installed Liger has operators for."""
    return model_type in ARCHITECTURES and model_type in _functions()


def ligers_patches(model: Any) -> list[Patch]:
    """Return what Liger's function for an architecture would change in a model; nothing is changed.

    Args:
        model: a causal LM from transformers, of an architecture that :func:`has_operators`.

    Returns:
        A patch for each module that gets an operator: no experts of a mixture, and no rotary embeddings of other kinds
        than Llama's.
    """
    apply = _functions()[model.config.model_type]
    parts = list(model.modules())
    own = [dict(vars(part)) for part in parts]
    upstream = {name: sys.modules[name] for name in {type(part).__module__ for part in parts}}
    names = {name: dict(vars(module)) for name, module in upstream.items()}
    try:
        apply(model=model, **_arguments_of(apply))
        patches = [
            patch for part, was in zip(parts, own, strict=True) if (patch := _patch_of(part, was)) is not None
        ]
        functions = {name: dict(_replaced(module, names[name])) for name, module in upstream.items()}
    finally:
        for part, was in zip(parts, own, strict=True):
            _put_back(vars(part), was)
        for name, module in upstream.items():
            _put_back(vars(module), names[name])
    return [*patches, *_rotary_patches(parts, functions)]


@functools.cache
def _functions() -> dict[str, Callable[..., Any]]:
    from liger_kernel.transformers import monkey_patch

    return existing(monkey_patch, "MODEL_TYPE_TO_APPLY_LIGER_FN")


def _arguments_of(apply: Callable[..., Any]) -> dict[str, bool]:
    parameters = inspect.signature(apply).parameters
    return {
        name: one.default and name in ARGUMENTS
        for name, one in parameters.items()
        if isinstance(one.default, bool)
    }


def _patch_of(module: nn.Module, was: Mapping[str, Any]) -> Patch | None:
    """Return what Liger has set on a module if it is an operator of ours to take."""
    attributes = {name: value for name, value in vars(module).items() if was.get(name, was) is not value}
    forward = attributes.get("forward")
    if not isinstance(forward, MethodType):
        return None
    owner = forward.__func__.__qualname__.partition(".")[0]
    operator: Operator | None = next((one for part, one in _CLASSES.items() if part in owner), None)
    if operator is None:
        return None
    ours = our_functions()
    if ours is not None and forward.__func__ is ours.ligers().norm_forward:
        attributes["forward"] = MethodType(ours.norm, module)
    if operator in _GATED:
        name = _GATED[operator]
        existing(sys.modules[forward.__func__.__module__], name)
        own = _with_global(forward.__func__, name, _gates_of_one_backward(ours)[name])
        attributes["forward"] = MethodType(own, module)
    return Patch(operator, module, attributes)


def _replaced(
    module: ModuleType, was: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[Callable[..., Any], Callable[..., Any]]]]:
    """Yield the functions of a module that Liger's rotary embeddings have replaced, by name: before, and ours."""
    from liger_kernel.transformers.rope import liger_rotary_pos_emb

    ours = our_functions()
    turn = _rotary_in_triton if ours is None else ours.rotary
    for name, value in vars(module).items():
        if value is liger_rotary_pos_emb and was.get(name) is not value:
            yield name, (was[name], turn)


def _rotary_patches(
    parts: list[nn.Module],
    functions: Mapping[str, Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]]],
) -> Iterator[Patch]:
    for part in parts:
        forward = getattr(type(part), "forward", None)
        if not isinstance(forward, FunctionType) or "forward" in vars(part):
            continue
        forward = inspect.unwrap(forward)  # transformers 5.24 renames an argument around it
        for name, both in functions.get(forward.__module__, {}).items():
            if name in forward.__code__.co_names:
                own = MethodType(_with_global(forward, name, both[1]), part)
                yield Patch("rotary", part, {"forward": own}, both)


def _with_global(function: FunctionType, name: str, value: Any) -> FunctionType:
    """Return a function that finds another value under one name of its module."""
    own = FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return functools.update_wrapper(own, function)  # type: ignore[return-value]


def _put_back(names: dict[str, Any], was: Mapping[str, Any]) -> None:
    for name in names.keys() - was.keys():
        del names[name]
    names.update(was)


def _rotary_in_triton(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by Liger's Triton kernel, whatever other languages its dispatcher finds kernels in."""
    from liger_kernel.ops import LigerRopeFunction

    return LigerRopeFunction.apply(query, key, cos, sin, None, unsqueeze_dim)


@functools.cache
def _gates_of_one_backward(ours: Any | None) -> dict[str, Any]:
    """Return Liger's gated activations by the names under which its MLPs find them; they refuse a second backward.

    Liger writes the gradients over what it has saved, and autograd does not see it: a second backward pass over the
    same graph would take gradients for inputs.

    Args:
        ours: :func:`our_functions`.
    """
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    swiglu = _of_one_backward(LigerSiLUMulFunction).apply
    if ours is not None:
        swiglu = functools.partial(_gate, ours.can_gate, _of_one_backward(ours.SwiGLU).apply, swiglu)
    return {"_swiglu_dispatch": swiglu, "LigerGELUMulFunction": _of_one_backward(LigerGELUMulFunction)}


def _gate(
    can_gate: Callable[[Tensor], bool],
    ours: Callable[..., Tensor],
    ligers: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    *multipliers: float,
) -> Tensor:
    return ours(a, b) if not multipliers and can_gate(a) else ligers(a, b, *multipliers)


def our_functions() -> Any | None:
    """Return ours around Liger's kernels, if they know the installed release."""
    return liger_functions if installed_version("liger-kernel") == liger_functions.VERSION else None


def _of_one_backward(function: Any) -> Any:
    def backward(ctx: Any, d_output: Tensor) -> Any:
        if getattr(ctx, "is_spent", False):
            raise RuntimeError(
                "Liger's gated activation wrote its gradients over its inputs in the first backward pass; run the "
                "forward pass again, or set model.kernels=none."
            )
        ctx.is_spent = True
        return function.backward(ctx, d_output)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})
