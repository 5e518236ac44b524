"""Our recipes in other people's training scripts: ``transformers.Trainer`` and TRL's trainers, as they are."""

from __future__ import annotations

from lowmem_ft.lazy_exports import lazy_exports

__all__: list[str] = []

__getattr__ = lazy_exports(__name__, {})


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
