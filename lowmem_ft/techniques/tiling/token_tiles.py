"""A module's forward over tiles of tokens, differentiated so that each parameter gets one gradient.

Autograd's nodes of one call, in the order of backward: :class:`_InTiles` recomputes tile after tile and sums the
gradients; :class:`_Keep` passes the input's on; :class:`_StandIn`, one per parameter, finishes that parameter's.

Axes: B rows, T tokens of a row, N tokens of the batch (B * T), H hidden size, C tokens of one tile, O outputs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.techniques.gradients.gradient_sums_in_products import SummingLinear, sum_in_grad
from lowmem_ft.techniques.gradients.weight_gradient import WeightGradient
from lowmem_ft.techniques.modules.autocast_state import AutocastState
from lowmem_ft.techniques.modules.patching import set_attribute


class ForwardInTiles:
    """Replacement for the forward of a module that treats each token by itself.

    Args:
        module: takes one tensor of B x T x H and returns another.
        num_tiles: number of tiles of the B * T tokens.
    """

    def __init__(self, module: nn.Module, num_tiles: int) -> None:
        self.module = module
        self._num_tiles = num_tiles
        self._stock_forward: Callable[..., Tensor] = module.forward
        self._of_tokens: dict[str, Tensor] = {}

    def __call__(self, hidden_states: Tensor, **others: Any) -> Tensor:
        """Return the module's output, connected to the graph.

        Args:
            hidden_states: B x T x H.
            others: further arguments of the stock forward, each None or a number for each token: the token ids
                by which some routers choose.
        """
        given = {name: value for name, value in others.items() if value is not None}
        if given:
            return self._with(given, hidden_states)(hidden_states)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if not torch.is_grad_enabled() or not (hidden_states.requires_grad or parameters):
            return self.in_tiles(hidden_states).view_as(hidden_states)
        kept, sums = _Kept(), _Sums()
        stand_ins = [_StandIn.apply(parameter, sums) for parameter in parameters]
        same = _Keep.apply(hidden_states, kept, *stand_ins[:1])
        # The view is created out here: autograd forbids changing a view that a Function returns, as Falcon's layers do.
        return _InTiles.apply(same, self, kept, sums, *stand_ins).view_as(hidden_states)

    def _with(self, given: dict[str, Any], hidden_BTH: Tensor) -> ForwardInTiles:
        """Return the same forward for one call, in which each tile gets its tokens of further arguments."""
        for name, value in given.items():
            if not isinstance(value, Tensor) or value.shape != hidden_BTH.shape[:-1] or value.requires_grad:
                raise ModelError(
                    f"tiling.mlp cuts what an MLP takes by tokens, but {type(self.module).__name__} was given {name}, "
                    "which is not a number for each token. Set tiling.mlp=1."
                )
        once = copy.copy(self)
        once._of_tokens = {name: value.reshape(1, -1) for name, value in given.items()}
        return once

    def _of_tile(self, hidden_1CH: Tensor, tokens: slice) -> Tensor:
        others = {name: value[:, tokens] for name, value in self._of_tokens.items()}
        return self._stock_forward(hidden_1CH, **others)

    def in_tiles(self, hidden_BTH: Tensor) -> Tensor:
        """Return the module's output, one tile after the other, as 1 x N x H; for calls without a graph."""
        hidden_1NH = _one_row(hidden_BTH)
        tiles = [self._of_tile(hidden_1NH[:, tokens], tokens) for tokens in self._tokens_of(hidden_1NH)]
        return torch.cat(tiles, dim=1)

    def differentiated(
        self, hidden_BTH: Tensor, d_output_BTH: Tensor, gradients: _ParameterGradients
    ) -> Tensor:
        """Return the gradient of the input; adds those of the parameters."""
        hidden_1NH, d_output_1NH = _one_row(hidden_BTH), _one_row(d_output_BTH)
        d_hidden_1NH = torch.empty_like(hidden_1NH)
        with gradients.collected_from_linear_layers():
            for tokens in self._tokens_of(hidden_1NH):
                hidden_1CH = hidden_1NH[:, tokens].detach().requires_grad_()
                with torch.enable_grad():
                    output_1CH = self._of_tile(hidden_1CH, tokens)
                d_hidden_1NH[:, tokens], *by_autograd = torch.autograd.grad(
                    output_1CH,
                    [hidden_1CH, *gradients.trained],
                    d_output_1NH[:, tokens],
                    allow_unused=True,
                )
                gradients.add(by_autograd)
                del hidden_1CH, output_1CH, by_autograd  # else they live while the next tile is computed
        return d_hidden_1NH.view_as(hidden_BTH)

    def _tokens_of(self, hidden_1NH: Tensor) -> list[slice]:
        num_tokens = hidden_1NH.shape[1]
        size = max(1, -(-num_tokens // self._num_tiles))
        return [slice(start, start + size) for start in range(0, max(num_tokens, 1), size)]


class _Kept:
    """The node whose saved tensor is the input of :class:`_InTiles`."""

    saver: Any = None


class _Sums:
    """The sums that :class:`_InTiles` leaves for :class:`_StandIn`.

    Not one object with :class:`_Kept`: the saver's inputs include a stand-in, and a reference cycle would keep the
    activations of each recomputed layer until Python's garbage collector runs.
    """

    gradients: _ParameterGradients | None = None


class _Keep(torch.autograd.Function):
    """Passes a tensor on, and saves it for :class:`_InTiles`.

    Saved before the module is computed, the input is the last that a checkpointed layer saves if the module ends it:
    the recomputation stops there, and does not compute the module. (What a Function saves, it saves after its forward.)

    A stand-in among the inputs makes it save even if the input needs no gradient, as after frozen embeddings.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, kept: _Kept, *stand_in: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.num_stand_ins = len(stand_in)
        kept.saver = ctx
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, d_hidden: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_hidden, None, *[None] * ctx.num_stand_ins


class _StandIn(torch.autograd.Function):
    """A scalar that represents a parameter among the inputs of :class:`_InTiles`.

    Its backward comes afterwards and creates the parameter's gradient, right before the hooks on it take it: gradients
    leave one by one, where a single Function would have to return all of them at once.
    """

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, sums: _Sums) -> Tensor:
        ctx.parameter, ctx.sums = parameter, sums
        return parameter.new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_stand_in: Tensor) -> tuple[Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert ctx.sums.gradients is not None  # set by _InTiles, whose input the stand-in was
        return ctx.sums.gradients.take(ctx.parameter), None


class _InTiles(torch.autograd.Function):
    """The module, differentiated tile by tile."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, work: ForwardInTiles, kept: _Kept, sums: _Sums, *stand_ins: Tensor
    ) -> Tensor:
        ctx.work, ctx.kept, ctx.sums, ctx.num_stand_ins = work, kept, sums, len(stand_ins)
        ctx.autocast_state = AutocastState(hidden.device)
        return work.in_tiles(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (hidden,) = ctx.kept.saver.saved_tensors
        gradients = _ParameterGradients(ctx.work.module, hidden.shape[:-1].numel())
        with ctx.autocast_state.again():
            d_hidden = ctx.work.differentiated(hidden, d_output, gradients)
        ctx.sums.gradients = gradients
        d_stand_in = d_output.new_zeros((), dtype=torch.float32)
        return (d_hidden, None, None, None, *[d_stand_in] * ctx.num_stand_ins)


class _ParameterGradients:
    """Sums of a module's gradients over tiles of tokens.

    The weight of a plain ``nn.Linear`` gets its gradient from the factors that its layer's calls collect. Autograd
    computes the other parameters', and that of such a weight if the module uses it by other means than calling its
    layer, as PEFT does next to fused experts. A weight whose gradient is summed in the product gets it there.

    Attributes:
        trained: the parameters that autograd differentiates.
    """

    def __init__(self, module: nn.Module, num_tokens: int) -> None:
        self.trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._linears = [
            part for part in module.modules() if type(part) is nn.Linear and part.weight.requires_grad
        ]
        self._summed = {
            linear.weight: sum_in_grad(linear.weight)
            for linear in self._linears
            if isinstance(linear.forward, SummingLinear)
        }
        self._handed_over = {
            weight: WeightGradient(
                weight.shape, weight.dtype, weight.device, num_tokens, self._summed.get(weight)
            )
            for weight in (linear.weight for linear in self._linears)
        }
        self._by_autograd = {
            parameter: _zeros_for_sum(parameter)
            for parameter in self.trained
            if parameter not in self._handed_over
        }

    @contextlib.contextmanager
    def collected_from_linear_layers(self) -> Iterator[None]:
        """Collect the factors of linear layers' weight gradients in a ``with`` block."""
        undo = [
            set_attribute(linear, "forward", _HandingOver(linear, self._handed_over[linear.weight]))
            for linear in self._linears
        ]
        with Handle(*undo):
            yield

    def add(self, by_autograd: Sequence[Tensor | None]) -> None:
        """Add one tile's gradients of ``trained``; None for a parameter that autograd has not met."""
        for parameter, gradient in zip(self.trained, by_autograd, strict=True):
            if gradient is None:
                continue
            if parameter not in self._by_autograd:
                self._by_autograd[parameter] = _zeros_for_sum(parameter)
            self._by_autograd[parameter] += gradient

    def take(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the finished gradient of a parameter, in its type, and release its sum; None: it is in ``.grad``."""
        by_autograd = self._by_autograd.pop(parameter, None)
        if parameter not in self._handed_over:
            assert by_autograd is not None, "its sum exists from the beginning"
            return by_autograd.to(parameter.dtype)
        handed_over = self._handed_over.pop(parameter).finish()
        if self._summed.pop(parameter, None) is not None:
            return by_autograd
        return handed_over if by_autograd is None else by_autograd.add_(handed_over).to(parameter.dtype)


class _HandingOver:
    """Replacement for a linear layer's forward that collects the factors of its weight's gradient."""

    def __init__(self, linear: nn.Linear, gradient: WeightGradient) -> None:
        self._linear = linear
        self._gradient = gradient

    def __call__(self, input: Tensor) -> Tensor:
        weight, bias = self._linear.weight.detach(), self._linear.bias
        return _LinearWithoutWeightGradient.apply(input, weight, bias, self._gradient)


class _LinearWithoutWeightGradient(torch.autograd.Function):
    """``F.linear``, whose backward passes the two factors of the weight's gradient to a collector."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, gradient: WeightGradient
    ) -> Tensor:
        output = F.linear(input, weight, bias)  # under autocast this casts
        ctx.save_for_backward(input.to(output.dtype), weight)
        ctx.gradient, ctx.input_dtype = gradient, input.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight = ctx.saved_tensors
        d_output_CO = d_output.flatten(0, -2)
        ctx.gradient.add(d_output_CO, input.flatten(0, -2))
        d_input = (d_output @ weight.to(d_output.dtype)).to(ctx.input_dtype)
        d_bias = d_output_CO.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return d_input, None, d_bias, None


def _one_row(tensor_BTH: Tensor) -> Tensor:
    """Return all tokens in one row, whose tiles are views."""
    return tensor_BTH.reshape(1, -1, tensor_BTH.shape[-1])


def _zeros_for_sum(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
