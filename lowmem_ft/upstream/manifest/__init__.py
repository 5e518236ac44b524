"""Every name of another library that the package relies on and that the library does not document, with what for.

Tests hold the list to the installed libraries and the sources to the list: a name that a library renames fails, and so
does a new one that nobody wrote down. Where a name is used is found by searching for it.

A row belongs to an owner: a module, or a class; ``nn.Module()`` with brackets is an object of it, whose attributes are
there only once it is made. What operators take is read off their schemas as it is off functions.
"""

from __future__ import annotations

from lowmem_ft.upstream.manifest.other_names import ACCELERATE, BITSANDBYTES, DATASETS, DEEPSPEED, PEFT, TRL
from lowmem_ft.upstream.manifest.torch_names import TORCH
from lowmem_ft.upstream.manifest.torch_operators import OPERATORS
from lowmem_ft.upstream.manifest.transformers_names import TRANSFORMERS
from lowmem_ft.upstream.manifest.upstream_name import UpstreamName

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
    *TRL,
)
