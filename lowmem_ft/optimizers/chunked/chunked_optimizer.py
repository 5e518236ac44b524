"""The optimizer: one update in float32, run chunk by chunk over weights and state in any storage format.

A step never holds more than a few chunks in float32, however large a parameter is, and a slice of a parameter can be
updated as soon as its gradient is finished. A format knows how to read and write, an update knows no format.
The formats fp32 and split16 round ties alike, so that they train the same bits.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lowmem_ft.foundation.devices import is_apart, kernels_of
from lowmem_ft.foundation.host.copy_engine import CopyEvent
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.foundation.tensors.local_shards import first_element, is_sharded, local_part
from lowmem_ft.foundation.tensors.triton_use import Kernel, launching_on, may_use_kernel
from lowmem_ft.optimizers.chunked.saved_state_conversion import SavedState, take_state
from lowmem_ft.optimizers.chunked.slice_update import ChunkUpdate, Layout, SliceUpdate
from lowmem_ft.optimizers.chunked.triton_trial import has_tail, in_kernel
from lowmem_ft.optimizers.chunks import flat_weight, spans, write_back
from lowmem_ft.optimizers.counter_random import CounterRandom, keys_of
from lowmem_ft.optimizers.formats.master_formats import MasterFormat, master_format
from lowmem_ft.optimizers.formats.operators import BLOCK
from lowmem_ft.optimizers.formats.state_formats import StateFormat, state_format
from lowmem_ft.optimizers.state.state_storage import DeviceStorage, StateStorage
from lowmem_ft.optimizers.table import StateFormats, format_of
from lowmem_ft.optimizers.triton.triton_update import Launches, names_in_kernel
from lowmem_ft.optimizers.updates.update_rule import Chunk, Chunks, Step, UpdateRule, WholeParameterRule

CPU_CHUNK_ELEMENTS = 2**18
"""Elements of a chunk that, with its state, fits in a core's cache: four times as fast as whole tensors.

Measured on a Xeon with 2 threads in float32.
"""

GPU_CHUNK_ELEMENTS = 2**22
"""Elements of a chunk on a GPU: 16 MiB per float32 temporary, and per buffer of state that comes from the host."""

KERNEL_CHUNK_ELEMENTS = 2**30
"""Elements that one launch of the Triton kernel updates where nothing is copied: it has no temporaries.

Launches in chunks of 2**22, measured with an H200, took the host up to 0.2 ms each, and the GPU 0.03 ms.
"""


class _Place(NamedTuple):
    """The index of a parameter's group, its number in the optimizer, and whether all elements are in this process."""

    group: int
    number: int
    is_whole: bool


UpdateHook = Callable[[nn.Parameter, int, Tensor, Tensor, Mapping[str, Any]], Callable[[], None] | None]


class ChunkedOptimizer(Optimizer):
    """An optimizer of ours over parameters whose weights and state are kept in any of the formats.

    Frees: what the formats free; temporaries are a few float32 tensors of ``chunk_elements``, however large parameters
    are.
    Equals: the rule in float32, bit for bit, with formats ``fp32`` and ``split16``; the chunk size changes nothing. A
    factor on gradients multiplies their float32 values: 32-bit gradients give the bits of gradients multiplied before
    the step, 16-bit ones are rounded once less.
    Limits: weights changed from outside (loaded, averaged) keep the lower bits of their masters until
    :meth:`adopt_weights`. Weights that are not contiguous are copied whole while they are updated. If ``fully_shard``
    has sharded a parameter, each process updates its own rows, with the random bits that one process would draw for
    them; create the optimizer after sharding. 8-bit blocks restart in each process's rows. A rule that measures whole
    parameters rejects sharded ones.

    Args:
        params: parameters or groups of them.
        rule: the update.
        defaults: hyperparameters that the rule reads, including ``lr``.
        state: format of the running averages: ``fp32``, ``bf16`` or ``8bit``, or one for each by its name; those that
            are not named are in ``fp32``.
        master: format of the master of 16-bit weights (see ``master_formats``); float32 weights need none.
        seed: seed of the random rounding.

    Attributes:
        home: the storage of state; set it before state is allocated.
        chunk_elements: elements updated at a time, a multiple of 256; None: depends on the device type, and on whether
            one kernel updates them.
        kernel: ``auto`` updates with one Triton kernel per chunk on an NVIDIA GPU if that works, and else operation by
            operation, as ``eager`` does everywhere; ``triton`` requires it. See ``triton_use``.
        gradient_factor: factor on the gradients of the next step, 0-d and float32; None: 1. Clipping sets it and leaves
            ``.grad`` as backward left it. :meth:`step` uses it once, :meth:`zero_grad` drops it with the gradients.
        is_finite: returns whether the next step may change anything; None: it may. :meth:`step` asks before each update
            that is not one launch of the kernel, and at the end, so that the answer may wait for the device. A step
            that is not finite has NaN as its ``gradient_factor``, with which the kernel writes nothing.
    """

    def __init__(
        self,
        params: Iterable[Any],
        rule: UpdateRule | WholeParameterRule,
        defaults: dict[str, Any],
        *,
        state: StateFormats = "fp32",
        master: str = "fp32",
        seed: int = 0,
    ) -> None:
        self.rule = rule
        self.state_format: StateFormats = state
        self.master_format = master
        self.seed = seed
        self.home: StateStorage = DeviceStorage()
        self.chunk_elements: int | None = None
        self.kernel: Kernel = "auto"
        self.gradient_factor: Tensor | None = None
        self.is_finite: Callable[[], bool] | None = None
        self._update_hooks: OrderedDict[int, UpdateHook] = OrderedDict()
        self._places: dict[nn.Parameter, _Place] = {}
        self._first_elements: dict[nn.Parameter, int] = {}
        self._layouts: dict[nn.Parameter, Layout] = {}
        self._updated: dict[nn.Parameter, dict[int, int]] = {}  # of parameters in mid-step: elements by slice
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters after all others: random rounding depends on their numbers."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if isinstance(self.rule, WholeParameterRule) and is_sharded(parameter):
                raise ValueError(
                    f"{type(self.rule).__name__} measures whole parameters, got one of shape {tuple(parameter.shape)} "
                    "that is sharded. Use AdamW, Lion or SGD, or do not shard."
                )
            self._check_names(parameter, self.param_groups[-1])
            is_whole = local_part(parameter) is parameter
            self._places[parameter] = _Place(len(self.param_groups) - 1, len(self._places), is_whole)
            self._first_elements[parameter] = first_element(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, multiplied by ``gradient_factor``.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            The closure's loss, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        slices = (
            GradientSlice(parameter, local_part(gradient))
            for parameter in parameters
            if (gradient := parameter.grad) is not None
        )
        factor, self.gradient_factor = self.gradient_factor, None
        is_finite, self.is_finite = self.is_finite, None
        self.update(slices, scale=factor, is_finite=is_finite)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, and the factor on them."""
        self.gradient_factor = None
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def update(
        self,
        slices: Iterable[GradientSlice],
        *,
        scale: Tensor | None = None,
        hyperparameters: Mapping[int, Mapping[str, Any]] | None = None,
        is_finite: Callable[[], bool] | None = None,
    ) -> None:
        """Update the given slices of parameters now.

        A parameter's step number increases once all its slices have been updated, in whatever order they come.

        Args:
            slices: slices with finished gradients; an iterator is advanced as late as copies allow, so that its
                gradients need not exist together.
            scale: factor on the gradients; 0-d, float32.
            hyperparameters: by group index, in place of the group's current ones: a deferred update takes those of its
                own step.
            is_finite: whether to change anything, as in the attribute; None: yes.
        """
        may_change = is_finite or (lambda: True)
        if scale is None and not may_change():
            return
        launched: list[dict[str, Any]] = []
        for device, together in itertools.groupby(slices, key=attrgetter("gradient.device")):
            factor = None if scale is None else scale.to(device)
            updates: Iterable[SliceUpdate] = self._slice_updates(
                together, device, factor, hyperparameters or {}, launched, may_change
            )
            if isinstance(self.rule, WholeParameterRule):
                updates = list(updates)  # each is measured first, in a pass over its chunks
            chunks = (chunk for update in self._begun(updates) for chunk in rounds(self._chunks_of(update)))
            with launching_on(device):
                for chunk in rounds(self._visits(chunks, device)):
                    self._update_chunk(chunk)
        if not may_change():
            for state in launched:
                state["step"] -= 1

    @torch.no_grad()
    def allocate_state(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Allocate the state that parameters lack, with master weights equal to the weights.

        Args:
            parameters: parameters of the optimizer; None: all.
        """
        for parameter in self._places if parameters is None else parameters:
            state = self.state[parameter]
            state.setdefault("step", 0)
            missing = [entry for entry in self.kept_sizes(parameter).items() if entry[0] not in state]
            for name, (num_elements, dtype) in missing:
                state[name] = self.home.allocate(num_elements, dtype, parameter.device)
            if isinstance(self.rule, WholeParameterRule):
                for name, num_elements in self.rule.statistics(parameter.shape).items():
                    state.setdefault(name, torch.zeros(num_elements, device=parameter.device))
            if {name for name, _ in missing} & self.master_of(parameter).tensors.keys():
                self.adopt_weights([parameter])

    @torch.no_grad()
    def adopt_weights(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Make master weights equal to the weights, after other code has changed the weights.

        Args:
            parameters: those that changed; None: all that have state.
        """
        with_state = [parameter for parameter in self._places if parameter in self.state]
        for parameter in with_state if parameters is None else parameters:
            for name in self.master_of(parameter).tensors:
                kept = self.state[parameter][name]
                # A weight holds all except the lower bits, which are then zero.
                kept.copy_(flat_weight(parameter)) if kept.is_floating_point() else kept.zero_()

    @torch.no_grad()
    def set_weights(self, parameter: nn.Parameter, values: Callable[[int, int], Tensor]) -> None:
        """Set a parameter, and its master, from values finer than its own type.

        Args:
            parameter: one of the optimizer's, with state.
            values: given the first element and the one after the last, returns these elements of this process's part of
                the flattened parameter.
        """
        weight, master, kept = flat_weight(parameter), self.master_of(parameter), self.state[parameter]
        for start, stop in spans(0, weight.numel(), self.chunk_size(weight.device)):
            value = values(start, stop).to(weight.device, torch.float32)
            here = {name: kept[name][start:stop].to(weight.device) for name in master.tensors}
            master.write(value, weight[start:stop], here, self.random_of(parameter, kept["step"], start))
            for name, tensor in here.items():
                kept[name][start:stop].copy_(tensor)
        write_back(weight, parameter)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, and the formats, so that an optimizer with other formats can load it."""
        dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in self._places]
        formats = {"state": self.state_format, "master": self.master_format, "weights": dtypes}
        return {**super().state_dict(), "formats": formats}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of another optimizer over the same parameters, in whatever formats it kept it.

        Load the weights first. Hyperparameters are loaded too. See :func:`state_conversion.take_state`.

        Raises:
            ValueError: if it has other groups.
        """
        groups, formats = state_dict["param_groups"], state_dict["formats"]
        if [len(group["params"]) for group in groups] != [
            len(group["params"]) for group in self.param_groups
        ]:
            raise ValueError("The state has other parameter groups than this optimizer.")
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})
        for number, parameter in enumerate(self._places):
            if values := state_dict["state"].get(number):
                dtype = getattr(torch, formats["weights"][number])
                saved = SavedState(
                    values=values, state=formats["state"], master=formats["master"], dtype=dtype
                )
                take_state(self, parameter, saved)

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Call ``hook(parameter, start, weight, gradient, hyperparameters)`` before each slice's update from now on.

        Weight and gradient are flat, and only those of that slice. If the hook returns a function, it is called after
        the update.
        """
        handle = RemovableHandle(self._update_hooks)
        self._update_hooks[handle.id] = hook
        return handle

    def written(self, parameter: nn.Parameter) -> CopyEvent:
        """Return the end of the last copy of an updated weight back to the host; a weight on the device has none."""
        return self.home.written(parameter)

    def may_use_kernel(self, device: torch.device) -> bool:
        """Return whether one kernel may update a parameter on a device, in place of one operation after the other."""
        return not isinstance(self.rule, WholeParameterRule) and may_use_kernel(self.kernel, device)

    @property
    def slice_unit(self) -> int | None:
        """Unit of slices: they begin and end at multiples of it or with their parameter; None: whole parameters."""
        if isinstance(self.rule, WholeParameterRule):
            return None
        state = self.state_format
        return BLOCK if "8bit" in ([state] if isinstance(state, str) else state.values()) else 1

    def master_of(self, parameter: nn.Parameter) -> MasterFormat:
        """Return the format of a parameter's float32 value."""
        return master_format(self.master_format, parameter.dtype)

    def averages_of(self, parameter: nn.Parameter) -> dict[str, StateFormat]:
        """Return the running averages of a parameter, and each one's format."""
        return dict(self.layout_of(parameter).averages)

    def layout_of(self, parameter: nn.Parameter) -> Layout:
        """Return what of a parameter's updates is the same in every step; it is kept until formats or types change."""
        layout = self._layouts.get(parameter)
        signs = self.rule.averages(parameter.shape, self.param_groups[self._places[parameter].group])
        made_from = (parameter.dtype, self.master_format, self.state_format, signs)
        if layout is None or layout.made_from != made_from:
            states = {name: format_of(self.state_format, name) for name in signs}
            layout = self._layouts[parameter] = Layout(
                made_from=made_from,
                averages={name: state_format(states[name], signed=signed) for name, signed in signs.items()},
                in_kernel=names_in_kernel(self.master_format, parameter.dtype, states),
            )
        return layout

    def kept_sizes(
        self, parameter: nn.Parameter, num_elements: int | None = None
    ) -> dict[str, tuple[int, torch.dtype]]:
        """Return what ``home`` stores for a parameter: by name, the number of elements and their type.

        Args:
            parameter: one of the optimizer's.
            num_elements: how many of its elements a process holds; None: as many as this one does.
        """
        num_elements = local_part(parameter).numel() if num_elements is None else num_elements
        sizes = {name: (num_elements, dtype) for name, dtype in self.master_of(parameter).tensors.items()}
        for name, form in self.averages_of(parameter).items():
            sizes |= form.tensors(name, num_elements)
        return sizes

    def random_of(self, parameter: nn.Parameter, step: int, element: int) -> CounterRandom:
        """Return the random bits of a parameter's elements from this process's ``element`` on, in its given step."""
        number = self._first_elements[parameter] + element
        return CounterRandom(self.seed, step, self._places[parameter].number, number)

    def chunk_size(self, device: torch.device) -> int:
        """Return the number of elements that are updated at a time on a device."""
        by_device = CPU_CHUNK_ELEMENTS if kernels_of(device) == "cpu" else GPU_CHUNK_ELEMENTS
        return self.chunk_elements or by_device

    def _begun(self, updates: Iterable[SliceUpdate]) -> Iterator[SliceUpdate]:
        """Yield the updates that have elements; a parameter without elements in this process has made its step."""
        for update in updates:
            if update.stop > update.start:
                yield update
            else:
                self._after(update)

    def _slice_updates(
        self,
        slices: Iterable[GradientSlice],
        device: torch.device,
        scale: Tensor | None,
        hyperparameters: Mapping[int, Mapping[str, Any]],
        launched: list[dict[str, Any]],
        may_change: Callable[[], bool],
    ) -> Iterator[SliceUpdate]:
        """Yield the updates of slices on one device, except for those of whole parameters, which one launch makes.

        The states of these are added to ``launched``; others end as soon as nothing may change.
        """
        kinds: dict[tuple[Any, ...], Launches | None] = {}
        at_once = self.chunk_elements is None and type(self.home) is DeviceStorage and not self._update_hooks
        for finished in slices:
            parameter, gradient, start = finished
            state = self.state.get(parameter)
            if at_once and state and not (start or self._updated):
                group, order, is_whole = self._places[parameter]
                number = state["step"] + 1
                kind = (group, number, parameter.dtype, gradient.dtype, has_tail(gradient))
                launches = kinds.get(kind)
                if launches is None and kind not in kinds:
                    # What a rule of the kernel keeps depends on no shape: one parameter answers for all.
                    values = hyperparameters.get(group, self.param_groups[group])
                    launches = kinds[kind] = in_kernel(self, finished, number, values, scale)
                if (
                    launches is not None
                    and is_whole
                    and _is_one_launch(finished, device, state, launches.kept)
                ):
                    launches.launch(parameter, gradient, state, keys_of(self.seed, number, order), 0)
                    state["step"] = number
                    launched.append(state)
                    continue
            if not may_change():
                return
            yield self._slice_update(finished, scale, hyperparameters)

    def _slice_update(
        self, finished: GradientSlice, scale: Tensor | None, hyperparameters: Mapping[int, Mapping[str, Any]]
    ) -> SliceUpdate:
        parameter = finished.parameter
        if parameter not in self._places:
            raise ValueError(
                f"This optimizer was created without the parameter of shape {tuple(parameter.shape)} that it should "
                "update. Create it after fully_shard, or after whatever has replaced the parameters."
            )
        if parameter not in self.state:
            self.allocate_state([parameter])
        self._check(finished)
        group_index = self._places[parameter].group
        update = SliceUpdate(
            parameter=parameter,
            weight=flat_weight(parameter),
            gradient=finished.gradient.reshape(-1),
            start=finished.start,
            scale=scale,
            number=self.state[parameter]["step"] + 1,
            hyperparameters=hyperparameters.get(group_index, self.param_groups[group_index]),
        )
        if isinstance(self.rule, WholeParameterRule):
            update.step = self._measured_step(update, self.rule)
        else:
            update.step = self.rule.step(update.number, update.hyperparameters)
            update.in_kernel = in_kernel(self, finished, update.number, update.hyperparameters, scale)
        return update

    def _check_names(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        """Reject formats of averages that the rule does not have."""
        own = self.rule.averages(parameter.shape, group)
        named = () if isinstance(self.state_format, str) else self.state_format
        if unknown := [name for name in named if name not in own]:
            raise ValueError(
                f"{type(self.rule).__name__} keeps {' and '.join(own) or 'no average'} of a parameter of shape "
                f"{tuple(parameter.shape)}, got a format of {', '.join(unknown)}. Leave it out."
            )

    def _check(self, finished: GradientSlice) -> None:
        num_elements = local_part(finished.parameter).numel()
        stop = finished.start + finished.gradient.numel()
        unit = self.slice_unit or num_elements
        if stop > num_elements or finished.start % unit or (stop % unit and stop != num_elements):
            raise ValueError(
                f"Slices of this parameter begin at multiples of {unit} and end at one or at {num_elements}, "
                f"got {finished.start} to {stop}."
            )

    def _measured_step(self, update: SliceUpdate, rule: WholeParameterRule) -> Step:
        shape, state, device = update.parameter.shape, self.state[update.parameter], update.gradient.device

        def read() -> Iterator[Chunk]:
            for chunk in rounds(self._visits(rounds(self._chunks_of(update)), device, with_weights=False)):
                yield self._values(chunk)

        chunks = Chunks(len(self._chunks_of(update)), device, read)
        statistics = {name: state[name] for name in rule.statistics(shape)}
        return rule.measured_step(shape, chunks, statistics, update.number, update.hyperparameters)

    def _chunks_of(self, update: SliceUpdate) -> list[ChunkUpdate]:
        shape = update.parameter.shape
        row = self.rule.row_length(shape) if isinstance(self.rule, WholeParameterRule) else 1
        device = update.gradient.device
        size = self.chunk_size(device)
        if update.in_kernel is not None and self.chunk_elements is None and self._is_on(device, update):
            size = KERNEL_CHUNK_ELEMENTS
        return [
            ChunkUpdate(update, start, stop) for start, stop in spans(update.start, update.stop, size, row)
        ]

    def _is_on(self, device: torch.device, update: SliceUpdate) -> bool:
        """Return whether an update finds weight and state on its device, where nothing limits their size."""
        if not isinstance(self.home, DeviceStorage):
            return False
        kept = (update.weight, *self.state[update.parameter].values())
        return not any(isinstance(one, Tensor) and is_apart(one, device) for one in kept)

    def _visits(
        self, chunks: Iterable[ChunkUpdate], device: torch.device, *, with_weights: bool = True
    ) -> Iterator[ChunkUpdate]:
        """Yield each chunk while its state is on the device; the home may read ahead."""
        # Not itertools.tee, which keeps 57 chunks and their gradients alive.
        read: deque[ChunkUpdate] = deque()

        def kept() -> Iterator[dict[str, Tensor]]:
            for chunk in chunks:
                read.append(chunk)
                yield self._kept(chunk, with_weights=with_weights)

        for here in self.home.visit(kept(), device):
            chunk = read.popleft()
            chunk.here = here
            yield chunk
            chunk.here = {}

    def _kept(self, chunk: ChunkUpdate, *, with_weights: bool) -> dict[str, Tensor]:
        """Return views of a chunk's state where it is stored."""
        update, elements, kept = chunk.update, slice(chunk.start, chunk.stop), {}
        state = self.state[update.parameter]
        for name, form in self.averages_of(update.parameter).items():
            kept |= form.chunk(state, name, chunk.start, chunk.stop)
        if with_weights:
            kept |= {name: state[name][elements] for name in self.master_of(update.parameter).tensors}
        if with_weights and is_apart(update.weight, update.gradient.device):
            kept["weight"] = update.weight[elements]
        return kept

    def _values(self, chunk: ChunkUpdate) -> Chunk:
        num_elements = chunk.stop - chunk.start
        averages = self.averages_of(chunk.update.parameter)
        return Chunk(
            gradient=chunk.gradient(),
            averages={name: form.read(chunk.here, name, num_elements) for name, form in averages.items()},
            start=chunk.start,
        )

    def _update_chunk(self, chunk: ChunkUpdate) -> None:
        update, here = chunk.update, chunk.here
        parameter = update.parameter
        weight = here.get("weight", update.weight[chunk.start : chunk.stop])
        if chunk.start == update.start:
            update.after = self._call_hooks(update)
        random = self.random_of(parameter, update.number, chunk.start)
        if update.in_kernel is not None:
            update.in_kernel.launch(weight, chunk.gradient_as_it_is(), here, random.keys(), random.element)
        else:
            self._update_by_operations(chunk, weight, random)
        if chunk.stop == update.stop:
            self._after(update)

    def _update_by_operations(self, chunk: ChunkUpdate, weight: Tensor, random: CounterRandom) -> None:
        parameter, here = chunk.update.parameter, chunk.here
        master = self.master_of(parameter)
        value = master.read(weight, here)
        values = self._values(chunk)
        chunk.update.step(value, values)
        for stream, (name, form) in enumerate(self.averages_of(parameter).items(), start=1):
            form.write(values.averages[name], here, name, random, stream)
        master.write(value, weight, here, random)

    def _call_hooks(self, update: SliceUpdate) -> list[Callable[[], None]]:
        weight = update.weight[update.start : update.stop]
        hooks = self._update_hooks.values()
        afters = [
            hook(update.parameter, update.start, weight, update.gradient, update.hyperparameters)
            for hook in hooks
        ]
        return [after for after in afters if after is not None]

    def _after(self, update: SliceUpdate) -> None:
        write_back(update.weight, update.parameter)
        updated = self._updated.setdefault(update.parameter, {})
        updated[update.start] = update.stop - update.start
        if sum(updated.values()) == local_part(update.parameter).numel():
            self.state[update.parameter]["step"] = update.number
            del self._updated[update.parameter]
        for after in update.after:
            after()


def _is_one_launch(
    finished: GradientSlice, device: torch.device, state: Mapping[str, Any], kept: Iterable[str]
) -> bool:
    """Return whether a gradient is of a whole parameter, and all that its update works on is on one device."""
    parameter, gradient, _ = finished
    num_elements = parameter.numel()
    if gradient.numel() != num_elements or not 0 < num_elements <= KERNEL_CHUNK_ELEMENTS:
        return False
    if parameter.device != device or not (gradient.is_contiguous() and parameter.is_contiguous()):
        return False
    for name in kept:  # noqa: SIM110 - all() takes longer, and is called for each parameter
        if state[name].device != device:
            return False
    return True
