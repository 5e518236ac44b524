"""One name of another library that it does not document, and the ways to write it down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["called", "replaced", "class", "module", "data"]


@dataclass(frozen=True)
class UpstreamName:
    """One name.

    Attributes:
        owner: the module or class that has it, such as ``torch._C`` or ``torch.nn.Module()``.
        name: the name itself.
        purpose: what it is relied on for.
        kind: what it must be; ``called``: a function or operator of theirs that we call; ``replaced``: a function of
            theirs in whose place they call ours.
        parameters: of what is called, those that we pass: by position up to ``*``, by name behind it. Of what is
            replaced, all that it has. None where it tells nobody, as most of what is written in C++, or where ours
            passes on whatever it is given.
        type_name: of data, its type's name; empty: any.
    """

    owner: str
    name: str
    purpose: str
    kind: Kind
    parameters: tuple[str, ...] | None = None
    type_name: str = ""

    @property
    def path(self) -> str:
        """Such as ``torch._C._current_graph_task_id``."""
        return f"{self.owner}.{self.name}"

    @property
    def library(self) -> str:
        """The package that has to be installed."""
        return self.owner.partition(".")[0]


def called(owner: str, name: str, parameters: str | None, purpose: str) -> UpstreamName:
    """A function or operator that we call, and the parameters we pass; None: it tells nobody."""
    return UpstreamName(
        owner, name, purpose, "called", None if parameters is None else tuple(parameters.split())
    )


def replaced(owner: str, name: str, parameters: str | None, purpose: str) -> UpstreamName:
    """A function in whose place ours is called, and all its parameters; None: ours takes any."""
    return UpstreamName(
        owner, name, purpose, "replaced", None if parameters is None else tuple(parameters.split())
    )


def data(owner: str, names: str, purpose: str, type_name: str = "") -> Iterator[UpstreamName]:
    """Attributes, and their type's name."""
    for name in names.split():
        yield UpstreamName(owner, name, purpose, "data", type_name=type_name)


def each(
    kind: Literal["called", "class", "module"], owner: str, names: str, purpose: str
) -> Iterator[UpstreamName]:
    """Several of a kind that are relied on for one thing."""
    for name in names.split():
        yield UpstreamName(owner, name, purpose, kind)
