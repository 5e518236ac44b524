"""The models whose structure can be read and changed in place: those of transformers, not compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate.utils import is_compiled_module
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.techniques.modules.model_parts import base_model


def problem_with_class(model: Any) -> str | None:
    """Return a clause on why a model is unknown; None if it is one of transformers', in PEFT's wrapper or not."""
    known = base_model(model._orig_mod if is_compiled_module(model) else model)
    if isinstance(known, PreTrainedModel):
        return None
    return f"models of transformers (PreTrainedModel), in PEFT's wrapper or not, got {type(known).__name__}"


def problems_with_model(model: Any) -> Iterator[str]:
    """Yield the reason why no recipe at all can be attached to a model.

    Args:
        model: a trainer's model.
    """
    compiled = next(_compiled_parts(model), None)
    if compiled is not None:
        yield (
            "hf.attach() changes forward passes, but torch.compile has already compiled those of "
            f"{compiled or type(model).__name__}. Leave torch.compile() and .compile() out."
        )
    elif clause := problem_with_class(model):
        yield (
            f"hf.attach() takes {clause}. For other models, enable techniques one by one with their enable_* "
            "functions."
        )


def _compiled_parts(model: nn.Module) -> Iterator[str]:
    """Yield the names of compiled modules, in whichever of the three ways; the whole model has an empty name."""
    for name, module in model.named_modules():
        of_its_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        if is_compiled_module(module) or module._compiled_call_impl is not None or of_its_forward:
            yield name
