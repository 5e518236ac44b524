"""A small trial of Liger's operators on the device, each against transformers' own, before a model computes with them.

Axes: B rows, T tokens, N tokens of all rows, H heads, D size of a head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.foundation.upstream.layer_configs import layer_configs
from lowmem_ft.techniques.kernels.liger_patches import Operator, Patch

_TOKENS = 64

_TOKENS_OF_BLOCKS = 4096 * 8 + 8
"""Rows that Liger takes several at a time where a row has at most 256 numbers, as a head's norm has."""

_NARROW = 32
"""Width of the model in the trial of an MLP, whose inner width is the model's own."""

_ROUNDINGS, _OUTLIER_ROUNDINGS = 4, 32
"""Differences that pass, in roundings of the type: of all values by their norm, and of one by the largest.

transformers rounds after each of its operators, up to five in a norm, and Liger once or twice.
"""

_LEAST = 1e-5
"""Share by which sums over tokens in another order differ in float32."""

Values = Mapping[str, Tensor]


def disagreements(
    patches: Sequence[Patch], config: Any, device: torch.device, dtype: torch.dtype, compute: torch.dtype
) -> dict[Operator, str]:
    """Compute output and gradients with both, for each kind and width of a model's modules.

    Args:
        patches: the modules, none of which is called or changed.
        config: the model's, for its heads.
        device: the device to train on.
        dtype: type of the weights.
        compute: type that products compute in, autocast's or the weights'.

    Returns:
        For each operator that fails or computes something else, why, as a clause.

    Raises:
        RuntimeError: if memory runs out, which says nothing about an operator.
    """
    found: dict[Operator, str] = {}
    for patch in {_kind(patch): patch for patch in patches}.values():
        if patch.operator not in found and (problem := _problem_of(patch, config, device, dtype, compute)):
            found[patch.operator] = problem
    return found


def _kind(patch: Patch) -> tuple[Any, ...]:
    """Return what decides the code that a module runs."""
    module = patch.module
    if patch.operator == "rotary":
        return patch.operator, patch.functions
    numbers = [value for value in patch.attributes.values() if isinstance(value, (bool, int, float, str))]
    widths = [(name, part.in_features, part.out_features) for name, part in _linear_layers(module)]
    return patch.operator, type(module), *numbers, *widths, *_own_shapes(module)


def _own_shapes(module: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in module.parameters(recurse=False)]


def _problem_of(
    patch: Patch, config: Any, device: torch.device, dtype: torch.dtype, compute: torch.dtype
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    if patch.operator == "rotary":
        runs = [_rotary_run(patch, layer_configs(config.get_text_config())[0], generator, device, dtype)]
    else:
        runs = [_module_run(patch, size, generator, device, dtype) for size in _num_tokens(patch)]
    problems = (_problem_of_run(patch, values, device, dtype, compute) for values in runs)
    return next((problem for problem in problems if problem), None)


def _num_tokens(patch: Patch) -> tuple[int, ...]:
    has_blocks = patch.operator == "rms_norm" and _own_shapes(patch.module)[0][-1] <= 256
    return (_TOKENS, _TOKENS_OF_BLOCKS) if has_blocks else (_TOKENS,)


def _problem_of_run(
    patch: Patch,
    values: Callable[[bool], Values],
    device: torch.device,
    dtype: torch.dtype,
    compute: torch.dtype,
) -> str | None:
    try:
        with (
            torch.enable_grad(),
            torch.autocast(device.type, compute, enabled=compute != dtype, cache_enabled=False),
        ):
            # The second time a kernel is launched as it was compiled the first time.
            stock, *ligers = (values(is_ligers) for is_ligers in (False, True, True))
    except Exception as error:  # a compiler, a driver and a cache folder are involved
        if is_failed_allocation(error):
            raise
        text = str(error).strip().splitlines()
        return f"its kernel does not run here ({type(error).__name__}: {text[0] if text else 'no message'})"
    other = [name for name in stock if not all(_agree(one[name], stock[name], compute) for one in ligers)]
    if not other:
        return None
    name = type(patch.module).__name__
    return f"its kernel computes {' and '.join(other)} otherwise than {name} of transformers"


def _agree(ligers: Tensor, stock: Tensor, compute: torch.dtype) -> bool:
    if ligers.shape != stock.shape or ligers.dtype != stock.dtype:
        return False
    unit = torch.finfo(compute).eps
    off, stock = (ligers.double() - stock.double()).abs(), stock.double().abs()
    in_all = off.norm() <= max(_ROUNDINGS * unit, _LEAST) * stock.norm()
    at_most = off.max() <= max(_OUTLIER_ROUNDINGS * unit, _LEAST) * stock.max()
    return bool(in_all) and bool(at_most)


def _module_run(
    patch: Patch, num_tokens: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Callable[[bool], Values]:
    """Return a function that runs a norm or an MLP, with the same random weights and tokens each time."""
    module, linear = patch.module, dict(_linear_layers(patch.module))
    hidden = linear["down_proj"].out_features if linear else _own_shapes(module)[0][-1]

    def width(size: int) -> int:
        return _NARROW if linear and size == hidden else size

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    weights = {
        name: drawn(width(part.out_features), width(part.in_features)) * width(part.in_features) ** -0.5
        for name, part in linear.items()
    }
    own = {name: drawn(*parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    tokens_ND, d_output_ND = (drawn(num_tokens, width(hidden)) for _ in range(2))

    def values(is_ligers: bool) -> Values:
        twin = copy.copy(module)
        parameters = {name: nn.Parameter(value.clone()) for name, value in own.items()}
        layers = {name: _linear(weight.clone()) for name, weight in weights.items()}
        vars(twin).update(_parameters=parameters, _modules=vars(module)["_modules"] | layers)
        vars(twin).pop("forward", None)
        if is_ligers:
            vars(twin).update(patch.attributes)
            vars(twin)["forward"] = MethodType(patch.attributes["forward"].__func__, twin)
        trained = {**parameters, **{name: layer.weight for name, layer in layers.items()}}
        return _both_passes(lambda leaf: twin(leaf), (tokens_ND,), (d_output_ND,), trained)

    return values


def _rotary_run(
    patch: Patch, config: Any, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> Callable[[bool], Values]:
    assert patch.functions is not None
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    inputs = [drawn(2, _TOKENS, num, size) for num in (heads, key_heads)]
    d_outputs = [drawn(2, _TOKENS, num, size).transpose(1, 2) for num in (heads, key_heads)]
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    angles_1TD = torch.randn(1, _TOKENS, int(size * share) // 2, generator=generator).repeat(1, 1, 2)
    cos, sin = (turn(angles_1TD).to(device, dtype) for turn in (torch.cos, torch.sin))

    def values(is_ligers: bool) -> Values:
        assert patch.functions is not None
        function = patch.functions[is_ligers]

        def turned(*leaves_BTHD: Tensor) -> tuple[Tensor, ...]:
            # Products: Liger turns what it gets in place, which a leaf does not allow.
            query, key = ((leaf * 1).transpose(1, 2) for leaf in leaves_BTHD)
            return function(query, key, cos, sin)

        return _both_passes(turned, inputs, d_outputs, {})

    return values


def _both_passes(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    d_outputs: Sequence[Tensor],
    trained: Mapping[str, nn.Parameter],
) -> Values:
    leaves = [one.clone().requires_grad_() for one in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    found = {"its output": torch.cat([one.detach().flatten() for one in outputs])}
    gradients = [d_output.to(one.dtype, copy=True) for one, d_output in zip(outputs, d_outputs, strict=True)]
    torch.autograd.backward(outputs, gradients)
    for name, leaf in [*zip(("its input", "its keys"), leaves, strict=False), *trained.items()]:
        assert leaf.grad is not None
        found[f"the gradient of {name}"] = leaf.grad
    return found


def _linear(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight)
    return layer


def _linear_layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the linear layers of an MLP, plain, quantised or with adapters, by name."""
    return ((name, part) for name, part in module.named_children() if hasattr(part, "in_features"))
