"""Conversion of one parameter's state from the formats it was saved in to those of an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.tensors.local_shards import local_part
from lowmem_ft.optimizers.chunks import flat_weight, spans
from lowmem_ft.optimizers.formats.master_formats import master_format
from lowmem_ft.optimizers.formats.state_formats import state_format
from lowmem_ft.optimizers.table import StateFormats, format_of
from lowmem_ft.optimizers.updates.update_rule import WholeParameterRule

if TYPE_CHECKING:
    from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer

logger = logging.getLogger(__name__)

_CHUNK_ELEMENTS = 2**20


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """Saved state of one parameter.

    Args:
        values: by the keys of ``optimizer.state``; for a sharded parameter, this process's part.
        state: format of the running averages, or formats by their names.
        master: format of 16-bit weights.
        dtype: type of the weight.
        weight: the weight as it was saved, if available; flat or not.
    """

    values: Mapping[str, Any]
    state: StateFormats
    master: str
    dtype: torch.dtype
    weight: Tensor | None = None


@torch.no_grad()
def take_state(optimizer: ChunkedOptimizer, parameter: nn.Parameter, saved: SavedState) -> None:
    """Copy saved state into an optimizer's, bit for bit if the formats are the same.

    The parameter must already hold the saved weight, in its own type. Between formats of different precision the value
    is rounded to what the target format can hold; between float32 weights, ``fp32`` and ``split16`` the conversion is
    exact.

    Args:
        optimizer: its state of the parameter is overwritten.
        parameter: one of its parameters.
        saved: tensors may be on any device; they are read chunk by chunk.

    Raises:
        KeyError: if a tensor of those formats is missing.
    """
    optimizer.allocate_state([parameter])
    own = optimizer.state[parameter]
    own["step"] = int(saved.values["step"])
    _take_averages(optimizer, parameter, saved)
    if isinstance(optimizer.rule, WholeParameterRule):
        for name in optimizer.rule.statistics(parameter.shape):
            own[name].copy_(saved.values[name])
    saved_as = master_format(saved.master, saved.dtype)
    if saved_as is not optimizer.master_of(parameter):
        _take_weight(optimizer, parameter, saved)
        return
    for name in saved_as.tensors:
        own[name].copy_(saved.values[name])


def _take_averages(optimizer: ChunkedOptimizer, parameter: nn.Parameter, saved: SavedState) -> None:
    own, num_elements = optimizer.state[parameter], local_part(parameter).numel()
    for stream, (name, form) in enumerate(optimizer.averages_of(parameter).items(), start=1):
        saved_as = state_format(format_of(saved.state, name), signed=form.signed)
        if saved_as == form:
            for key in form.tensors(name, num_elements):
                own[key].copy_(saved.values[key])
            continue
        for start, stop in spans(0, num_elements, _CHUNK_ELEMENTS):
            chunk = saved_as.chunk(saved.values, name, start, stop)
            here = {key: tensor.to(own[name].device) for key, tensor in chunk.items()}
            value = saved_as.read(here, name, stop - start)
            random = optimizer.random_of(parameter, own["step"], start)
            form.write(value, form.chunk(own, name, start, stop), name, random, stream)


def _take_weight(optimizer: ChunkedOptimizer, parameter: nn.Parameter, saved: SavedState) -> None:
    """Set the weight and its master from what another format kept."""
    saved_as = master_format(saved.master, saved.dtype)
    weight = flat_weight(parameter) if saved.weight is None else saved.weight.reshape(-1)
    if saved.dtype == torch.float32 and weight.dtype != torch.float32:
        logger.warning(
            "A weight of %d elements was saved in float32 but is available only in %s: its master begins from that.",
            parameter.numel(),
            weight.dtype,
        )
        saved_as = master_format("none", weight.dtype)
    weight = weight.clone()  # it may be the tensor that is written

    def values(start: int, stop: int) -> Tensor:
        kept = {name: saved.values[name][start:stop].to(weight.device) for name in saved_as.tensors}
        return saved_as.read(weight[start:stop].to(saved.dtype), kept)

    optimizer.set_weights(parameter, values)
