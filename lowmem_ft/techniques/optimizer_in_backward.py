"""Gradients that are used, or put away compactly, as soon as backward has finished them.

Without clipping a gradient is applied and gone before the next layer's are made. Clipping needs the norm of all of
them first, so that it takes two phases: while backward runs, squares are summed and gradients are kept in the type of
their weights, on the device or on the host; then they are applied, scaled, at the end of the step or, for weights that
are not on the device then, at their next visit.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.host.pinned_memory import HostMemory
from lowmem_ft.host.side_stream import SideStream
from lowmem_ft.techniques.gradients.norm import clip_factor, norm_in_float32
from lowmem_ft.techniques.technique import Technique, Unscale
from lowmem_ft.tensors.gradient_slice import GradientSlice
from lowmem_ft.tensors.local_shards import is_sharded, local_part, sum_over_shards

log = logging.getLogger(__name__)

_ELEMENTS_AT_ONCE = 2**22
"""Elements of a gradient that come back from the host together."""


_ALIGNMENT = 256
"""Bytes at whose multiples each place begins, as the vector loads of kernels want it."""


class SupportsSliceUpdates(Protocol):
    """An optimizer that can update a slice of a parameter by itself; see ``optimizers.ChunkedOptimizer``."""

    param_groups: list[dict[str, Any]]

    @property
    def slice_unit(self) -> int | None:
        """Slices begin and end at multiples of this, or with their parameter; None: a slice is a whole parameter."""
        ...

    def update(
        self,
        slices: Iterable[GradientSlice],
        *,
        scale: Tensor | None = None,
        hyperparameters: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Update slices of parameters now."""
        ...

    def written(self, parameter: nn.Parameter) -> CopyEvent:
        """The end of the last copy that brought an updated weight back to where it waits."""
        ...

    def step(self) -> object:
        """Update every parameter that has a gradient."""
        ...

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Have a hook called before each step."""
        ...


@dataclass(frozen=True)
class Pending:
    """What an update needs beside the gradients, as it was at the step they belong to.

    Args:
        scale: factor on the gradients; 0-d, float32, on the device.
        hyperparameters: by group index.
    """

    scale: Tensor
    hyperparameters: Mapping[int, Mapping[str, Any]]


class InBackward(Technique):
    """An optimizer that is fed by backward; see :func:`enable_optimizer_in_backward`.

    Attributes:
        updates_at_once: whether weights change while backward runs: there is no clipping.
    """

    def __init__(
        self,
        optimizer: SupportsSliceUpdates,
        *,
        device: torch.device,
        max_grad_norm: float | None,
        memory: HostMemory | None,
    ) -> None:
        self.updates_at_once = max_grad_norm is None
        self._optimizer = optimizer
        self._max_grad_norm = max_grad_norm
        self._sum_of_squares = torch.zeros((), dtype=torch.float32, device=device)
        self._scale: Tensor | None = None
        self._taken: set[tuple[nn.Parameter, int]] = set()
        self._kept = KeptGradients(device, optimizer, None if self.updates_at_once else memory)
        self._deferred: set[nn.Parameter] = set()
        self._pending: dict[nn.Parameter, Pending] = {}
        self._is_updating = False
        self._side = SideStream(device)
        # Python's collector does not see that torch holds these hooks: one that led back to its parameter, as we do by
        # the optimizer, would keep all of them for good.
        take = partial(_take_from_autograd, weakref.ref(self))
        hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in _parameters(optimizer)]
        hooks.append(optimizer.register_step_pre_hook(self._apply_kept))
        super().__init__(*(hook.remove for hook in hooks), self.flush)

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, gradient: Tensor, start: int = 0) -> None:
        """Use a finished gradient: once a step for each slice of a parameter.

        Args:
            parameter: one of the optimizer's.
            gradient: on the device; of that slice's shape or flat. It is given away, and may be overwritten.
            start: the slice's first element in the flattened parameter; see ``slice_unit`` of the optimizer. Slices
                are of one size, but for the last.
        """
        if (parameter, start) in self._taken:
            raise UserError(
                f"optimizer.in_backward needs each gradient once a step, but that of a parameter of shape "
                f"{list(parameter.shape)} came twice: something calls backward inside backward (such as reentrant "
                "checkpointing), or twice a step. Set optimizer.in_backward=false."
            )
        if not self._taken:
            _refuse_copies_in_processes(self._optimizer)  # whose group may have been made since
        self._taken.add((parameter, start))
        gradient = gradient.contiguous()
        self._sum_of_squares += norm_in_float32(gradient).square()
        if self.updates_at_once:
            # What is not finite must not reach a weight, and nobody waits for the device to say so. From the first such
            # gradient on all are zero.
            gradient.masked_fill_(~torch.isfinite(self._sum_of_squares), 0)
            self._optimizer.update([GradientSlice(parameter, gradient, start)])
        else:
            assert parameter not in self._pending, "apply() goes before the next gradient"
            self._kept.add(GradientSlice(parameter, gradient, start))

    def clip_grad_norm(self, unscale: Unscale) -> Tensor:
        """End the first phase: the norm of all gradients, and with it the factor they will be applied with.

        Args:
            unscale: divides a tensor by the fp16 loss scale in place, and takes note if it is not finite.

        Returns:
            The global norm before clipping; 0-d, float32.
        """
        of = _parameters(self._optimizer)[0]  # sharded among the same processes as all others
        norm = sum_over_shards(self._sum_of_squares, of).sqrt()
        norm_and_one = torch.stack((norm, torch.ones_like(norm)))
        unscale(norm_and_one)
        norm, inverse_scale = norm_and_one.unbind()
        if self._max_grad_norm is not None:
            self._scale = clip_factor(norm, self._max_grad_norm) * inverse_scale
        self._sum_of_squares = torch.zeros_like(norm)
        self._taken.clear()
        self._kept.end_backward()
        return norm

    def update_weights(self, *, finite: bool) -> bool:
        """End the step: apply what was kept, or forget it.

        Args:
            finite: whether loss and norm are. If not, and ``updates_at_once``, some weights have changed already.
        """
        if finite:
            self._optimizer.step()  # through the hook on it: schedules and meters watch steps
        else:
            self._kept.clear()
        return True

    def defer(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on apply kept gradients of these parameters only when :meth:`apply` is called for them."""
        self._deferred.update(parameters)

    def defer_no_more(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on apply them in the step again."""
        self._deferred.difference_update(parameters)

    def has_deferred(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether :meth:`apply` would update any of these parameters."""
        return any(parameter in self._pending for parameter in parameters)

    @torch.no_grad()
    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make the updates of these parameters that wait, with the scale and the learning rate of their own step."""
        waiting = [parameter for parameter in parameters if parameter in self._pending]
        steps = {id(step): step for step in (self._pending.pop(parameter) for parameter in waiting)}
        for step in steps.values():
            assert len(steps) == 1, "nothing waits for longer than one step"
            self._update(waiting, step.scale, step.hyperparameters)

    @property
    def overlaps(self) -> bool:
        """Whether updates may be made beside the computing.

        Gradients that wait on the device would have to stay until the computing has waited for their updates.
        """
        return self._kept.memory is not None

    def fork(self) -> None:
        """Let the updates of the next :meth:`beside` run beside all that is computed from here on."""
        if self.overlaps:
            self._side.fork()

    def beside(self) -> AbstractContextManager[None]:
        """In a ``with`` block, make updates beside the computing since the fork; without :attr:`overlaps` after it."""
        return self._side.beside() if self.overlaps else nullcontext()

    def written(self, parameter: nn.Parameter) -> CopyEvent:
        """The end of the last copy that brought an updated weight back to where it waits."""
        return self._optimizer.written(parameter)

    @property
    def is_updating(self) -> bool:
        """Also once an update has failed."""
        return self._is_updating

    def abandon(self) -> None:
        """Forget this window's gradients; those of the step before, whose updates wait, are kept."""
        self._kept.abandon()
        self._kept.clear(but=self._pending)
        self._taken.clear()
        self._sum_of_squares.zero_()  # no new tensor: the device may be full

    def flush(self) -> None:
        """Make every update that waits: before weights are read by anyone but the next step."""
        self.apply(list(self._pending))

    @torch.no_grad()
    def _apply_kept(self, *_: Any) -> None:
        kept = self._kept.parameters()
        if not kept:
            return
        assert self._scale is not None, "clip_grad_norm() goes before the step"
        now = [parameter for parameter in kept if parameter not in self._deferred]
        self._update(now, self._scale)
        if len(now) < len(kept):
            self._side.forget_fork()  # of a forward pass that has ended early: these updates are younger
            step = Pending(self._scale, _hyperparameters(self._optimizer))
            self._pending |= {parameter: step for parameter in kept if parameter in self._deferred}

    def _update(
        self,
        parameters: Iterable[nn.Parameter],
        scale: Tensor | None,
        hyperparameters: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._is_updating = True
        for parameter in parameters:
            slices = self._kept.take_out(parameter)
            self._optimizer.update(slices, scale=scale, hyperparameters=hyperparameters)
        self._is_updating = False


def enable_optimizer_in_backward(
    optimizer: SupportsSliceUpdates,
    *,
    device: torch.device,
    max_grad_norm: float | None,
    memory: HostMemory | None = None,
) -> InBackward:
    """Feeds an optimizer from backward, gradient by gradient.

    Frees: without clipping all gradients but those being made; with it and ``memory`` the same on the device; with it
    alone what fp32 sums of several micro-batches take beyond the weights' type.
    Costs: with clipping and ``memory`` a copy of each gradient to the host and back.
    Equals: the same updates bit for bit, at one gradient a step; where it clips, the norm is the sum of the same
    squares in another order (1e-6), and a sum of micro-batches is rounded to the type of its weight once.
    Limits: each gradient must be finished by one backward a step: no accumulation over several. In several processes
    only with ``fully_shard``, which has each process's rows summed before it hands them on; with
    ``DistributedDataParallel`` gradients are averaged after they have been applied here. Without clipping a gradient
    that is not finite changes nothing more, but what came before it in backward is applied: the run has to go back to
    its last checkpoint.
    Source: Full Parameter Fine-tuning for Large Language Models with Limited Resources (LOMO), 2023 (arXiv:2306.09782),
    which runs backward twice to clip.

    Args:
        optimizer: its parameters get hooks. It has to be kept as long as backward is called.
        device: where gradients are made.
        max_grad_norm: the global norm to clip to; None: never clip, update at once.
        memory: where gradients wait for their norm; None: on the device.

    Returns:
        What the step and further sources of gradients talk to; ``remove()`` makes pending updates and takes the hooks
        off.

    Raises:
        UserError: if there are several processes, each with all of the weights.
        DoesNotFitError: if the host has too little memory for the gradients.
    """
    _refuse_copies_in_processes(optimizer)
    in_backward = InBackward(optimizer, device=device, max_grad_norm=max_grad_norm, memory=memory)
    log.info("Optimizer in backward: %s.", _describe(in_backward, memory))
    return in_backward


def _take_from_autograd(held_by_optimizer: weakref.ref[InBackward], parameter: nn.Parameter) -> None:
    in_backward = held_by_optimizer()
    if in_backward is None:
        raise UserError(
            f"optimizer.in_backward needs its optimizer as long as backward is called, but when the gradient of a "
            f"parameter of shape {list(parameter.shape)} came, that was gone. Keep the optimizer, or call remove() "
            "before it goes."
        )
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None, "the hook comes after a gradient"
    in_backward.take(parameter, local_part(gradient))


def _refuse_copies_in_processes(optimizer: SupportsSliceUpdates) -> None:
    """Each would apply the gradients of its own data alone: they would train as many different models."""
    is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_processes = torch.distributed.get_world_size() if is_grouped else 1
    if num_processes > 1 and not all(map(is_sharded, _parameters(optimizer))):
        raise UserError(
            f"optimizer.in_backward=true works in one process, or where processes share the weights "
            f"(distributed.strategy=fsdp2); got {num_processes} that hold all of them: gradients are applied before "
            "they are averaged over processes. Set optimizer.in_backward=false, or share the weights."
        )


def _describe(in_backward: InBackward, memory: HostMemory | None) -> str:
    if in_backward.updates_at_once:
        return "each gradient is applied and freed as it is finished (no clipping)"
    if memory is None:
        return "gradients are kept in their weights' types until their norm is known, then applied"
    num_bytes = format_bytes(memory.bytes_by_category.get("gradient", 0))
    return f"gradients wait on the host until their norm is known ({num_bytes}), then are applied"


@dataclass
class KeptGradients:
    """Gradients in the types of their weights, until they are applied.

    Args:
        device: where they come from and go to.
        optimizer: whose parameters they are of.
        memory: where they wait; None: on the device.
    """

    device: torch.device
    optimizer: SupportsSliceUpdates
    memory: HostMemory | None
    _slices: dict[nn.Parameter, list[GradientSlice]] = field(default_factory=dict)
    _places: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._engine = CopyEngine(self.device)
        if self.memory is not None:
            self._places = _places(_parameters(self.optimizer), self.memory)

    def add(self, finished: GradientSlice) -> None:
        """Put a gradient away."""
        parameter, gradient = finished.parameter, finished.gradient.view(-1).to(finished.parameter.dtype)
        if self.memory is not None:
            place = self._places[parameter][finished.start : finished.start + len(gradient)]
            self._engine.to_host(gradient, place)
            gradient = place
        self._slices.setdefault(parameter, []).append(GradientSlice(parameter, gradient, finished.start))

    def end_backward(self) -> None:
        """Let go of gradients that were still on their way to the host, for which all that is computed now waits."""
        self._engine.release_sources()

    def abandon(self) -> None:
        """Let go of gradients that were on their way to the host."""
        self._engine.forget_sources()

    def parameters(self) -> list[nn.Parameter]:
        """Those whose gradients are here, in the order they came."""
        return list(self._slices)

    def clear(self, *, but: Container[nn.Parameter] = ()) -> None:
        """Forget all of them, but for those of some parameters."""
        self._slices = {key: slices for key, slices in self._slices.items() if key in but}

    def take_out(self, parameter: nn.Parameter) -> Iterator[GradientSlice]:
        """A parameter's gradient on the device, in its order; from the host chunk by chunk, as it is asked for."""
        slices = self._slices.pop(parameter)
        if self.memory is None:
            yield from sorted(slices, key=lambda finished: finished.start)
            return
        size = max(len(finished.gradient) for finished in slices)
        num_elements = len(self._places[parameter])
        for start in rounds(range(0, num_elements, size)):
            yield from self._arriving(parameter, start, min(start + size, num_elements))

    def _arriving(self, parameter: nn.Parameter, start: int, stop: int) -> Iterator[GradientSlice]:
        size = _ELEMENTS_AT_ONCE if self.optimizer.slice_unit is not None else stop - start
        for first in rounds(range(start, stop, size)):
            waiting = self._places[parameter][first : min(first + size, stop)]
            here = torch.empty_like(waiting, device=self.device)
            # Computing comes after the copy that brought the gradient here: see end_backward().
            self._engine.wait(self._engine.to_device(waiting, here))
            yield GradientSlice(parameter, here, first)


def _places(parameters: Sequence[nn.Parameter], memory: HostMemory) -> dict[nn.Parameter, Tensor]:
    """A place on the host for each gradient, in the type of its weight; all in one allocation."""
    sizes = [local_part(parameter).nbytes for parameter in parameters]
    ends = list(itertools.accumulate(map(_aligned, sizes)))
    memory.check(
        ends[-1],
        "Clipping with optimizer.in_backward and offload.optimizer=host",
        "Set training.max_grad_norm=null, offload.folder, or offload.optimizer=device.",
        "gradient",
    )
    slab = memory.allocate(ends[-1], torch.uint8, "gradient")
    places = {}
    for parameter, start, num_bytes in zip(parameters, [0, *ends[:-1]], sizes, strict=True):
        places[parameter] = slab[start : start + num_bytes].view(parameter.dtype)
    return places


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _parameters(optimizer: SupportsSliceUpdates) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _hyperparameters(optimizer: SupportsSliceUpdates) -> dict[int, dict[str, Any]]:
    """Those of each group as they are now; a schedule will change them."""
    return {
        index: {name: value for name, value in group.items() if name != "params"}
        for index, group in enumerate(optimizer.param_groups)
    }
