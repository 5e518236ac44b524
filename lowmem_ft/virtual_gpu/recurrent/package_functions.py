"""Functions of packages that transformers calls in layers with a recurrent state, taken as installed on a virtual GPU.

transformers decides when a modeling file is imported whether a function is the package's or its own reference in
torch, and keeps the decision in a closure. Here each closure gets ours for the length of a block, so that estimates do
not depend on what is installed on the machine that makes them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from lowmem_ft.foundation.upstream.import_hooks import when_any_imported
from lowmem_ft.foundation.upstream.patches import UpstreamChangedError
from lowmem_ft.virtual_gpu.calls.active import active_gpu
from lowmem_ft.virtual_gpu.recurrent.causal_convolution import causal_conv1d_fn
from lowmem_ft.virtual_gpu.recurrent.gated_delta_rule import chunk_gated_delta_rule
from lowmem_ft.virtual_gpu.recurrent.kimi_delta_attention import chunk_kda
from lowmem_ft.virtual_gpu.recurrent.mamba1 import mamba_inner_fn, selective_scan_fn
from lowmem_ft.virtual_gpu.recurrent.mamba2 import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined


class _PackageFunction(NamedTuple):
    """A function of a package.

    Args:
        distribution: the package's name where it is installed from.
        what: what it computes, for the list of choices.
        function: stands for it on fake tensors.
    """

    distribution: str
    what: str
    function: Callable[..., Any]


_FUNCTIONS: dict[str, _PackageFunction] = {
    "chunk_gated_delta_rule": _PackageFunction(
        "flash-linear-attention", "gated delta rule", chunk_gated_delta_rule
    ),
    "chunk_kda": _PackageFunction("flash-linear-attention", "Kimi delta attention", chunk_kda),
    "causal_conv1d_fn": _PackageFunction("causal-conv1d", "short convolutions", causal_conv1d_fn),
    "selective_scan_fn": _PackageFunction("mamba-ssm", "Mamba scan", selective_scan_fn),
    "mamba_inner_fn": _PackageFunction("mamba-ssm", "Mamba mixer", mamba_inner_fn),
    "mamba_chunk_scan_combined": _PackageFunction("mamba-ssm", "Mamba-2 scan", mamba_chunk_scan_combined),
    "mamba_split_conv1d_scan_combined": _PackageFunction(
        "mamba-ssm", "Mamba-2 mixer", mamba_split_conv1d_scan_combined
    ),
}
"""Functions by the name that transformers asks their package for; others compute as its reference does."""

_DECORATOR = "use_kernel_func_from_hub_with_fallback"
_CELLS = {"func_name", "implementation", "torch_function", "is_new_implementation", "applicable_params"}
"""The decorator and the names in its closures. Source: transformers 5.17 to 5.24, ``integrations/hub_kernels.py``."""


def package_functions_as_installed(undo: contextlib.ExitStack) -> None:
    """Let models call ours until a stack is undone, whether their files are imported before or later."""
    when_any_imported(undo, ("transformers.models",), functools.partial(_adapt, undo))


def _adapt(undo: contextlib.ExitStack, module: ModuleType) -> None:
    for cells in _closures_of(module):
        reference = cells["torch_function"].cell_contents
        known = _FUNCTIONS.get(cells["func_name"].cell_contents)
        is_taken = known is not None and known.distribution in active_gpu().spec.kernel_packages
        if known is None:
            function = reference
        elif is_taken:
            function = _saying(
                f"kernels of {known.distribution}, which has to be installed where the run is", known
            )
        else:
            function = _saying(f"transformers' reference, as without {known.distribution}", known, reference)
        for name, value in {
            "implementation": function,
            "is_new_implementation": is_taken,
            "applicable_params": tuple(inspect.signature(function).parameters),
        }.items():
            undo.callback(setattr, cells[name], "cell_contents", cells[name].cell_contents)
            cells[name].cell_contents = value


def _closures_of(module: ModuleType) -> Iterator[dict[str, CellType]]:
    """Yield the variables of each closure that transformers' decorator has made in a module.

    Raises:
        UpstreamChangedError: if the module uses it and there is no such closure.
    """
    if _DECORATOR not in vars(module):
        return
    found = 0
    for value in list(vars(module).values()):
        # With the package `kernels` the function is the forward of a module.
        inner = value if isinstance(value, FunctionType) else _only_function_of(type(value))
        if inner is not None and set(inner.__code__.co_freevars) >= _CELLS:
            assert inner.__closure__ is not None
            yield dict(zip(inner.__code__.co_freevars, inner.__closure__, strict=True))
            found += 1
    if not found:
        raise UpstreamChangedError(
            f"transformers.integrations.hub_kernels.{_DECORATOR}: {', '.join(sorted(_CELLS))}"
        )


def _only_function_of(cls: type) -> FunctionType | None:
    """Return the function that a class made by the package ``kernels`` calls in its forward."""
    forward = vars(cls).get("forward")
    if not isinstance(forward, FunctionType) or forward.__code__.co_freevars != ("func",):
        return None
    assert forward.__closure__ is not None
    return forward.__closure__[0].cell_contents


def _saying(
    choice: str, known: _PackageFunction, function: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that notes whose kernels it stands for."""
    called = known.function if function is None else function

    @functools.wraps(called)
    def call(*args: Any, **kwargs: Any) -> Any:
        active_gpu().say(f"{known.what}: {choice}")
        return called(*args, **kwargs)

    return call
