"""Initial master weights: bfloat16 weights keep the lower bits of a float32 checkpoint in their masters."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor, nn

from lowmem_ft.foundation.tensors.finiteness import some_of
from lowmem_ft.foundation.tensors.local_shards import first_element, whole_shape
from lowmem_ft.models.master_weights import MasterWeights
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.techniques.adapters.trained_rows import trained_parameters

logger = logging.getLogger(__name__)


def initialize_masters(
    optimizer: ChunkedOptimizer, model: nn.Module, full_precision_weights: Callable[[], MasterWeights | None]
) -> None:
    """Initialize the masters of bfloat16 weights with the bits of a float32 checkpoint that the weights have lost.

    Args:
        optimizer: has allocated its state.
        model: whose parameters the optimizer holds.
        full_precision_weights: reads the checkpoint's weights in full, or returns None if the model has all of their
            bits.
    """
    drawn = trained_parameters(model)  # by the run: no checkpoint has finer ones
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter in optimizer.state and optimizer.master_of(parameter).tensors and parameter not in drawn
    }
    finer = full_precision_weights() if parameters else None
    if finer is None:
        return
    for name, parameter in parameters.items():
        if finer.has(name, whole_shape(parameter)):
            optimizer.set_weights(parameter, _of_this_process(parameter, finer.values(name)))
        else:
            finer.changed.add(name)
    but = f", except for {some_of(sorted(finer.changed))}, which have changed since" if finer.changed else ""
    logger.info("Masters begin with the checkpoint's weights, which are finer than bfloat16%s.", but)


def _of_this_process(
    parameter: nn.Parameter, values: Callable[[int, int], Tensor]
) -> Callable[[int, int], Tensor]:
    """Turn a reader of a whole parameter into one of the elements that this process holds."""
    first = first_element(parameter)
    return lambda start, stop: values(first + start, first + stop)
