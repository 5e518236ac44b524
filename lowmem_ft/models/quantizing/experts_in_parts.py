"""Experts of a checkpoint for a packer that takes some of them at a time, through transformers' own conversions.

transformers puts a layer's experts together before it hands them to a quantiser: a whole tensor in 16 bits, twice while
its parts are joined. Here its conversion is called for a few experts after the other. Files may hold a tensor an
expert, or one of three axes, of which rows are read.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.out_of_memory_errors import is_failed_allocation
from lowmem_ft.models.files.checkpoint_files import rows_of_weights

ReadExperts = Callable[[slice], Tensor]
"""Returns the weights of some experts: shape (number of them, O, I), or (..., I, O) where the module stores them so."""


def in_parts(conversions: Iterable[Any], names: Iterable[str]) -> list[Any]:
    """Return conversions of a checkpoint that let a quantiser read some experts at a time.

    Args:
        conversions: transformers' own of a model.
        names: the model's tensors of experts. One that no conversion makes is in files of the same name.

    Returns:
        Conversions whose quantiser has the name of each tensor of experts in its ``modules_of_experts``, and is asked
        for the packed tensor by ``pack_experts(name, read, shape)``.
    """
    result = [
        _InParts.of(one) if type(one) is WeightConverter and _keeps_experts_apart(one) else one
        for one in conversions
    ]
    known = {pattern for one in result if isinstance(one, WeightConverter) for pattern in one.source_patterns}
    endings = {".".join(name.rsplit(".", 2)[1:]) for name in names}
    # A copy of the few experts that were read, and undone by another when a model is saved.
    return result + [_InParts(one, one, [Concatenate(0)]) for one in sorted(endings - known)]


def _keeps_experts_apart(conversion: WeightConverter) -> bool:
    """Return whether no operation looks at two experts, except for the one that puts them together."""
    first, *others = conversion.operations
    rest = others if isinstance(first, MergeModulelist) and first.dim == 0 else conversion.operations
    axes = [[vars(one)[axis] for axis in ("dim", "dim0", "dim1") if axis in vars(one)] for one in rest]
    return len(conversion.target_patterns) == 1 and all(of_one and min(of_one) > 0 for of_one in axes)


class _InParts(WeightConverter):
    """A conversion that gives the quantiser of a tensor of experts a function in place of the tensor."""

    __slots__ = ()

    @classmethod
    def of(cls, conversion: WeightConverter) -> WeightConverter:
        """Return the same conversion with this way of doing it."""
        result = copy.copy(conversion)
        result.__class__ = cls
        return result

    def convert(
        self,
        layer_name: str,
        model: Any = None,
        config: Any = None,
        hf_quantizer: Any = None,
        *rest: Any,
        **named: Any,
    ) -> dict[str, Any]:
        """Return the packed tensor; other tensors, and those that are saved, are converted as ever."""
        if hf_quantizer is None or layer_name not in hf_quantizer.modules_of_experts:
            return super().convert(layer_name, model, config, hf_quantizer, *rest, **named)
        shape = tuple(model.get_parameter(layer_name).shape)
        readers, are_apart = dict(self.collected_tensors), isinstance(self.operations[0], MergeModulelist)
        self._check_numbers(layer_name, shape[0] if are_apart else 1)
        convert: Any = super().convert

        def read(experts: slice) -> Tensor:
            self.collected_tensors.update(
                {pattern: own[experts] if are_apart else own for pattern, own in readers.items()}
            )
            try:
                with contextlib.nullcontext() if are_apart else rows_of_weights(experts, shape[0]):
                    (values,) = convert(layer_name, model, config).values()
            except RuntimeError as error:
                if is_failed_allocation(error):
                    raise
                raise _do_not_match(layer_name, str(error)) from error
            if values.shape != (expected := (len(range(shape[0])[experts]), *shape[1:])):
                raise _do_not_match(layer_name, f"{list(values.shape)} instead of {list(expected)}")
            return values

        return {layer_name: hf_quantizer.pack_experts(layer_name, read, shape)}

    def _check_numbers(self, name: str, expected: int) -> None:
        for pattern in self.source_patterns:
            found = len(self.collected_tensors.get(pattern, ()))
            if found != expected:
                raise _do_not_match(name, f"{found} of the {expected} tensors {pattern} that it is made from")


def _do_not_match(name: str, found: str) -> ModelError:
    return ModelError(
        f"A checkpoint must hold all experts of each layer in the shapes that its config.json gives; for {name} "
        f"it has {found}. Download the model again, or point model.name_or_path at a complete checkpoint."
    )
