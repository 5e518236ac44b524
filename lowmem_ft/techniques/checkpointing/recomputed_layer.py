"""A decoder layer that runs forward again in backward, at a small part of the host's time of torch's checkpoint.

As ``torch.utils.checkpoint`` without reentrant autograd: hooks put a placeholder where the layer would save a tensor;
the first of them that backward needs runs the layer again, up to the last tensor that it would save. Torch's calls
several functions more for each tensor, through its compiler's switch, and always keeps the state of random numbers.
Here that is kept only for a layer that may draw some.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError, checkpoint

from lowmem_ft.techniques.modules.autocast_state import AutocastState, autocast_of_now

_OF_RANDOM_NUMBERS = ("drop", "jitter", "noise")
"""Parts of the names of attributes which, if they are not zero, make a module draw random numbers."""
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class RecomputedLayer:
    """The checkpointing function of one decoder layer.

    The state of random numbers is kept while a dropout or an attribute of a telling name is not zero, in the first
    forward, and ever after if that has drawn any.

    Args:
        layer: the layer, with its adapters.
    """

    def __init__(self, layer: nn.Module) -> None:
        # Weak references: a layer that keeps this would be part of a reference cycle.
        self._probabilities = [(weakref.ref(module), name) for module, name in _probabilities(layer)]
        self._has_drawn: bool | None = None

    def __reduce__(self) -> Any:
        """Leave copies of a model, whose modules are others, to torch's checkpoint."""
        return partial(checkpoint, use_reentrant=False).__reduce__()

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return the function's result, and let backward compute it again."""
        if not torch.is_grad_enabled():
            return function(*args)
        devices = {one.device for one in args if isinstance(one, Tensor)}
        if len(devices) != 1:
            return checkpoint(function, *args, use_reentrant=False)
        (device,) = devices
        state = AutocastState(device) if self._may_draw() else None
        call = _Call(function, args, device, state)
        with saved_tensors_hooks(call.pack, call.unpack):
            result = function(*args)
        if self._has_drawn is None:
            assert state is not None
            self._has_drawn = state.has_drawn()
        return result

    def _may_draw(self) -> bool:
        if self._has_drawn is not False:
            return True
        return any(getattr(module(), name, True) for module, name in self._probabilities)


def _probabilities(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield modules and the names of the numbers that make them draw random ones."""
    for module in layer.modules():
        for name, value in vars(module).items():
            is_telling = any(part in name.lower() for part in _OF_RANDOM_NUMBERS)
            is_telling = is_telling or (name == "p" and isinstance(module, _DROPOUTS))
            if is_telling and isinstance(value, (int, float)):
                yield module, name


def _short(hook: Any) -> Any:
    """Let a trace count a hook as what it keeps the host: half of one of torch's checkpoint (``calibrate host``)."""
    hook.host_python = "short hook"
    return hook


class _Placeholder:
    """A tensor that the layer would have saved; it has the tensor from the recomputation until it is used."""

    __slots__ = ("__weakref__", "kind", "tensor")

    def __init__(self, kind: tuple[Any, ...]) -> None:
        self.kind = kind
        self.tensor: Tensor | None = None


class _Recomputed(Exception):  # no error: it leaves a forward that has saved all there is
    """A layer has come to the last tensor that it would save."""


class _Call:
    """One call of a layer, which backward repeats.

    Args:
        function: the layer's forward.
        args: its arguments; tensors among them are saved by autograd, so that hooks around the layer take them.
        device: the tensors' device.
        state: autocast and random numbers before the call; None: it draws none.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        device: torch.device,
        state: AutocastState | None,
    ) -> None:
        self._function = function
        self._others = [None if isinstance(one, Tensor) else one for one in args]
        self._is_tensor = [isinstance(one, Tensor) for one in args]
        tensors = (one for one in args if isinstance(one, Tensor))
        self._saved = _Inputs.apply(torch.empty(0, requires_grad=True), *tensors).grad_fn
        self._state = state
        self._autocasts = _autocasts_of_now(device)
        self._placeholders: list[weakref.ref[_Placeholder]] = []
        self._num_recomputed = 0

    @_short
    def pack(self, tensor: Tensor) -> _Placeholder:
        """Keep a placeholder for a tensor."""
        placeholder = _Placeholder((tensor.shape, tensor.dtype, tensor.device))
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    def unpack(self, placeholder: _Placeholder) -> Tensor:
        """Return a placeholder's tensor, which is then its user's alone."""
        if placeholder.tensor is None:
            self._recompute()
        tensor, placeholder.tensor = placeholder.tensor, None
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        tensors = iter(self._saved.saved_tensors)
        args = [
            next(tensors) if is_tensor else other
            for is_tensor, other in zip(self._is_tensor, self._others, strict=True)
        ]
        self._num_recomputed = 0
        try:
            with saved_tensors_hooks(self._pack_again, _unpacked), torch.enable_grad(), self._surroundings():
                self._function(*args)
        except _Recomputed:
            return
        raise CheckpointError(
            f"A checkpointed layer saved {len(self._placeholders)} tensors for backward, but {self._num_recomputed} "
            "when it was computed again: its forward must do the same both times."
        )

    @_short
    def _pack_again(self, tensor: Tensor) -> Tensor:
        placeholder = self._placeholders[self._num_recomputed]()
        self._num_recomputed += 1
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if placeholder is not None:  # else its node is gone
            kind = tensor.shape, tensor.dtype, tensor.device
            if kind != placeholder.kind:
                raise CheckpointError(
                    f"A checkpointed layer saved a tensor of {placeholder.kind} for backward, but of {kind} when it "
                    "was computed again: its forward must do the same both times."
                )
            placeholder.tensor = tensor
        if self._num_recomputed == len(self._placeholders):
            raise _Recomputed
        return tensor

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._state is not None:
                stack.enter_context(self._state.again())
            for autocast in self._autocasts:
                stack.enter_context(autocast())
            yield


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trained: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> Any:
        raise AssertionError("nothing uses its output")


def _autocasts_of_now(device: torch.device) -> list[Callable[[], torch.autocast]]:
    """Return what makes autocast as it is now; backward runs without it."""
    kinds = {device.type: device, "cpu": torch.device("cpu")}
    return [autocast_of_now(one) for name, one in kinds.items() if torch.is_autocast_enabled(name)]


def _unpacked(tensor: Tensor) -> Tensor:
    return tensor
