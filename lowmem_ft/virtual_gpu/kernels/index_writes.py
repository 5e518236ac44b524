"""Types of what is written into a tensor by index: the rules of every device, which fake tensors skip.

Source: pytorch, aten/src/ATen/native/TensorAdvancedIndexing.cpp.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from lowmem_ft.virtual_gpu.calls.type_names import name_of

_SAME_SCALAR_TYPE = "self ({into}) and source ({values}) must have the same scalar type"
_EXPECTED = "self and source expected to have the same dtype, but got "

_RULES = {
    "index_add": (3, f"index_add_(): {_SAME_SCALAR_TYPE}"),
    "index_reduce": (3, f"index_reduce_(): {_SAME_SCALAR_TYPE}"),
    "index_copy": (3, f"index_copy_(): {_EXPECTED}(self) {{into}} and (source) {{values}}"),
    "put": (2, f"put_(): {_EXPECTED}self.dtype = {{into}} and source.dtype = {{values}}"),
    **dict.fromkeys(
        ("index_put", "_index_put_impl_", "_unsafe_index_put"),
        (
            2,
            "Index put requires the source and destination dtypes match, got {into} for the destination and {values} "
            "for the source.",
        ),
    ),
}
"""For each operator, and the one of its name with an underscore at the end: the place of the values among its
arguments, and what torch says where their type is another."""


def check_index_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that what is written into a tensor by index has its type.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        RuntimeError: as torch does.
    """
    if not isinstance(func, OpOverload):
        return
    rule = _RULES.get(func._opname, _RULES.get(func._opname.removesuffix("_")))
    if rule is not None:
        place, words = rule
        into, values = args[0].dtype, args[place].dtype
        if into != values:
            raise RuntimeError(words.format(into=name_of(into), values=name_of(values)))
