"""Fine-tune LLMs inside a memory budget, on stock HuggingFace models, with the exact mathematics of AdamW."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lowmem_ft.budget import Budget
    from lowmem_ft.recipe import Recipe, load_recipe
    from lowmem_ft.training import train

__version__ = "0.1.0"

__all__ = ["Budget", "Recipe", "load_recipe", "train"]

_MODULES = {
    "Budget": "lowmem_ft.budget",
    "Recipe": "lowmem_ft.recipe",
    "load_recipe": "lowmem_ft.recipe",
    "train": "lowmem_ft.training",
}


def __getattr__(name: str) -> Any:
    # On first use, so that `import lowmem_ft` and `lowmem-ft --help` do not wait for torch.
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'lowmem_ft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
