"""A saved adapter, added to its base model to be evaluated, merged or asked."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.finiteness import names_of_not_finite, some_of
from lowmem_ft.techniques.adapters.adapter_folder import WEIGHTS_FILE
from lowmem_ft.techniques.adapters.peft_layers import adapted_layers, without_pefts_warnings
from lowmem_ft.techniques.adapters.trained_adapter import read_weights
from lowmem_ft.techniques.adapters.whole_model import WholeModel, for_language_model

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"\.(\d+)\.")


def merge_adapter(
    model: PreTrainedModel,
    folder: Path,
    dtype: torch.dtype,
    track: Callable[[list[Any]], Iterable[Any]] = iter,
    whole: WholeModel | None = None,
) -> int:
    """Add a saved adapter to its base weights, one matrix at a time, in float32 and then rounded once.

    Args:
        model: the adapter's base, in any floating type; a plain model of type ``dtype`` afterwards.
        folder: folder of an adapter in PEFT's format.
        dtype: the type that the merged weights are rounded to.
        track: wraps the list of layers to iterate over, to show progress.
        whole: the model whose language model this is, if the adapter is named for that.

    Returns:
        The number of matrices that have changed.

    Raises:
        UserError: if the adapter is not one for this model.
        CheckpointError: if its weights are damaged.
    """
    peft_model = add_saved_adapter(model, folder, whole)
    layers = list(adapted_layers(model).values())
    for layer in track(layers):
        weight = _adapted_weight(layer)
        weight.data = weight.data.float()
        layer.merge(safe_merge=True)
        weight = _adapted_weight(layer)
        weight.data = weight.data.to(dtype)
    peft_model.unload()
    model.to(dtype)  # type: ignore[call-arg]
    return len(layers)


def _adapted_weight(layer: Any) -> nn.Parameter:
    """Return the adapted parameter: ``weight``, or for fused experts the one that PEFT's layer names."""
    return getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))


def add_saved_adapter(model: PreTrainedModel, folder: Path, whole: WholeModel | None = None) -> Any:
    """Add a saved adapter to its base model, in place, as PEFT does; trained rows are written into their tables.

    Args:
        model: the adapter's base, its weights plain or packed.
        folder: folder of an adapter in PEFT's format.
        whole: the model whose language model this is, if the adapter is named for that.

    Returns:
        PEFT's model around it; ``unload()`` takes the adapter off again, except for such rows.

    Raises:
        UserError: if the adapter is not one for this model, or not finite.
        CheckpointError: if its weights are damaged.
    """
    from peft import PeftModel

    not_finite = names_of_not_finite(
        read_weights(folder).items()
    )  # which also says what is wrong with a damaged file
    if not_finite:
        raise UserError(
            f"An adapter's weights must be finite, but {folder / WEIGHTS_FILE} has NaN or infinity in "
            f"{some_of(not_finite)}. Use an earlier checkpoint of that run."
        )
    try:
        with without_pefts_warnings(), for_language_model(folder, whole) as read_from:
            device = str(model.device)
            peft_model = PeftModel.from_pretrained(model, str(read_from), torch_device=device)
            # from_pretrained only warns of tensors that are missing, and ignores those that no layer takes.
            loaded = peft_model.load_adapter(str(read_from), "default", torch_device=device)
    except (ValueError, RuntimeError, KeyError) as error:
        lines = [line.strip() for line in str(error).strip().splitlines()]
        why = (
            lines[1] if lines[0].endswith(":") and lines[1:] else lines[0]
        )  # "Error(s) in loading state_dict for X:"
        raise _does_not_fit(folder, model, why) from error
    for what, names in (("lacks", loaded.missing_keys), ("has no layer for", loaded.unexpected_keys)):
        if names:
            subject = WEIGHTS_FILE if what == "lacks" else "the model"
            raise _does_not_fit(folder, model, f"{subject} {what} {some_of(names)}.")
    _put_rows_in_tables(model)
    if beyond := _layers_beyond(model):
        logger.warning(
            "The adapter in %s has nothing for %d of the model's layers, all of them deeper than its own: %s. They "
            "stay as they are. If it was trained on a model of less depth, name that model as its base.",
            folder,
            len(beyond),
            some_of(beyond),
        )
    return peft_model


def _layers_beyond(model: nn.Module) -> list[str]:
    """Return the layers of adapted kinds that come after the last adapted one; empty if one before has none, either.

    A config may name each layer in full, as PEFT writes it for all-linear: a deeper model then keeps layers without an
    adapter. An adapter whose layers were chosen leaves others out before its last.
    """
    last: dict[str, int] = {}
    adapted = adapted_layers(model)
    for name in adapted:
        if (number := _NUMBER.search(name)) is not None:
            kind = _NUMBER.sub(".N.", name, count=1)
            last[kind] = max(last.get(kind, 0), int(number[1]))
    left_out = {
        name: int(number[1]) > last[kind]
        for name, _ in model.named_modules()
        if name not in adapted
        and (number := _NUMBER.search(name)) is not None
        and (kind := _NUMBER.sub(".N.", name, count=1)) in last
    }
    return list(left_out) if all(left_out.values()) else []


def _put_rows_in_tables(model: nn.Module) -> None:
    """Write trained rows into their tables, because PEFT's own layers would copy the table in each forward."""
    from peft.utils.other import TrainableTokensWrapper

    for name, module in list(model.named_modules()):
        if isinstance(module, TrainableTokensWrapper):
            module.token_adapter.merge(safe_merge=True)
            model.set_submodule(name, module.token_adapter.get_base_layer())


def _does_not_fit(folder: Path, model: PreTrainedModel, why: str) -> UserError:
    return UserError(
        f"The adapter in {folder} does not fit {type(model).__name__}: {why} Name the base model that "
        "it was trained on, or save the adapter again."
    )
