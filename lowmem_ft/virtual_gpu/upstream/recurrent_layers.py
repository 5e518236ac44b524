"""LSTM, GRU and RNN layers as cuDNN computes them on CUDA: one operator for all layers and time steps.

torch's C++ asks whether a tensor is on CUDA, so a virtual GPU would get its own loop over time steps. Packed sequences
are here, too. Source: pytorch, aten/src/ATen/native/RNN.cpp, cudnn/RNN.cpp and PackedSequence.cpp.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.upstream.patches import existing, replace, wrap
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.kernels.cudnn_operators import MODES

_TYPES = (torch.float16, torch.float32, torch.float64)

_SAID = (
    "{layer}: by cuDNN, which does not publish what it keeps for backward. The estimate has what it kept in one "
    "measured run, the range's upper end twice as much, and the time that of its products alone"
)


def packed_sequences_without_values(undo: contextlib.ExitStack) -> None:
    """Pack and pad rows of several lengths until a stack is undone."""
    replace(undo, torch._VF, "_pad_packed_sequence", _pad_packed_sequence)
    pack = existing(torch._VF, "_pack_padded_sequence")
    replace(undo, torch._VF, "_pack_padded_sequence", functools.partial(_pack_padded_sequence, pack))


def recurrent_layers_by_cudnn(
    undo: contextlib.ExitStack, say: Callable[[str], None], size_is_uncertain: Callable[[Tensor], None]
) -> None:
    """Compute layers on a virtual GPU as cuDNN does until a stack is undone.

    Args:
        undo: undoes it.
        say: called with what users have to know of it.
        size_is_uncertain: called with each tensor whose size cuDNN does not tell.
    """
    for mode in MODES:
        by_loop = existing(torch._VF, mode)
        replace(undo, torch._VF, mode, functools.partial(_layers, mode, say, size_is_uncertain, by_loop))
    wrap(undo, nn.RNNBase, "flatten_parameters", _flatten)


def _layers(
    mode: str,
    say: Callable[[str], None],
    size_is_uncertain: Callable[[Tensor], None],
    by_loop: Callable[..., Any],
    *args: Any,
) -> Any:
    """Compute ``torch.lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu`` for rows of one length, or for packed ones."""
    if not _takes(args[0]):
        return by_loop(*args)
    is_packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
    rows, *others = args
    sizes = others.pop(0).tolist() if is_packed else []
    hidden, weights, has_biases, num_layers, dropout, is_training, is_bidirectional = others[:7]
    hx, cx = hidden if mode == "lstm" else (hidden, None)
    projected = hx.shape[2] if cx is not None and cx.shape[2] != hx.shape[2] else 0
    say(_SAID.format(layer=mode.upper().partition("_")[0]))
    output, hy, cy, kept, _ = torch._cudnn_rnn(
        rows,
        weights,
        (4 if has_biases else 2) + bool(projected),
        _shared_buffer(weights),
        hx,
        cx,
        MODES[mode].number,
        (hx if cx is None else cx).shape[2],
        projected,
        num_layers,
        bool(not is_packed and others[7]),
        dropout,
        is_training,
        is_bidirectional,
        sizes,
        None,
    )
    size_is_uncertain(kept)
    return (output, hy) if cx is None else (output, hy, cy)


def _takes(tensor: Tensor) -> bool:
    is_virtual = tensor.device.type == DEVICE_TYPE
    return is_virtual and torch.backends.cudnn.enabled and tensor.dtype in _TYPES and tensor.numel() > 0


def _shared_buffer(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the memory that all weights share, as numbers; None if they share none, so that each call copies them."""
    storage = weights[0].untyped_storage()
    if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
        return None
    num_numbers = storage.nbytes() // weights[0].element_size()
    return weights[0].detach().as_strided((num_numbers,), (1,), 0)


def _flatten(flatten: Callable[[nn.RNNBase], None], layers: nn.RNNBase) -> None:
    """Move the weights of a module into one buffer, which has biases whether the module has them or not."""
    weights: Any = layers._flat_weights
    is_whole = len(weights) == len(layers._flat_weights_names) and all(
        isinstance(each, Tensor) for each in weights
    )
    if not is_whole or not all(_takes(each) and each.dtype == weights[0].dtype for each in weights):
        flatten(layers)
        return
    if len({each.untyped_storage()._cdata for each in weights}) < len(weights):
        return  # in one buffer already, or tied
    without = (
        0 if layers.bias else 2 * sum(each.shape[0] for each in weights[1 :: 3 if layers.proj_size else 2])
    )
    with torch.no_grad():
        buffer = weights[0].new_zeros(sum(each.numel() for each in weights) + without)
        start = 0
        for each in weights:
            place = buffer[start : start + each.numel()].view_as(each)
            place.copy_(each)
            each.data = place
            start += each.numel()


def _pack_padded_sequence(
    pack: Callable[..., Any], padded: Tensor, lengths: Tensor, batch_first: bool
) -> tuple[Tensor, Tensor]:
    """Pack by lengths on the host, which torch reads; fake tensors would hide where they are."""
    if lengths.device.type != "cpu":
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D cuda:{lengths.device.index or 0} Long tensor"
        )
    return pack(padded, lengths, batch_first)


def _pad_packed_sequence(
    packed: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Pad by the copies that torch's C++ makes, which writes the lengths into memory that a fake tensor lacks."""
    sizes = batch_sizes.tolist()
    shape = (max(total_length, len(sizes)), sizes[0], *packed.shape[1:])
    padded, start, first = packed.new_full(shape, padding_value), 0, 0
    for size, steps in ((size, len(list(alike))) for size, alike in itertools.groupby(sizes)):
        rows = packed[first : first + size * steps].view(steps, size, *packed.shape[1:])
        padded[start : start + steps, :size].copy_(rows)
        start, first = start + steps, first + size * steps
    lengths = torch.tensor([sum(size > row for size in sizes) for row in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths
