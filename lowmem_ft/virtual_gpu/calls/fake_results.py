"""Results of operators on fake tensors, made here once torch's fake mode has shown how.

``FakeTensorMode`` needs a tenth of a millisecond for an operator, most of it to find out that it has seen the call
before. Here a view's own kernel makes it, without values. For everything else this module asks torch once for each
*call*: the operator, the shapes, strides, types and devices of its tensors, and all other arguments. From then on it
makes the call's results in the same way.

It asks torch each time for calls that do not determine their results: where these depend on values or their number,
where an argument changes its shape or gives its storage away, for tensors of other classes or with values of torch's
own, for arguments that are not plain values, and for operators from elsewhere, unless their author has declared the
arguments that matter (``operator_costs.py``), or their rules were read and are listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowmem_ft.foundation.tensors.operator_costs import registered_cost
from lowmem_ft.virtual_gpu.calls.type_names import class_of

aten = torch.ops.aten

MOST_CALLS = 2**16
"""Calls that a process remembers, a few hundred bytes each; at this number it forgets all and starts again."""

_META = torch.device("meta")
_PLAIN = frozenset(
    {bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
_SEQUENCES = frozenset({list, tuple, torch.Size})
_DEPENDS_ON_MORE = (
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
)
_KEEPS_VALUES = frozenset({aten.lift.default, aten.lift_fresh.default, aten.lift_fresh_copy.default})
_BY_CALL = frozenset(
    {
        *("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward"),
        *("bitsandbytes::quantize_4bit", "bitsandbytes::dequantize_4bit"),
        *("bitsandbytes::quantize_blockwise", "bitsandbytes::dequantize_blockwise"),
    }
)
"""Operators from elsewhere whose fake rules and costs look at shapes, types and plain arguments alone.

Sources: pytorch 2.13, torch/nn/attention/varlen.py; bitsandbytes 0.50.2, ``_ops.py``.
"""
_VIEWS_BY_ANOTHER_NAME = frozenset({aten._unsafe_view.default})

_WithoutDispatch: Any = torch._C._DisableTorchDispatch  # type: ignore[attr-defined]
_KeepingKeys: Any = torch._C._PreserveDispatchKeyGuard  # type: ignore[attr-defined]
_include_meta: Callable[[bool], None] = torch._C._set_meta_in_tls_dispatch_include
_dispatch_keys: Callable[[Tensor], Any] = torch._C._dispatch_keys


class SeenCall:
    """A call with known results; equal calls share one object, which can therefore serve as a key for more."""

    __slots__ = ("is_sequence", "makers")

    def __init__(self, makers: list[_Maker], is_sequence: type | None) -> None:
        self.makers = makers
        self.is_sequence = is_sequence


Check = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]
"""Function of operator, arguments and keyword arguments that raises where the device would."""

_Maker = tuple[Any, ...]
"""Recipe of one result.

One of ``("argument", position)``, ``("keyword", name)``, ``("constant", value)`` and
``("fresh", shape, stride, dtype, device)``.
"""


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments, those within lists included."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_in(value)


class FakeResults:
    """Runs operators on the fake tensors of one mode.

    Args:
        mode: makes the results that are not known yet.
        device_type: type of the machine's device: for another one, the same call has other results.
        check: raises where the device would refuse a call, judging by what decides its results; equal checks refuse the
            same calls.
    """

    def __init__(self, mode: FakeTensorMode, device_type: str, check: Check | None = None) -> None:
        self._mode = mode
        self._check = check or _takes_all
        self._seen = _SEEN.setdefault((device_type, check), {})
        self._operators: dict[int, _Operator] = {}
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._guard_address: Callable[[Tensor], None] = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if mode._allow_unsafe_data_ptr_access
            else torch._C._set_throw_on_mutable_data_ptr
        )

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, SeenCall | None]:
        """Return an operator's result, and the object that equal calls share; None where torch is asked each time.

        Args:
            func: the operator, as a dispatch mode sees it.
            args: its arguments.
            kwargs: its keyword arguments.
        """
        operator = self._operators.get(id(func))
        if operator is None:
            self._operators[id(func)] = operator = _Operator(func)
        if operator.kind == "other" or torch.is_inference_mode_enabled():
            self._check(func, args, kwargs)
            return func(*args, **kwargs), None
        if operator.kind == "view":
            if self._is_ours(args[0]):
                return self._view(func, args, kwargs), operator.as_view
            return func(*args, **kwargs), None
        key = self._key(operator, args, kwargs)
        if key is None:
            self._check(func, args, kwargs)
            return func(*args, **kwargs), None
        seen = self._seen.get(key)
        if seen is None:
            return self._learn(operator, key, args, kwargs)
        if seen is _NOT_DECIDED:
            return func(*args, **kwargs), None
        results = [self._make(maker, args, kwargs) for maker in seen.makers]
        return (results[0] if seen.is_sequence is None else seen.is_sequence(results)), seen

    def _is_ours(self, tensor: Any) -> bool:
        return (
            type(tensor) is FakeTensor
            and tensor.fake_mode is self._mode
            and tensor.constant is None
            and tensor.layout is torch.strided
        )

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a view as torch's mode finally does: with the kernel for meta tensors, which the fake ones pose as."""
        mode, device = self._mode, args[0].fake_device
        with _WithoutDispatch(), _KeepingKeys():
            mode.in_kernel_invocation = True
            _include_meta(True)
            try:
                views = func(*args, **kwargs)
            finally:
                mode.in_kernel_invocation = False
        if isinstance(views, Tensor):
            return self._fake(views, device)
        return type(views)(self._fake(view, device) for view in views)

    def _make(self, maker: _Maker, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = maker[0]
        if how == "fresh":
            _, shape, stride, dtype, device = maker
            with _WithoutDispatch():
                empty = torch.empty_strided(shape, stride, dtype=dtype, device=_META)
            return self._fake(empty, device)
        if how == "argument":
            return args[maker[1]]
        return kwargs[maker[1]] if how == "keyword" else maker[1]

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Make ``FakeTensor(mode, meta, device)``, with the attributes that its constructor gave to the first one."""
        attributes = self._attributes.get(device)
        if attributes is None:
            self._attributes[device] = attributes = dict(vars(FakeTensor(self._mode, meta, device)))
        fake: Any = Tensor._make_subclass(  # type: ignore[attr-defined]
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard_address(fake)
        fake.__dict__.update(attributes)
        return fake

    def _learn(
        self, operator: _Operator, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, SeenCall | None]:
        self._check(operator.func, args, kwargs)
        result = operator.func(*args, **kwargs)
        seen = None
        if self._key(operator, args, kwargs) == key:  # no argument has changed
            seen = self._how_made(result, args, kwargs)
        if len(self._seen) >= MOST_CALLS:
            self._seen.clear()
        self._seen[key] = seen or _NOT_DECIDED
        return result, seen

    def _how_made(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SeenCall | None:
        is_sequence = type(result) if type(result) in (list, tuple) else None
        results = [result] if is_sequence is None else result
        storages = [tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))]
        makers = []
        for item in results:
            maker = self._maker(item, args, kwargs, storages)
            if maker is None:
                return None
            makers.append(maker)
        return SeenCall(makers, is_sequence)

    def _maker(
        self, item: Any, args: tuple[Any, ...], kwargs: dict[str, Any], storages: list[int]
    ) -> _Maker | None:
        """Return how to make a result again; None if its arguments do not tell. Adds its storage to ``storages``."""
        if type(item) in (int, float, bool, type(None)):
            return "constant", item
        passed: list[_Maker] = [("argument", at) for at, value in enumerate(args) if value is item]
        passed += [("keyword", name) for name, value in kwargs.items() if value is item]
        if passed:
            return passed[0] if len(passed) == 1 else None
        if type(item) is not FakeTensor or item.untyped_storage()._cdata in storages:
            return None
        storages.append(item.untyped_storage()._cdata)
        maker = "fresh", tuple(item.shape), item.stride(), item.dtype, item.fake_device
        return maker if _is_alike(item, self._make(maker, args, kwargs)) else None

    def _key(
        self, operator: _Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return all that a call's results can depend on; None if an argument's influence is unknown."""
        key: list[Any] = [
            operator.name,
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
        ]
        if operator.irrelevant:
            args = tuple(value for at, value in enumerate(args) if at not in operator.irrelevant)
        if not self._describe(args, key, operator.is_pointwise):
            return None
        if kwargs:
            key.extend(kwargs)
            if not self._describe(kwargs.values(), key, operator.is_pointwise):
                return None
        return tuple(key)

    def _describe(self, values: Any, key: list[Any], is_pointwise: bool) -> bool:
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self._mode or value.constant is not None:
                    return False
                key += (value.shape, value.dtype, value.fake_device, _dispatch_keys(value).raw_repr())
                key.append(value.stride() if value.layout is torch.strided else None)
            elif kind is float and is_pointwise:
                key.append(float)  # its value only decides values
            elif kind in _PLAIN:
                key.append(kind)  # 1, 1.0 and True are equal
                key.append(value)
            elif kind in _SEQUENCES:
                key.append(kind)
                key.append(len(value))
                if not self._describe(value, key, is_pointwise):
                    return False
            else:
                return False
        return True


_SEEN: dict[tuple[str, Check | None], dict[tuple[Any, ...], SeenCall]] = {}
_NOT_DECIDED = SeenCall([], None)
"""Marks a call for which torch has to be asked each time."""


def _takes_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Accept every call, as on a machine without a device of its own."""


class _Operator:
    """The properties that decide how an operator's results are found."""

    __slots__ = ("as_view", "func", "irrelevant", "is_pointwise", "kind", "name")

    def __init__(self, func: Any) -> None:
        self.func = func  # kept: operators are found by id, as torch computes their hashes in Python
        self.kind: Literal["view", "by call", "other"] = _kind(func)
        self.as_view = SeenCall([], None)
        self.is_pointwise = self.kind == "by call" and torch.Tag.pointwise in func.tags
        cost = registered_cost(func)
        names = () if cost is None else cost.irrelevant or ()
        arguments = func._schema.arguments if names else ()
        self.irrelevant = frozenset(at for at, argument in enumerate(arguments) if argument.name in names)
        self.name = f"{func} except for {sorted(self.irrelevant)}" if self.irrelevant else str(func)


def _kind(func: Any) -> Literal["view", "by call", "other"]:
    if not isinstance(func, OpOverload) or func in _KEEPS_VALUES:
        return "other"
    cost = registered_cost(func)
    if func in _VIEWS_BY_ANOTHER_NAME and cost is None:
        return "view"
    is_told = func.name() in _BY_CALL if cost is None else cost.irrelevant is not None
    if (func.namespace != "aten" and not is_told) or any(tag in func.tags for tag in _DEPENDS_ON_MORE):
        return "other"
    if not func.is_view:
        return "by call"
    others = func._schema.arguments[1:]
    decomposes = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    is_simple = not decomposes and not any("Tensor" in str(other.type) for other in others)
    return "view" if is_simple and cost is None else "other"


def _is_alike(one: Any, other: Any) -> bool:
    return (
        one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
        and one.storage_offset() == other.storage_offset()
        and one.layout == other.layout
        and one.requires_grad == other.requires_grad
        and _dispatch_keys(one) == _dispatch_keys(other)
        and vars(one) == vars(other)
    )


def without_pinning(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any], bool]:
    """Return a call without its request for pinned memory, which fake tensors lack, and whether it made one."""
    if func is aten._pin_memory.default:
        if not args[0].is_cpu:
            raise RuntimeError(f"cannot pin '{class_of(args[0])}' only dense CPU tensors can be pinned")
        return aten.clone.default, args[:1], {}, True
    if kwargs.get("pin_memory"):
        if torch.device(kwargs.get("device") or "cpu").type != "cpu":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        return func, args, {**kwargs, "pin_memory": False}, True
    return func, args, kwargs, False
