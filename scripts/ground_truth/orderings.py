"""Every ordering in the source, so that each can be left out in turn to see whether any check notices.

The list is read from the source, so that a new wait is found the day it is written: calls that wait, each event that a
copy must come after, the default if a copy names none and comes after all compute so far, each event that is kept for a
later wait, and each source that is held while it is copied.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

MODULES = (
    "lowmem_ft.host.copy_engine",
    "lowmem_ft.host.pinned_memory",
    "lowmem_ft.host.side_stream",
    "lowmem_ft.techniques.offload.activation_offload",
    "lowmem_ft.techniques.optimizer_in_backward",
    "lowmem_ft.techniques.offload.optimizer_offload",
    "lowmem_ft.techniques.streaming.parameter_streaming",
    "lowmem_ft.techniques.streaming.embedding",
    "lowmem_ft.techniques.streaming.head",
    "lowmem_ft.techniques.streaming.layers",
    "lowmem_ft.techniques.update_overlap",
    "lowmem_ft.training.session",
)
"""Modules that order copies: a test looks for others that use the engine."""

_WAITS = (
    "wait",
    "hold",
    "synchronize",
    "wait_event",
    "release_sources",
    "end_backward",
    "_wait_for_arrival",
    "join",
)
_COPIES = ("to_host", "to_device")
_EVENTS = (*_COPIES, "now", "record_event", "_travels")
_NAMES_OF_EVENTS = ("end", "arrived", "written")


@dataclass(frozen=True)
class Ordering:
    """One ordering.

    Args:
        module: its module.
        function: its function, as ``Class.function``.
        what: what is left out, in words; unique within the function.
        number: its index among those of the module.
    """

    module: str
    function: str
    what: str
    number: int

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.what}"

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Run the package without this ordering, in a ``with`` block."""
        function = self._function()
        before = function.__code__
        function.__code__ = self._code()
        try:
            yield
        finally:
            function.__code__ = before

    def _function(self) -> FunctionType:
        found: Any = importlib.import_module(self.module)
        for name in self.function.split("."):
            found = inspect.unwrap(found.__dict__[name] if inspect.isclass(found) else getattr(found, name))
        assert isinstance(found, FunctionType), self
        return found

    def _code(self) -> CodeType:
        tree = _parsed(self.module)
        finder = _Finder(self.module, leave_out=self.number)
        changed = ast.fix_missing_locations(finder.visit(tree))
        code = compile(changed, inspect.getsourcefile(importlib.import_module(self.module)) or "?", "exec")
        for name in self.function.split("."):
            [code] = [part for part in code.co_consts if isinstance(part, CodeType) and part.co_name == name]
        return code


def all_orderings() -> list[Ordering]:
    """Return the orderings of :data:`MODULES`, in the source's order."""
    found: list[Ordering] = []
    for module in MODULES:
        finder = _Finder(module)
        finder.visit(_parsed(module))
        found += finder.found
    return found


def _parsed(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


class _Finder(ast.NodeTransformer):
    """Finds the orderings of a module, and can leave one out."""

    def __init__(self, module: str, leave_out: int | None = None) -> None:
        self.found: list[Ordering] = []
        self._module, self._leave_out = module, leave_out
        self._function: list[str] = []

    def _is_left_out(self, what: str) -> bool:
        function = ".".join(self._function)
        same = sum(other.function == function and other.what.split(" #")[0] == what for other in self.found)
        name = f"{what} #{same + 1}" if same else what
        self.found.append(Ordering(self._module, function, name, len(self.found)))
        return len(self.found) - 1 == self._leave_out

    def _visit_scope(self, node: Any) -> Any:
        self._function.append(node.name)
        self.generic_visit(node)
        self._function.pop()
        return node

    visit_ClassDef = visit_FunctionDef = _visit_scope

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Find calls that wait, and those that keep an event."""
        self.generic_visit(node)
        call = node.value
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            return node
        name = call.func.attr
        is_lasting = isinstance(call.func.value, ast.Attribute)  # an event in a local variable is no promise
        keeps = is_lasting and name in ("append", "update") and any(map(_is_event, _parts(call.args)))
        if (name in _WAITS or keeps) and self._is_left_out(ast.unparse(call)):
            node.value = ast.Tuple([*call.args], ast.Load())  # which may themselves copy
        return node

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Find events that are kept in an attribute or a container, and lists of events that a copy comes after."""
        self.generic_visit(node)
        if [ast.unparse(target) for target in node.targets] == ["after"]:
            self._leave_out_of(node.value)
        pairs = [_pairs(target, node.value) for target in node.targets]
        for target, value in (pair for several in pairs for pair in several):
            is_kept = isinstance(target, (ast.Attribute, ast.Subscript))
            if (
                is_kept
                and any(map(_is_event, _parts([value])))
                and self._is_left_out(f"{ast.unparse(target)} = ...")
            ):
                _put(node, target, ast.Name("_", ast.Store()))
        return node

    def visit_Call(self, node: ast.Call) -> Any:
        """Find the events that a copy comes after, named or not, and whether its source is held."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Attribute) or node.func.attr not in _COPIES:
            return node
        keywords = {keyword.arg: keyword for keyword in node.keywords}
        text = ast.unparse(node)
        if "after" in keywords:
            self._leave_out_of(keywords["after"].value)
        elif self._is_left_out(f"all computing before {text}"):
            node.keywords.append(ast.keyword("after", ast.Tuple([], ast.Load())))
        if node.func.attr == "to_host" and "keep" not in keywords and self._is_left_out(f"source of {text}"):
            node.keywords.append(ast.keyword("keep", ast.Constant(False)))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """Find a source that an attribute holds."""
        self.generic_visit(node)
        if ast.unparse(node).endswith("= tensor.detach()") and self._is_left_out(ast.unparse(node)):
            node.value = ast.Constant(None)
        return node

    def _leave_out_of(self, collection: ast.expr) -> None:
        if not isinstance(collection, (ast.Tuple, ast.List)):
            return
        for element in list(collection.elts):
            if self._is_left_out(f"after {ast.unparse(element)}"):
                collection.elts.remove(element)


def _is_event(node: ast.expr) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _NAMES_OF_EVENTS
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _EVENTS


def _parts(nodes: list[ast.expr]) -> list[ast.expr]:
    """Return the nodes, with tuples among them replaced by their elements."""
    return [part for node in nodes for part in (node.elts if isinstance(node, ast.Tuple) else [node])]


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def _put(assignment: ast.Assign, old: ast.expr, new: ast.expr) -> None:
    for targets in (assignment.targets, *(t.elts for t in assignment.targets if isinstance(t, ast.Tuple))):
        targets[:] = [new if target is old else target for target in targets]
