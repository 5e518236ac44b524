"""Recorder of every operator of a program: the memory it takes, and its work.

The recorder sits on top of ``FakeTensorMode``: every operator passes through it after autograd and autocast, as a
kernel launch would. A storage is born with the operator that first returns it and dies with its last reference, exactly
when the caching allocator would get it back. So logs, caches and exceptions must keep no tensors: the order of frees
decides what is reserved.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode

from lowmem_ft.foundation.memory.category import Category, Place
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.tensors.gradient_sums import called_unwatched, take_as_much
from lowmem_ft.foundation.tensors.operator_costs import registered_cost
from lowmem_ft.foundation.tensors.storage_resizing import storage_resized_by
from lowmem_ft.virtual_gpu.calls.fake_results import FakeResults, SeenCall, tensors_in, without_pinning
from lowmem_ft.virtual_gpu.calls.skipped_rounds import AlikeRounds
from lowmem_ft.virtual_gpu.calls.work import Work, WorkLog
from lowmem_ft.virtual_gpu.costs.call_costs import CallCost, CallCosts, WorkspaceRule, Workspaces
from lowmem_ft.virtual_gpu.costs.collectives import COLLECTIVE_LIBRARIES, WAIT_FOR_RESULT, purposes_of
from lowmem_ft.virtual_gpu.device.host_copies import HostCopies
from lowmem_ft.virtual_gpu.device.orderings import Orderings
from lowmem_ft.virtual_gpu.races.checker import StreamChecker
from lowmem_ft.virtual_gpu.recording.attribution import Attribution, ProgramState
from lowmem_ft.virtual_gpu.recording.optimizer_state import plain_tensors
from lowmem_ft.virtual_gpu.recording.untraceable import lacks_kernel, no_rule
from lowmem_ft.virtual_gpu.recording.visiting_owners import Tenants
from lowmem_ft.virtual_gpu.upstream.fake_tensor_patches import FakeMode
from lowmem_ft.virtual_gpu.upstream.host_python import OPERATORS, Kind, python_around
from lowmem_ft.virtual_gpu.values.constant_propagation import (
    answer_from_values,
    are_routed,
    compute_values,
    depends_on_values,
    read_value,
    result_of_unknown_size,
    route,
)
from lowmem_ft.virtual_gpu.values.gathered_values import exchange_values
from lowmem_ft.virtual_gpu.values.questions import Questions, asking_line
from lowmem_ft.virtual_gpu.values.routing import Routing

aten = torch.ops.aten

# Looked up once: each dot takes time, and a trace needs them with every operator.
_DEVICE = torch.ops.prim.device.default
_READ_NUMBER, _RECORD_STREAM = aten._local_scalar_dense.default, aten.record_stream.default
_LIFT = aten.lift_fresh.default
_IS_PINNED, _COPY_EACH = aten.is_pinned.default, aten._foreach_copy_.default
_TOP_K = aten.topk.default
_COPY, _TO_COPY = aten.copy_.default, aten._to_copy.default

_TWO_DEVICES = re.compile(r"found (?:at least two|two different) devices,? (?P<devices>.*)")
"""Sentence of fake tensors, by the version of torch, about operands on two devices."""

_MUST_BE_ON_ONE = "Expected all tensors to be on the same device, but"

_USUAL_TYPES = frozenset({FakeTensor, Tensor, torch.nn.Parameter})


class Recorder(TorchDispatchMode):
    """A timeline of the storages on one device (and on its host), and a log of the work.

    Args:
        device_type: type of the device whose storages count as its own; ``cpu`` makes the host the device.
        attribution: tells what the program is doing.
        questions: answers for values that are not known; None: its choices are reported nowhere.
        results: runs operators.
        fake_mode: the fake mode below the recorder.
        workspace_rule: buffers of kernels; None for devices without such rules.
        workspaces: buffers of libraries; None likewise.
        check_streams: whether to look for races.
        routing: how the routers of mixtures of experts route tokens.

    Attributes:
        is_closed: whether the trace has ended.
        checker: finds races; None: races are not looked for.
        orderings: receives the program's waits and events.
        does_routing_decide: whether the program has read what a router picked, so that sizes follow from it.
    """

    def __init__(
        self,
        device_type: str,
        attribution: Attribution,
        questions: Questions | None = None,
        *,
        results: FakeResults,
        fake_mode: FakeMode,
        workspace_rule: WorkspaceRule | None = None,
        workspaces: Workspaces | None = None,
        check_streams: bool = False,
        routing: Routing = "uneven",
    ) -> None:
        super().__init__()
        self.does_routing_decide = False
        self._routing: Routing = routing
        self.device_type = device_type
        self.attribution = attribution
        self.timeline = Timeline()
        self.work = WorkLog(self.timeline)
        self.stream = 0
        self.alike = AlikeRounds(self.work)
        self.live_bytes = 0
        self.peak_bytes = 0
        self.is_closed = False
        self.as_torch_reports = False
        """True: memory on a processor is that of torch's own allocator: with random states, without NumPy's arrays."""
        self.on_peak: Callable[[int], None] = lambda live_bytes: None  # called at each new peak
        self.on_request: Callable[[Allocation], None] = lambda request: (
            None
        )  # before each allocation; may raise
        self._python_operators = 0.0  # since the last kernel
        self.largest_assumed: set[str] = set()  # operators whose result was taken at its largest
        self.of_uncertain_size: set[int] = set()  # allocations whose size a library decides
        self._questions = questions or Questions(lambda choice: None)
        self._results = results
        self._fake_mode = fake_mode
        self._costs = CallCosts(device_type, workspace_rule, workspaces)
        self._reference: weakref.ref[Recorder] = weakref.ref(self)
        self._index_of: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._births: dict[int, ProgramState] = {}
        self._padding: dict[int, int] = {}
        self._tenants = Tenants()
        self.checker = StreamChecker(self) if check_streams else None
        self.orderings = Orderings(self)
        self._host_copies = HostCopies(self, self._questions.say)

    # --- information from outside ------------------------------------------------------------------------------------

    def mark(self, tensor: Tensor, category: Category, module: str | None = None) -> None:
        """Set the category and the module of a tensor's storage; for a wrapper, those of the storages within."""
        for index in map(self.index_of, plain_tensors(tensor)):
            if index is None:
                continue
            allocation = self.timeline.allocations[index]
            allocation.category = category
            if module is not None and not self._tenants.is_shared(index):
                allocation.module = module
            if index in self._padding:
                padding = self.timeline.allocations[self._padding[index]]
                padding.category, padding.module = category, allocation.module
            self._births.pop(index, None)

    def mark_shared(self, tensor: Tensor, category: Category) -> None:
        """Mark a tensor's storage as shared: it belongs to no single module, whichever parameters it holds."""
        self.mark(tensor, category, "")
        if (index := self.index_of(tensor)) is not None:
            self._tenants.share(index)

    def mark_place(self, tensor: Tensor, place: Place) -> None:
        """Record that a tensor's storage is elsewhere than its device tells, as paged memory is."""
        index = self._index_of.get(tensor.untyped_storage()._cdata)
        if index is not None and self.timeline.allocations[index].place != place:
            allocation = self.timeline.allocations[index]
            if allocation.place == "device":
                self.live_bytes -= allocation.size_bytes
            allocation.place = place

    def pin(self, tensor: Tensor) -> None:
        """Record that torch's own allocator has pinned a new tensor's memory: a power of two of bytes.

        That allocator keeps what it has once taken for the next request of that size; the timeline does not show it.
        Source: pytorch 2.13, aten/src/ATen/core/CachingHostAllocator.h, ``allocate``.
        """
        self.mark_place(tensor, "pinned")
        index = self.index_of(tensor)
        if index is None or index in self._padding:
            return
        one = self.timeline.allocations[index]
        if one.size_bytes:
            # Padding of 0 bytes is recorded, too, where the size is a power of two: traces of other lengths then differ
            # in sizes alone.
            whole_bytes = 1 << (one.size_bytes - 1).bit_length()
            padding = dataclasses.replace(one, size_bytes=whole_bytes - one.size_bytes)
            self._padding[index] = self._malloc(padding)
            self._goes_with(tensor.untyped_storage(), self._padding[index])

    def index_of(self, tensor: Tensor) -> int | None:
        """Return the number of the allocation that holds a tensor; None if it is unknown."""
        try:
            return self._index_of.get(tensor.untyped_storage()._cdata)
        except NotImplementedError:  # one that torch.func has wrapped, whose operators come here unwrapped
            return None

    def booked_bytes(self, tensor: Tensor) -> int | None:
        """Return the bytes of the allocation that holds a tensor; None if it is unknown."""
        index = self.index_of(tensor)
        return None if index is None else self.timeline.allocations[index].size_bytes

    def place_of(self, tensor: Tensor) -> Place | None:
        """Return the place of a tensor's memory; None if it is unknown."""
        index = self.index_of(tensor)
        return None if index is None else self.timeline.allocations[index].place

    def module_of(self, tensor: Tensor) -> str | None:
        """Return the module that a tensor's storage belongs to; None if it is unknown."""
        index = next(map(self.index_of, plain_tensors(tensor)), None)
        if index is None:
            return None
        return self._tenants.of(index) or self.timeline.allocations[index].module

    def adopt(self, tensor: Tensor) -> None:
        """Count a tensor that torch has made past all operators."""
        self._count(tensor, tensor.untyped_storage(), "activation", self.attribution.module, is_array=False)

    def hold(self, size_bytes: int, category: Category, place: Place = "device") -> int:
        """Record memory that no tensor represents, and return the index by which ``timeline.free`` ends it."""
        module = self.attribution.module if category == "temporary" else ""
        index = self._malloc(self._allocation(size_bytes, category, module, place))
        if self.checker is not None:
            self.checker.buffer(index)
        return index

    def let_go(self, index: int) -> None:
        """End an allocation that :meth:`hold` began."""
        self._free(index)

    def stays(self, tensor: Tensor) -> None:
        """Count a new tensor's memory once for each round that the current one represents, as long as it lives.

        Pinned memory fills whole pages; the bytes that the tensor requested are noted.
        """
        storage, times = tensor.untyped_storage(), self.alike.times
        index = self._index_of.get(storage._cdata)
        if index is None:
            return
        one = self.timeline.allocations[index]
        one.asked_bytes = tensor.nbytes if one.place == "pinned" else 0
        if times == 1:
            return
        padding = self._padding.get(index)
        padded = one.size_bytes + (0 if padding is None else self.timeline.allocations[padding].size_bytes)
        others = dataclasses.replace(one, size_bytes=padded * (times - 1), asked_bytes=0)
        self._goes_with(storage, self._malloc(others))

    def _goes_with(self, storage: torch.UntypedStorage, other: int) -> None:
        """Let another allocation end with that of a storage."""
        key = -1 - other  # no storage's address
        self._index_of[key] = other
        weakref.finalize(storage, _release, self._reference, key).atexit = False

    def size_is_uncertain(self, tensor: Tensor) -> None:
        """Note that a library decides the size of a tensor's memory, and does not tell it."""
        if (index := self.index_of(tensor)) is not None:
            self.of_uncertain_size.add(index)

    def python_runs(self, kind: Kind) -> None:
        """Count Python that keeps the host as long as some operators do, with the next kernel."""
        self._python_operators += OPERATORS[kind]

    def host_reads(self, tensor: Tensor) -> None:
        """Note that the program reads a tensor's values."""
        self.orderings.host_reads(tensor)
        self.does_routing_decide |= are_routed((tensor,))

    def ask(self, dtype: torch.dtype) -> float | int | bool:
        """Return a stand-in for an unknown value."""
        _, is_in_forward = self.attribution.moment
        return self._questions.answer(dtype, is_in_forward=is_in_forward)

    def reset_peak(self) -> None:
        """Start a new peak from the live bytes."""
        self.peak_bytes = self.live_bytes

    # --- operators and storages --------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE:  # more frequent than all others together
            return args[0].device
        if not _USUAL_TYPES.issuperset(types) and any(map(_dispatches_itself, types)):
            return NotImplemented  # the operators that a DTensor or the like makes of it come here
        if self._fake_mode.is_asked_for_shapes:  # a run would compute nothing here
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        # One by one: looking an operator up in a set calls its ``__hash__``, which is written in Python.
        if func is _READ_NUMBER or func is _RECORD_STREAM or func is WAIT_FOR_RESULT or func is _IS_PINNED:
            return self._answer(func, args[0])
        func, args, kwargs, is_pinned = without_pinning(func, args, kwargs)
        for index in self._host_copies.indices(func, args):
            self.__torch_dispatch__(_TO_COPY, types, (index,), {"device": args[0].device})
        if func is _COPY_EACH and len({tensor.device for tensor in (*args[0], *args[1])}) > 1:
            # CUDA does the same between devices: one copy after the other.
            for pair in zip(*args[:2], strict=True):
                self.__torch_dispatch__(_COPY, types, (*pair, *args[2:]), kwargs)
            return None
        # Autograd writes gradients in place in a run, where no dispatch mode watches it. ``called`` is what it asks for
        # here; everything that is recorded is of ``func``.
        called, func = func, called_unwatched(func, args, kwargs)
        self.attribution.operator_begins(func, args)
        self.alike.operator_begins()
        result, seen = self._run(called, args, kwargs)
        if called is not func:
            seen = None  # under which the cost of ``called`` is cached, not that of ``func``
            self._count_as(args[0], result)
        self._record_births(func, args, result)
        if func is _COPY:
            self._note_tenant(args[0], args[1])
        if result is None and self.attribution.phase == "optimizer_step":
            # A list that is updated in place: what it is updated with is for the same parameters.
            self._share_module(args)
        is_exchange = getattr(func, "namespace", None) in COLLECTIVE_LIBRARIES
        if is_exchange:
            for tensor, category in purposes_of(func, args, kwargs):
                self.mark(tensor, category)
        cost = self._costs.of(func, args, kwargs, result, seen, self.stream)
        workspaces = self._take_workspaces(func, cost)
        # Where the host is the device, its memory counts whether it is pinned or not.
        if is_pinned and isinstance(result, Tensor) and self.device_type != "cpu":
            self.pin(result)
        work = cost.work
        if work is not None:
            work = self._issued(work, func, args, result)
        # In the forward of a module, the largest of floating-point scores are a router's pick of experts.
        if func is _TOP_K and args[0].is_floating_point() and self.attribution.moment[1]:
            route(args[0], result, args[1], args[2] if len(args) > 2 else -1, self._routing)
        elif not (is_exchange and exchange_values(func, args, result)):
            compute_values(called, args, kwargs, result)
        if self.checker is not None:
            self.checker.operator(func, args, kwargs, result)
        if work is not None:
            self.work.add(work)
        for index in workspaces:  # after the work, so that the kernel has them while it runs
            self.let_go(index)
        return result

    def _answer(self, func: Any, tensor: Tensor) -> Any:
        """Return the result of an operator that runs no kernel and takes no memory."""
        if func is _READ_NUMBER:
            self.host_reads(tensor)
            value = read_value(func, tensor)
            return self.ask(tensor.dtype) if value is None else value
        if func is _IS_PINNED:
            return self.place_of(tensor) == "pinned"
        return tensor if func is WAIT_FOR_RESULT else None

    def _issued(self, work: Work, func: Any, args: tuple[Any, ...], result: Any) -> Work:
        """Return an operator's work as the current stream gets it now."""
        work = work.at(self.work.position)
        work.stream, work.times = self.stream, self.alike.times
        registered = registered_cost(func)
        work.by_triton = registered is not None and registered.launched_by_triton
        if work.kind == "kernel":
            work.python_operators = self._python_operators + python_around(func)
            self._python_operators = 0.0
        if work.kind == "copy":
            self._host_copies.begin(func, args, result, work)
        return work

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, SeenCall | None]:
        """Return the operator's result on fake tensors, and which call it was.

        Raises:
            ModelError: if there is no rule for its result.
            RuntimeError: where the device would refuse the call.
        """
        try:
            return self._results.call(func, args, kwargs)
        except DynamicOutputShapeException:  # the host waits for the number that is the result's size
            self.orderings.host_reads(args[0])
            self.does_routing_decide |= are_routed(args)
            result, is_size_known = result_of_unknown_size(func, args, kwargs)
            if not is_size_known:
                self.largest_assumed.add(str(func))
            return result, None
        except DataDependentOutputException as error:  # such as torch.equal
            self.orderings.host_reads(args[0])
            answer = answer_from_values(func, args, kwargs, error)
            return self.ask(torch.bool) if answer is None else answer, None
        except UnsupportedOperatorException as error:
            raise no_rule(func, asking_line()) from error
        except RuntimeError as error:
            if lacks_kernel(error):
                raise no_rule(func, asking_line()) from error
            found = _TWO_DEVICES.search(str(error))
            if found is None and func is torch.ops.aten.split_with_sizes.default:
                raise depends_on_values(str(func)) from error  # by counts of tokens, which are unknown
            if found is None:
                raise
            devices = found["devices"].rstrip("!").replace(", ", " and ").replace(self.device_type, "cuda")
            raise RuntimeError(f"{_MUST_BE_ON_ONE} found at least two devices, {devices}!") from None

    def _take_workspaces(self, func: Any, cost: CallCost) -> list[int]:
        if cost.has_library:  # which keeps its workspace from the first call on: these are not returned
            for size in self._costs.first_taken(func, self.stream):
                self.hold(size, "workspace")
        taken: list[int] = []
        try:
            # One by one, and not in a comprehension: a request that fails must leave the names of those before it.
            for size in cost.workspaces:
                taken.append(self.hold(size, "temporary"))
        except torch.OutOfMemoryError:
            for index in taken:
                self.let_go(index)
            raise
        return taken

    def _record_births(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if isinstance(result, Tensor):
            self._see(func, args, result, 0)
        elif isinstance(result, (tuple, list)):
            for position, item in enumerate(result):
                if isinstance(item, Tensor):
                    self._see(func, args, item, position)
                elif isinstance(item, list):  # of gradients
                    for tensor in tensors_in(item):
                        self._see(func, args, tensor, position)
        else:
            resized = storage_resized_by(func, args, result)
            if resized is not None:
                self.storage_is_resized(resized.untyped_storage())

    def _see(self, func: Any, args: tuple[Any, ...], tensor: Tensor, position: int) -> None:
        storage = tensor.untyped_storage()
        index = self._index_of.get(storage._cdata)
        if index is None:
            if tensor.device.type not in (self.device_type, "cpu"):  # such as meta, which takes no memory
                if tensor.device.type == "cuda" and self.device_type == "cpu":
                    # Fake mode makes CUDA tensors without a GPU; the real call would raise this there.
                    raise RuntimeError(
                        "Found no NVIDIA driver on your system: this is a machine without a GPU."
                    )
                return
        else:
            allocation = self.timeline.allocations[index]
            if (
                self.attribution.is_accumulating_gradient
                and tensor.device.type == self.device_type
                and allocation.category not in ("parameter", "optimizer_state")  # not one updated in a hook
                and (
                    allocation.category == "gradient" or allocation.phase != "load"
                )  # nor what state visits for it
            ):
                self.mark(tensor, "gradient", self.attribution.module)
            if allocation.size_bytes == storage.nbytes():  # a view, or written in place
                return
            self._log_resizing(allocation, storage.nbytes())
        self._record_allocation(func, args, tensor, storage, position)
        if index is not None:
            self._end(index)  # the resized one

    def _record_allocation(
        self, func: Any, args: tuple[Any, ...], tensor: Tensor, storage: torch.UntypedStorage, position: int
    ) -> None:
        attribution = self.attribution
        module = attribution.module
        if not module and attribution.inherits_module:
            module = self._module_of_source(args, position)
        category = attribution.category_at_birth(func, args)
        is_array = self.as_torch_reports and func is _LIFT and not args[0].untyped_storage().resizable()
        index = self._count(tensor, storage, category, module, is_array=is_array)
        if category in ("temporary", "activation"):
            self._births[index] = attribution.moment

    def _count(
        self,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        category: Category,
        module: str,
        *,
        is_array: bool = False,
    ) -> int:
        """Count a new storage: memory of an array of NumPy's is on the host, and torch has not allocated it."""
        place: Place = "device" if tensor.device.type == self.device_type and not is_array else "host"
        size = storage.nbytes()
        index = self._malloc(self._allocation(size, category, module, place))
        self._follow(storage, index)
        return index

    def _count_as(self, first: Tensor, total: Tensor) -> None:
        """Let a sum's storage replace that of its first operand, counted or not."""
        take_as_much(total, first)
        index = self._index_of.pop(first.untyped_storage()._cdata, None)
        if index is not None:
            self._follow(total.untyped_storage(), index)

    def _follow(self, storage: torch.UntypedStorage, index: int) -> None:
        key = storage._cdata
        if key not in self._index_of:
            self._watched[key] = weakref.ref(storage, functools.partial(_release, self._reference, key))
        self._index_of[key] = index

    def _note_tenant(self, memory: Tensor, source: Tensor) -> None:
        to, origin = (self._index_of.get(tensor.untyped_storage()._cdata) for tensor in (memory, source))
        if to is not None and origin is not None:
            allocations = self.timeline.allocations
            self._tenants.move_in(to, allocations[to], allocations[origin])

    def _module_of_source(self, args: tuple[Any, ...], position: int) -> str:
        """Return the module of the tensor that a result was made from: in an optimizer's step, the parameter's."""
        for argument in args:
            source: Any = argument
            if isinstance(argument, (list, tuple)) and argument:
                source = argument[position] if position < len(argument) else argument[0]
            if isinstance(source, Tensor):
                return self.module_of(source) or ""
        return ""

    def _share_module(self, args: tuple[Any, ...]) -> None:
        """Attribute what updates a parameter, such as a gradient that has come from the host, to its module.

        Memory that state visits is used by all parameters in turn, and belongs to none.
        """
        tensors = list(tensors_in(args))
        module = next(filter(None, map(self.module_of, tensors)), "")
        for index in map(self.index_of, tensors):
            if index is None or self._tenants.of(index):
                continue
            if (one := self.timeline.allocations[index]).category == "temporary":
                one.module = one.module or module

    def storage_is_resized(self, storage: torch.UntypedStorage) -> None:
        """Resize as CUDA does: allocate new memory, copy as much as both can hold, and free the old memory."""
        index = self._index_of.get(storage._cdata)
        if index is None or self.timeline.allocations[index].size_bytes == storage.nbytes():
            return
        before = self.timeline.allocations[index]
        now = self._allocation(storage.nbytes(), before.category, before.module, before.place)
        self._index_of[storage._cdata] = other = self._malloc(now)
        self._log_resizing(before, now.size_bytes)
        if index in self._births:
            self._births[other] = self.attribution.moment
        self._end(index)

    def _log_resizing(self, before: Allocation, size: int) -> None:
        """Log the copy within the device that resizes a storage."""
        size_copied = min(before.size_bytes, size) if before.place == "device" else 0
        if size_copied:
            copy = Work("kernel", self.work.position, self.stream, "resize_", num_bytes=2 * size_copied)
            copy.times = self.alike.times
            self.work.add(copy)

    def close(self) -> None:
        """Stop recording: storages freed from now on have lived to the end of the trace."""
        self._index_of.clear()
        self.is_closed = True

    def storage_is_gone(self, key: int) -> None:
        """End the allocation of a storage, if the recorder has seen it."""
        self._watched.pop(key, None)
        index = self._index_of.pop(key, None)
        if index is not None:
            self._end(index)

    def _end(self, index: int) -> None:
        birth = self._births.pop(index, None)
        allocation = self.timeline.allocations[index]
        if birth is not None:
            allocation.category = self.attribution.category_at_death(allocation.category, birth)
        self._free(index)

    def _malloc(self, allocation: Allocation) -> int:
        self.on_request(allocation)
        index = self.timeline.malloc(allocation)
        if allocation.place == "device":
            self._add(allocation.size_bytes)
        if self.checker is not None:
            self.checker.allocated(index)
        return index

    def _free(self, index: int) -> None:
        self.timeline.free(index)
        allocation = self.timeline.allocations[index]
        if allocation.place == "device":
            self.live_bytes -= allocation.size_bytes
        if self.checker is not None:
            self.checker.freed(index)

    def _allocation(self, size: int, category: Category, module: str, place: Place) -> Allocation:
        return Allocation(
            size_bytes=size,
            category=category,
            phase=self.attribution.phase,
            module=module,
            stream=self.stream,
            place=place,
        )

    def _add(self, size: int) -> None:
        self.live_bytes += size
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes
            self.on_peak(self.live_bytes)


def _run_on_a_part(
    recorder: Recorder, start: int, end: int, operator: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run an operator that draws random numbers on this rank's part of a ``DTensor``, as torch 2.15 does."""
    with recorder:
        return operator(*args, **kwargs)


if hasattr(rng_prims, "run_dtensor_rng_op"):  # since torch 2.13, if not earlier
    rng_prims.run_dtensor_rng_op.py_impl(Recorder)(_run_on_a_part)


def _dispatches_itself(kind: type) -> bool:
    """Return whether tensors of a class run operators in their own way, on tensors within them: a ``DTensor`` does."""
    return not issubclass(kind, FakeTensor) and kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def _release(recorder: weakref.ref[Recorder], key: int, storage: object = None) -> None:
    """Run when a storage is freed. With a strong reference, storages and recorder would keep each other for ever."""
    alive = recorder()
    if alive is not None:
        alive.storage_is_gone(key)
