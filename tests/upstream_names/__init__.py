"""Every undocumented name of another library that the package relies on, with its purpose.

``tests/upstream`` compares the list with the installed libraries and the sources with the list: a name that a library
renames fails, and so does a new one that is missing here. To find where a name is used, search for it.

A row belongs to an owner: a module, or a class; ``nn.Module()`` with brackets is an object of it, whose attributes
exist only once it is made. Tests read an operator's parameters from its schema, a function's from its signature.
"""

from __future__ import annotations

from upstream_names.other_names import ACCELERATE, BITSANDBYTES, DATASETS, DEEPSPEED, LIGER, PEFT, TRITON, TRL
from upstream_names.torch_names import TORCH
from upstream_names.torch_operators import OPERATORS
from upstream_names.transformers_names import TRANSFORMERS
from upstream_names.upstream_name import UpstreamName

__all__ = ["NAMES", "UpstreamName"]

NAMES: tuple[UpstreamName, ...] = (
    *TORCH,
    *OPERATORS,
    *TRANSFORMERS,
    *ACCELERATE,
    *PEFT,
    *BITSANDBYTES,
    *DATASETS,
    *DEEPSPEED,
    *TRITON,
    *LIGER,
    *TRL,
)
