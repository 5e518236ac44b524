"""A program's use of an answer, by its bytecode: whether one answer raises, and which loop asks.

Python's bytecode differs from version to version; the parts used here (conditional jumps, raises, backward jumps) have
kept their names since 3.10.
"""

from __future__ import annotations

import bisect
import dis
import functools
from dataclasses import dataclass
from types import CodeType

_BETWEEN = frozenset({"NOP", "CACHE", "EXTENDED_ARG", "PRECALL", "TO_BOOL", "NOT_TAKEN", "RESUME"})
_ENDS = ("RETURN", "YIELD", "JUMP", "POP_JUMP", "FOR_ITER", "SEND", "RERAISE")
_LEAVES = frozenset({"exit", "_exit", "abort", "quit", "fail"})
"""Calls that end a program as an exception does."""


@dataclass(frozen=True)
class Loop:
    """A loop of a function, by the offsets of its first and last instruction."""

    first: int
    last: int
    is_bounded: bool
    """True for a ``for`` loop, which ends with its items; a ``while`` loop ends with an answer."""


def answer_that_passes(code: CodeType, offset: int) -> bool | None:
    """Return the answer that passes a check, as in ``assert ok`` or ``if not ok: raise``; None if there is no check.

    Args:
        code: code of the function that asks.
        offset: offset of the instruction that asks: a call, or the test of a condition itself.
    """
    instructions, _ = _instructions(code)
    index = _index_at(code, offset)
    if not _is_test(instructions[index].opname):
        index += 1
    is_negated = False
    while num_passed := _passed_on(instructions, index):
        is_negated ^= instructions[index].opname == "UNARY_NOT"
        index += num_passed
    if not _is_conditional_jump(instructions[index].opname):
        return None
    jumped, passed = _sides(code, index)
    raises_if_jumped = _Way(code, other=passed).raises(jumped)
    raises_if_not = _Way(code, other=jumped).raises(passed)
    if raises_if_jumped == raises_if_not:
        return None
    jumps_if_true = "TRUE" in instructions[index].opname
    return (jumps_if_true != raises_if_jumped) ^ is_negated


def returns_answer(code: CodeType, offset: int) -> bool:
    """Return whether a function returns the answer, so that its caller decides."""
    instructions, _ = _instructions(code)
    return instructions[_skipped(instructions, _index_at(code, offset) + 1)].opname == "RETURN_VALUE"


def innermost_loop(code: CodeType, offset: int) -> Loop | None:
    """Return the smallest loop of a function around an instruction."""
    around = [loop for loop in _loops(code) if loop.first <= offset <= loop.last]
    return min(around, key=lambda loop: loop.last - loop.first, default=None)


def _index_at(code: CodeType, offset: int) -> int:
    """Return the index of the instruction at an offset, which may point into the cache after it."""
    _, index_of = _instructions(code)
    return bisect.bisect_right(list(index_of), offset) - 1


@functools.lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> tuple[list[dis.Instruction], dict[int, int]]:
    instructions = list(dis.get_instructions(code))
    return instructions, {instruction.offset: index for index, instruction in enumerate(instructions)}


@functools.lru_cache(maxsize=1024)
def _loops(code: CodeType) -> list[Loop]:
    instructions, index_of = _instructions(code)
    last_of: dict[int, int] = {}
    for instruction in instructions:
        is_jump = "JUMP" in instruction.opname and "NO_INTERRUPT" not in instruction.opname
        if is_jump and isinstance(instruction.argval, int) and instruction.argval <= instruction.offset:
            last_of[instruction.argval] = instruction.offset
    return [Loop(first, last, _is_for(instructions, index_of[first])) for first, last in last_of.items()]


def _is_for(instructions: list[dis.Instruction], index: int) -> bool:
    return instructions[_skipped(instructions, index)].opname in ("FOR_ITER", "GET_ANEXT")


def _skipped(instructions: list[dis.Instruction], index: int) -> int:
    while instructions[index].opname in _BETWEEN:
        index += 1
    return index


def _passed_on(instructions: list[dis.Instruction], index: int) -> int:
    """Return how many instructions only pass an answer on: negated, or under a name that is tested at once."""
    name, argument = instructions[index].opname, instructions[index].argval
    if name in _BETWEEN or name == "UNARY_NOT":
        return 1
    if name == "STORE_FAST_LOAD_FAST":
        return argument[0] == argument[1]
    after = _skipped(instructions, index + 1)
    loaded = instructions[after].opname.startswith("LOAD") and instructions[after].argval
    return after + 1 - index if name.startswith("STORE") and loaded == argument else 0


def _is_test(opname: str) -> bool:
    return opname in ("TO_BOOL", "UNARY_NOT") or _is_conditional_jump(opname)


def _is_conditional_jump(opname: str) -> bool:
    return "JUMP" in opname and ("IF_TRUE" in opname or "IF_FALSE" in opname)


def _sides(code: CodeType, index: int) -> tuple[int, int]:
    """Return the targets of a conditional jump: taken, and not taken."""
    instructions, index_of = _instructions(code)
    target = index_of[instructions[index].argval]
    return _skipped(instructions, target), _skipped(instructions, index + 1)


class _Way:
    """The path of a function after one answer.

    Args:
        code: code of the function.
        other: index of its next instruction after the other answer. A test that can lead there too is part of the same
            condition, like the second one of ``a and b``.
    """

    def __init__(self, code: CodeType, other: int) -> None:
        self._code = code
        self._instructions, self._index_of = _instructions(code)
        self._other = other
        self._known: dict[int, bool] = {}

    def raises(self, index: int) -> bool:
        """Return whether the function goes straight from an instruction to a ``raise``."""
        if index not in self._known:
            self._known[index] = False  # the answer within a loop
            self._known[index] = self._raises(index)
        return self._known[index]

    def _raises(self, index: int) -> bool:
        for position in range(index, len(self._instructions)):
            name, target = self._instructions[position].opname, self._instructions[position].argval
            if name == "RAISE_VARARGS" or (name.startswith("LOAD") and target in _LEAVES):
                return True
            if _is_conditional_jump(name):
                sides = _sides(self._code, position)
                rest = [side for side in sides if not self._is_other(side)]
                return bool(rest) and all(map(self.raises, rest))
            if name == "JUMP_FORWARD":
                return self.raises(self._index_of[target])
            if name.startswith(_ENDS):
                return False
        return False

    def _is_other(self, index: int) -> bool:
        """Return whether it is the other path, or equal to it: Python repeats a ``return`` that many paths lead to."""
        if index == self._other:
            return True
        mine, others = (
            [(instruction.opname, instruction.argval) for instruction in self._instructions[at : at + 2]]
            for at in (index, self._other)
        )
        is_return = any(name.startswith("RETURN") for name, _ in mine)
        return (
            is_return
            and mine[: 1 + mine[0][0].startswith("LOAD")] == others[: 1 + mine[0][0].startswith("LOAD")]
        )
