"""Names of modules that are alike, as one name for all of them."""

from __future__ import annotations

from torch import nn


def module_pattern(model: nn.Module, name: str) -> str:
    """Return a module's name with ``*`` for each place in a list; parts of a sequence keep their places."""
    parts, module = [], model
    for part in filter(None, name.split(".")):
        parent, module = module, module.get_submodule(part)
        is_step = isinstance(parent, nn.Sequential) and next(module.children(), None) is None
        parts.append("*" if part.isdigit() and not is_step else part)
    return ".".join(parts)
