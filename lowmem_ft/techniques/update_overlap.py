"""Updates of device weights whose gradients and state are on the host, overlapped with the next step's forward."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.optimizer_in_backward import InBackward
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_update_overlap"]

log = logging.getLogger(__name__)


def enable_update_overlap(model: nn.Module | ModelParts, in_backward: InBackward) -> UpdateOverlap:
    """Defer the updates of decoder layers and head to the next forward, each one layer ahead of its use.

    Frees: nothing.
    Costs: device memory for the chunks of gradients that arrive, in the pool of a second stream. It saves the time that
    a step waits for gradients and state to cross the host link, if a layer's forward takes longer.
    Equals: the same updates bit for bit.
    Limits: until its next forward, a layer's weights are those before the last step; ``flush()`` makes all deferred
    updates, before weights are read. Embeddings, and whatever else is used before the layers, are updated in the step.
    Source: ZeRO-Offload, 2021 (arXiv:2101.06840), whose delayed update overlaps with the next step; that uses weights a
    step old, this waits for each layer's.

    Args:
        model: a causal LM from transformers, wrapped or not, or its parts, with all weights on the device.
        in_backward: its optimizer, whose gradients are kept on the host until their norm is known.

    Returns:
        A handle whose ``remove()`` makes the deferred updates; later ones are made in the step again.

    Raises:
        UserError: if gradients are applied at once, or kept on the device.
        ModelError: if the model's layers cannot be found.
    """
    if not in_backward.overlaps:
        raise UserError(
            "Updates can overlap with the forward pass if gradients are kept on the host until their norm is known. "
            "Give enable_optimizer_in_backward a max_grad_norm and a memory, or leave updates in the step."
        )
    parts = ModelParts.of(model)
    layers = list(parts.layers(way_out="optimizer.in_backward=false"))
    overlap = UpdateOverlap(layers, _groups(parts, layers), in_backward)
    log.info("Updates of %d layers overlap with the next forward pass, one layer ahead.", len(layers))
    return overlap


class UpdateOverlap(Technique):
    """Updates that are made one layer ahead; see :func:`enable_update_overlap`.

    Args:
        layers: the decoder layers, in the order of forward.
        groups: the parameters that each layer updates, and after them those that are used after the last layer.
        updates: the updater.
    """

    def __init__(
        self, layers: Sequence[nn.Module], groups: Sequence[list[nn.Parameter]], updates: InBackward
    ) -> None:
        self._groups = groups
        self._updates = updates
        for group in groups:
            updates.defer(group)
        super().__init__(*self._hooks(layers), self._defer_no_more)

    def _hooks(self, layers: Sequence[nn.Module]) -> Iterator[Callable[[], None]]:
        for index, layer in enumerate(layers):
            before = partial(self._before_forward, index)
            yield layer.register_forward_pre_hook(before, prepend=True).remove
        yield layers[-1].register_forward_hook(self._after_last_layer).remove

    @torch.no_grad()
    def _before_forward(self, index: int, *_: Any) -> None:
        if is_in_backward():  # a recomputation
            return
        self._apply(self._groups[index])
        if self._updates.has_deferred(self._groups[index + 1]):
            self._updates.fork()  # the next call's updates overlap with this layer

    @torch.no_grad()
    def _after_last_layer(self, *_: Any) -> None:
        self._apply(self._groups[-1])

    def _apply(self, parameters: Sequence[nn.Parameter]) -> None:
        """Apply updates, issued after the layer before: the host may wait for files while the device has work."""
        if self._updates.has_deferred(parameters):
            with self._updates.beside():
                self._updates.apply(parameters)

    def _defer_no_more(self) -> None:
        self._updates.flush()
        for group in self._groups:
            self._updates.defer_no_more(group)


def _groups(parts: ModelParts, layers: Sequence[nn.Module]) -> list[list[nn.Parameter]]:
    """Return by layer the parameters that nothing else uses; after them the head's, if it has its own."""
    count = Counter(
        parameter for module in parts.model.modules() for parameter in module._parameters.values()
    )
    groups = [
        [parameter for parameter in layer.parameters() if parameter.requires_grad and count[parameter] == 1]
        for layer in layers
    ]
    of_head = () if parts.head is None else parts.head.parameters()
    own = [one for one in of_head if one.requires_grad and count[one] == 1]
    return [*groups, own]
