"""Masks of packed rows in models that do not tell transformers where documents begin.

Transformers' mask functions keep the documents of a row apart if they get its ``position_ids``, which restart with each
document. Some models (gpt-oss, Falcon, AFMoE, Bloom and others) call these functions without them: their masks are
then only causal, and each document sees those before it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel, masking_utils

from lowmem_ft.foundation.upstream.patches import wrap

_OWN_CODE = "transformers.models."
_POSITIONS = "position_ids"

_found: WeakKeyDictionary[nn.Module, set[tuple[ModuleType, str]]] = WeakKeyDictionary()
"""Mask functions by model: each forward asks, and a model has thousands of modules to look through."""


@contextlib.contextmanager
def masks_keep_documents_apart(model: nn.Module, position_ids_BT: Tensor | None) -> Iterator[None]:
    """Give the rows' positions to each mask function of transformers that a model calls without them.

    Args:
        model: the causal LM whose forward runs in the ``with`` block.
        position_ids_BT: int64; they restart at 0 with each document. None: each row is one document.
    """
    with contextlib.ExitStack() as undo:
        if position_ids_BT is not None:
            if model not in _found:
                _found[model] = _mask_functions(model)
            for module, name in _found[model]:
                wrap(undo, module, name, _with_positions(position_ids_BT))
        yield


def _mask_functions(model: nn.Module) -> set[tuple[ModuleType, str]]:
    """Return where the code of a model and its parts has transformers' mask functions that take positions."""
    classes = {
        cls for part in model.modules() if isinstance(part, PreTrainedModel) for cls in type(part).__mro__
    }
    modules = [
        sys.modules[name] for name in {cls.__module__ for cls in classes} if name.startswith(_OWN_CODE)
    ]
    return {
        (module, name)
        for module in modules
        for name, function in vars(module).items()
        if getattr(function, "__module__", None) == masking_utils.__name__
        and inspect.isfunction(function)
        and _POSITIONS in inspect.signature(function).parameters
    }


def _with_positions(position_ids_BT: Tensor) -> Callable[..., Any]:
    def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        own_mask, embedded = call.arguments.get("attention_mask"), call.arguments["inputs_embeds"]
        if call.arguments.get(_POSITIONS) is None and embedded.shape[1] == position_ids_BT.shape[1]:
            call.arguments[_POSITIONS] = position_ids_BT
            if isinstance(own_mask, Tensor) and own_mask.ndim == 2:
                # No batch of ours has a mask: the model made it, all ones, and it would hide the documents.
                call.arguments["attention_mask"] = None
        return original(*call.args, **call.kwargs)

    return around
