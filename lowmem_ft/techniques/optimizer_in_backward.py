"""Gradients that are applied, or stored compactly, as soon as backward has finished them.

Without clipping, a gradient is applied and freed before the next layer's are computed. Clipping needs the norm of all
gradients first, so it takes two phases: while backward runs, squares are summed and gradients are kept in the type of
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
from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.host.side_stream import SideStream
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.foundation.tensors.local_shards import is_sharded, local_part, sum_over_shards
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.techniques.gradients.norm import clip_factor, norm_in_float32
from lowmem_ft.techniques.technique import Technique, Unscale

__all__ = ["enable_optimizer_in_backward"]

log = logging.getLogger(__name__)

_ELEMENTS_AT_ONCE = 2**22
"""Elements of a gradient that are copied back from the host at once."""


_ALIGNMENT = 256
"""Alignment in bytes of each gradient's buffer, as the vector loads of kernels need it."""


class SupportsSliceUpdates(Protocol):
    """An optimizer that can update a slice of a parameter by itself; see ``optimizers.ChunkedOptimizer``."""

    param_groups: list[dict[str, Any]]

    @property
    def slice_unit(self) -> int | None:
        """Unit of slices: they begin and end at multiples of it or with their parameter; None: whole parameters."""
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
        """Return the end of the last copy of an updated weight back to the host."""
        ...

    def step(self) -> object:
        """Update every parameter that has a gradient."""
        ...

    def register_step_pre_hook(self, hook: Callable[..., None]) -> Any:
        """Register a hook to be called before each step."""
        ...


@dataclass(frozen=True)
class _Pending:
    """Scale and hyperparameters of an update, as of the step that its gradients belong to.

    Args:
        scale: factor on the gradients; 0-d, float32, on the device.
        hyperparameters: by group index.
    """

    scale: Tensor
    hyperparameters: Mapping[int, Mapping[str, Any]]


class InBackward(Technique):
    """An optimizer that backward feeds; see :func:`enable_optimizer_in_backward`.

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
        self._kept = _KeptGradients(device, optimizer, None if self.updates_at_once else memory)
        self._deferred: set[nn.Parameter] = set()
        self._pending: dict[nn.Parameter, _Pending] = {}
        self._is_updating = False
        self._side = SideStream(device)
        # Python's garbage collector does not see that torch holds these hooks: one that referred to its parameter, as
        # we do through the optimizer, would keep all of them alive forever.
        take = partial(_take_from_autograd, weakref.ref(self))
        hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in _parameters(optimizer)]
        hooks.append(optimizer.register_step_pre_hook(self._apply_kept))
        super().__init__(*(hook.remove for hook in hooks), self.flush)

    @torch.no_grad()
    def take(self, parameter: nn.Parameter, gradient: Tensor, start: int = 0) -> None:
        """Use a finished gradient: once a step for each slice of a parameter.

        Args:
            parameter: one of the optimizer's.
            gradient: gradient on the device, in the slice's shape or flat. Ownership passes to the optimizer, which may
                overwrite it.
            start: the slice's first element in the flattened parameter; see ``slice_unit`` of the optimizer. Slices
                have the same size, except the last.
        """
        if (parameter, start) in self._taken:
            raise UserError(
                f"optimizer.in_backward needs each gradient once a step, but that of a parameter of shape "
                f"{list(parameter.shape)} came twice: something calls backward inside backward (such as reentrant "
                "checkpointing), or twice a step. Set optimizer.in_backward=false."
            )
        if not self._taken:
            _refuse_copies_in_processes(self._optimizer)  # the process group may be newer than the hooks
        self._taken.add((parameter, start))
        gradient = gradient.contiguous()
        self._sum_of_squares += norm_in_float32(gradient).square()
        if self.updates_at_once:
            # Values that are not finite must not reach a weight, and there is no host sync to detect them. From the
            # first such gradient on, all are zero.
            gradient.masked_fill_(~torch.isfinite(self._sum_of_squares), 0)
            self._optimizer.update([GradientSlice(parameter, gradient, start)])
        else:
            assert parameter not in self._pending, "apply() comes before the next gradient"
            self._kept.add(GradientSlice(parameter, gradient, start))

    def clip_grad_norm(self, unscale: Unscale) -> Tensor:
        """End the first phase: compute the norm of all gradients, and from it the factor that scales them.

        Args:
            unscale: divides a tensor by the fp16 loss scale in place, and records whether it is not finite.

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

    def update_weights(self, is_finite: Callable[[], bool]) -> bool:
        """End the step: apply the gradients kept, or drop them.

        Args:
            is_finite: returns whether loss and norm are. If not, and ``updates_at_once``, some weights have changed
                already.
        """
        if is_finite():
            self._optimizer.step()  # through its hook: schedules and meters watch steps
        else:
            self._kept.clear()
        return True

    def defer(self, parameters: Iterable[nn.Parameter]) -> None:
        """Apply kept gradients of these parameters only when :meth:`apply` is called for them, from now on."""
        self._deferred.update(parameters)

    def defer_no_more(self, parameters: Iterable[nn.Parameter]) -> None:
        """Apply kept gradients of these parameters in the step again, from now on."""
        self._deferred.difference_update(parameters)

    def has_deferred(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Return whether :meth:`apply` would update any of these parameters."""
        return any(parameter in self._pending for parameter in parameters)

    @torch.no_grad()
    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        """Apply the deferred updates of these parameters, with the scale and the learning rate of their own step."""
        waiting = [parameter for parameter in parameters if parameter in self._pending]
        steps = {id(step): step for step in (self._pending.pop(parameter) for parameter in waiting)}
        for step in steps.values():
            assert len(steps) == 1, "nothing is pending for longer than one step"
            self._update(waiting, step.scale, step.hyperparameters)

    @property
    def overlaps(self) -> bool:
        """True if updates may run concurrently with compute.

        Gradients kept on the device would have to stay until the compute stream has waited for their updates.
        """
        return self._kept.memory is not None

    def fork(self) -> None:
        """Mark this point: the next concurrent block overlaps with all that is computed from here on."""
        if self.overlaps:
            self._side.fork()

    def beside(self) -> AbstractContextManager[None]:
        """In a ``with`` block, make updates concurrently with compute since the fork; else after it."""
        return self._side.beside() if self.overlaps else nullcontext()

    def written(self, parameter: nn.Parameter) -> CopyEvent:
        """Return the end of the last copy of an updated weight back to the host."""
        return self._optimizer.written(parameter)

    @property
    def is_updating(self) -> bool:
        """True while an update runs, and also after an update has failed."""
        return self._is_updating

    def abandon(self) -> None:
        """Drop this window's gradients; those of the step before, whose updates are deferred, are kept."""
        self._kept.abandon()
        self._kept.clear(but=self._pending)
        self._taken.clear()
        self._sum_of_squares.zero_()  # no new tensor: the device may be full

    def flush(self) -> None:
        """Make every deferred update: needed before weights are read, except by the next step."""
        self.apply(list(self._pending))

    @torch.no_grad()
    def _apply_kept(self, *_: Any) -> None:
        kept = self._kept.parameters()
        if not kept:
            return
        assert self._scale is not None, "clip_grad_norm() comes before the step"
        now = [parameter for parameter in kept if parameter not in self._deferred]
        self._update(now, self._scale)
        if len(now) < len(kept):
            self._side.forget_fork()  # of a forward pass that ended early: these updates are newer
            step = _Pending(self._scale, _hyperparameters(self._optimizer))
            self._pending |= {parameter: step for parameter in kept if parameter in self._deferred}

    def _update(
        self,
        parameters: Iterable[nn.Parameter],
        scale: Tensor | None,
        hyperparameters: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        self._is_updating = True
        finished = (self._kept.take_out(parameter) for parameter in parameters)
        # One update of all takes the host less; copies from the host would be in flight together, though, and a rule
        # that measures whole parameters would measure all before it frees a gradient.
        if self._kept.memory is None and self._optimizer.slice_unit is not None:
            finished = iter([itertools.chain.from_iterable(finished)])
        for slices in finished:
            self._optimizer.update(slices, scale=scale, hyperparameters=hyperparameters)
        self._is_updating = False


def enable_optimizer_in_backward(
    optimizer: SupportsSliceUpdates,
    *,
    device: torch.device,
    max_grad_norm: float | None,
    memory: HostMemory | None = None,
) -> InBackward:
    """Feed an optimizer from backward, gradient by gradient.

    Frees: without clipping, all gradients except those being computed; with clipping and ``memory``, the same on the
    device; with clipping alone, what fp32 sums of several micro-batches take beyond the weights' type.
    Costs: with clipping and ``memory``, a copy of each gradient to the host and back.
    Equals: the same updates bit for bit, with one gradient per step; with clipping, the norm is the sum of the same
    squares in another order (1e-6), and a sum of micro-batches is rounded to the type of its weight once.
    Limits: each gradient must be finished by one backward per step: no accumulation over several. With several
    processes, only with ``fully_shard``, which sums each process's rows before it passes them on; with
    ``DistributedDataParallel`` gradients are averaged after they have been applied here. Without clipping, a gradient
    that is not finite changes nothing more, but the gradients before it in backward are applied: the run has to go back
    to its last checkpoint.
    Source: Full Parameter Fine-tuning for Large Language Models with Limited Resources (LOMO), 2023 (arXiv:2306.09782),
    which runs backward twice to clip.

    Args:
        optimizer: its parameters get hooks. The caller must keep it alive as long as backward is called.
        device: the device that computes the gradients.
        max_grad_norm: the global norm to clip to; None: never clip, update at once.
        memory: host memory that keeps gradients until their norm is known; None: they stay on the device.

    Returns:
        The technique that the step and other sources of gradients call; ``remove()`` makes pending updates and removes
        the hooks.

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
            "optimizer.in_backward needs its optimizer as long as backward is called, but the optimizer was deleted "
            f"before the gradient of a parameter of shape {list(parameter.shape)} came. Keep the optimizer, or call "
            "remove() before deleting it."
        )
    gradient, parameter.grad = parameter.grad, None
    assert gradient is not None, "the hook comes after a gradient"
    in_backward.take(parameter, local_part(gradient))


def _refuse_copies_in_processes(optimizer: SupportsSliceUpdates) -> None:
    """Reject copies of the model: each would apply its own data's gradients alone, and they would diverge."""
    is_grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    num_processes = torch.distributed.get_world_size() if is_grouped else 1
    if num_processes > 1 and not all(map(is_sharded, _parameters(optimizer))):
        raise UserError(
            "optimizer.in_backward=true works in one process, or if the weights are sharded "
            f"(distributed.strategy=fsdp2); got {num_processes} processes with all weights each: gradients would be "
            "applied before they are averaged. Set optimizer.in_backward=false, or shard the weights."
        )


def _describe(in_backward: InBackward, memory: HostMemory | None) -> str:
    if in_backward.updates_at_once:
        return "each gradient is applied and freed as it is finished (no clipping)"
    if memory is None:
        return "gradients are kept in their weights' types until their norm is known, then applied"
    num_bytes = format_bytes(memory.bytes_by_category.get("gradient", 0))
    return f"gradients are kept on the host until their norm is known ({num_bytes}), then applied"


@dataclass
class _KeptGradients:
    """Gradients in the types of their weights, kept until they are applied.

    Args:
        device: the device that they come from and return to.
        optimizer: the owner of their parameters.
        memory: host memory that keeps them; None: they stay on the device.
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
        """Store a gradient."""
        parameter, gradient = finished.parameter, finished.gradient.view(-1).to(finished.parameter.dtype)
        if self.memory is not None:
            place = self._places[parameter][finished.start : finished.start + len(gradient)]
            self._engine.to_host(gradient, place)
            gradient = place
        self._slices.setdefault(parameter, []).append(GradientSlice(parameter, gradient, finished.start))

    def end_backward(self) -> None:
        """Release gradients whose copies to the host were in progress; all compute from now on waits for these."""
        self._engine.release_sources()

    def abandon(self) -> None:
        """Release gradients whose copies to the host were in progress."""
        self._engine.forget_sources()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients are kept, in the order they came."""
        return list(self._slices)

    def clear(self, *, but: Container[nn.Parameter] = ()) -> None:
        """Drop all gradients, except those of the parameters in ``but``."""
        self._slices = {key: slices for key, slices in self._slices.items() if key in but}

    def take_out(self, parameter: nn.Parameter) -> Iterator[GradientSlice]:
        """Yield a parameter's gradient on the device, in order; from the host chunk by chunk, as requested."""
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
            # Compute is ordered after the copy that brought the gradient here: see end_backward().
            self._engine.wait(self._engine.to_device(waiting, here))
            yield GradientSlice(parameter, here, first)


def _places(parameters: Sequence[nn.Parameter], memory: HostMemory) -> dict[nn.Parameter, Tensor]:
    """Allocate a place on the host for each gradient, in the type of its weight; all in one allocation."""
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
    """Return the current hyperparameters of each group; a schedule will change them."""
    return {
        index: {name: value for name, value in group.items() if name != "params"}
        for index, group in enumerate(optimizer.param_groups)
    }
