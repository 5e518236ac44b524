"""Arguments that a Triton kernel reads and writes, from its source.

Pointers are followed from a kernel's parameters through arithmetic, block pointers, descriptors and other jitted
functions to loads, stores and atomics. Branches on constants are taken as the compiler takes them.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_BY_ADDRESS = ("inline_asm_elementwise", "extern_elementwise")
"""Functions of Triton that may do anything with the pointers they are given."""

_Sources = frozenset[str]
_NOTHING: _Sources = frozenset()


@dataclass(frozen=True)
class KernelOperands:
    """Names of the parameters whose memory a kernel reads, and of those whose memory it writes."""

    reads: frozenset[str]
    writes: frozenset[str]


def operands_of_kernel(
    function: Callable[..., Any], pointers: frozenset[str], constants: Mapping[str, Any]
) -> KernelOperands:
    """Return what a kernel reads and writes; all of its pointers, both ways, where its source does not tell.

    Args:
        function: the Python function within the kernel.
        pointers: names of the parameters that are tensors.
        constants: values of the parameters that are known when the kernel is compiled.
    """
    known = frozenset((name, value) for name, value in constants.items() if isinstance(value, _PLAIN))
    return _operands(function, pointers, known)


_PLAIN = (bool, int, float, str, type(None))


@functools.lru_cache(maxsize=4096)
def _operands(
    function: Callable[..., Any], pointers: frozenset[str], constants: frozenset[tuple[str, Any]]
) -> KernelOperands:
    found = _Uses()
    _follow(function, {name: frozenset((name,)) for name in pointers}, dict(constants), found)
    return KernelOperands(frozenset(found.reads), frozenset(found.writes))


@dataclass
class _Uses:
    """Uses found so far, and the functions that are being followed."""

    reads: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    within: list[Callable[..., Any]] = field(default_factory=list)

    def both(self, sources: Iterable[str]) -> None:
        self.reads.update(sources)
        self.writes.update(sources)


def _follow(
    function: Callable[..., Any], sources: dict[str, _Sources], constants: dict[str, Any], found: _Uses
) -> _Sources:
    """Add what a function reads and writes, given the kernel's pointers in its parameters; return those it returns."""
    everything = _NOTHING.union(*sources.values())
    if not everything:
        return _NOTHING
    definition = _definition(function)
    if definition is None or function in found.within:
        found.both(everything)
        return everything
    found.within.append(function)
    body = _Body(function, sources, constants, found)
    body.run(definition.body)
    found.within.pop()
    return body.returned


@functools.cache
def _definition(function: Callable[..., Any]) -> ast.FunctionDef | None:
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return parsed if isinstance(parsed, ast.FunctionDef) else None


class _Body:
    """The body of a function, with the kernel's pointers that each of its names may hold."""

    def __init__(
        self,
        function: Callable[..., Any],
        sources: dict[str, _Sources],
        constants: dict[str, Any],
        found: _Uses,
    ) -> None:
        self.sources = dict(sources)
        self.returned = _NOTHING
        self._globals: dict[str, Any] = getattr(function, "__globals__", {})
        self._constants = constants
        self._found = found

    def run(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.If):
            taken = self._truth(statement.test)
            if taken is None:
                self._value(statement.test)
                self._either(statement.body, statement.orelse)
            else:
                self.run(statement.body if taken else statement.orelse)
        elif isinstance(statement, (ast.For, ast.While)):
            self._repeated(statement)
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._assign(target, statement.value)
        elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
            if statement.value is not None:
                self._bind(statement.target, self._value(statement.value))
        elif isinstance(statement, ast.Return):
            if statement.value is not None:
                self.returned |= self._value(statement.value)
        else:
            for _, part in ast.iter_fields(statement):
                for one in part if isinstance(part, list) else [part]:
                    if isinstance(one, ast.stmt):
                        self._statement(one)
                    elif isinstance(one, ast.expr):
                        self._value(one)

    def _either(self, *branches: list[ast.stmt]) -> None:
        """Run branches of which the values take one: afterwards, a name may hold what any of them gave it."""
        before, after = self.sources, {}
        for branch in branches:
            self.sources = dict(before)
            self.run(branch)
            after = _joined(after, self.sources)
        self.sources = after

    def _repeated(self, loop: ast.For | ast.While) -> None:
        """Run a loop until its names hold nothing more: it carries pointers to earlier lines."""
        before: dict[str, _Sources] = {}
        while before != self.sources:
            before = dict(self.sources)
            if isinstance(loop, ast.For):
                self._bind(loop.target, self._value(loop.iter))
            else:
                self._value(loop.test)
            self.run(loop.body)
            self.sources = _joined(before, self.sources)
        self.run(loop.orelse)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._assign(one, other)
            return
        sources = self._value(value)
        if isinstance(target, ast.Name):
            self.sources.pop(target.id, None)
        self._bind(target, sources)

    def _bind(self, target: ast.expr, sources: _Sources) -> None:
        for one in ast.walk(target):
            if isinstance(one, ast.Name):
                self.sources[one.id] = self.sources.get(one.id, _NOTHING) | sources
                self._constants.pop(one.id, None)

    def _value(self, expression: ast.AST) -> _Sources:
        """Return the kernel's pointers that the value of an expression may hold."""
        if isinstance(expression, ast.Name):
            return self.sources.get(expression.id, _NOTHING)
        if isinstance(expression, ast.Call):
            return self._call(expression)
        if isinstance(expression, ast.IfExp) and (taken := self._truth(expression.test)) is not None:
            return self._value(expression.body if taken else expression.orelse)
        inner = _NOTHING.union(*map(self._value, ast.iter_child_nodes(expression)))
        is_plain = isinstance(expression, ast.Compare) or getattr(expression, "attr", "") == "dtype"
        return _NOTHING if is_plain else inner

    def _call(self, call: ast.Call) -> _Sources:
        positional = [self._value(one) for one in call.args]
        named = {one.arg: self._value(one.value) for one in call.keywords}
        held = _NOTHING.union(*positional, *named.values())
        name, owner = "", _NOTHING
        if isinstance(call.func, ast.Name):
            name = call.func.id
        elif isinstance(call.func, ast.Attribute):
            name, owner = call.func.attr, self._value(call.func.value)
        called = self._resolved(call.func)
        inner = getattr(called, "fn", None)
        if inspect.isfunction(inner):
            if None in named or any(isinstance(one, ast.Starred) for one in call.args):
                self._found.both(held)
                return held
            return self._jitted(inner, call, positional, {str(key): value for key, value in named.items()})
        address = owner or (positional[0] if positional else named.get("pointer", held))
        if name == "load":
            self._found.reads.update(address)
            return _NOTHING
        if name == "store":
            self._found.writes.update(address)
            return _NOTHING
        if name.startswith("atomic_"):
            self._found.both(address)
            return _NOTHING
        is_known = owner or _is_of_triton(called) or hasattr(builtins, name)
        if held and (name in _BY_ADDRESS or not is_known):
            self._found.both(held)
        return held | owner

    def _jitted(
        self,
        function: Callable[..., Any],
        call: ast.Call,
        positional: list[_Sources],
        named: dict[str, _Sources],
    ) -> _Sources:
        """Follow a call of another jitted function."""
        parameters = list(inspect.signature(function).parameters)
        sources = {**dict(zip(parameters, positional, strict=False)), **named}
        written = {
            **dict(zip(parameters, call.args, strict=False)),
            **{str(one.arg): one.value for one in call.keywords},
        }
        constants = {name: value[0] for name, one in written.items() if (value := self._constant(one))}
        return _follow(function, sources, constants, self._found)

    def _truth(self, test: ast.expr) -> bool | None:
        """Return which way a branch goes; None: the values decide."""
        value = self._constant(test)
        return bool(value[0]) if value else None

    def _constant(self, expression: ast.expr) -> tuple[Any] | None:
        """Return the value of an expression of constants, in a tuple; None for any other."""
        for one in ast.walk(expression):
            if not isinstance(one, _OF_CONSTANTS):
                return None
        names = {one.id for one in ast.walk(expression) if isinstance(one, ast.Name)}
        values: dict[str, Any] = {}
        for name in names:
            if name in self._constants:
                values[name] = self._constants[name]
            elif name not in self.sources and name in self._globals:
                value = self._globals[name]
                values[name] = getattr(value, "value", value)
            else:
                return None
        if not all(isinstance(value, _PLAIN) for value in values.values()):
            return None
        try:
            code = compile(ast.Expression(expression), "<constant>", "eval")
            return (eval(code, {"__builtins__": {}}, values),)
        except Exception:
            return None

    def _resolved(self, name: ast.expr) -> Any:
        """Return what a dotted name means where the function is defined; None if that is not known."""
        if isinstance(name, ast.Name):
            return None if name.id in self.sources else self._globals.get(name.id)
        if isinstance(name, ast.Attribute):
            return getattr(self._resolved(name.value), name.attr, None)
        return None


_OF_CONSTANTS = (
    *(
        ast.Name,
        ast.Load,
        ast.Constant,
        ast.BoolOp,
        ast.boolop,
        ast.UnaryOp,
        ast.unaryop,
        ast.Compare,
        ast.cmpop,
    ),
    *(ast.BinOp, ast.operator),
)


def _joined(one: dict[str, _Sources], other: dict[str, _Sources]) -> dict[str, _Sources]:
    return {name: one.get(name, _NOTHING) | other.get(name, _NOTHING) for name in {**one, **other}}


def _is_of_triton(called: Any) -> bool:
    return (getattr(called, "__module__", None) or "").partition(".")[0] == "triton"
