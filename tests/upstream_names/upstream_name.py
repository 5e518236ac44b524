"""One undocumented name of another library, and the ways to write it down."""

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
        purpose: what the package needs it for.
        kind: what it must be; ``called``: a function or operator of theirs that we call; ``replaced``: a function of
            theirs that we replace by one of ours, which they call.
        parameters: for ``called``, the parameters that we pass: by position up to ``*``, by name after it. For
            ``replaced``, all that it has. None if the function does not reveal them, as most of those written in C++,
            or if ours passes on whatever it receives.
        type_name: for ``data``, its type's name; empty: any.
        since: the first version of the library that has it, of those that the package accepts; None: all have it.
        before: the first version without it; None: it is still there.
    """

    owner: str
    name: str
    purpose: str
    kind: Kind
    parameters: tuple[str, ...] | None = None
    type_name: str = ""
    since: tuple[int, int] | None = None
    before: tuple[int, int] | None = None

    @property
    def path(self) -> str:
        """Full name, such as ``torch._C._current_graph_task_id``."""
        return f"{self.owner}.{self.name}"

    @property
    def library(self) -> str:
        """The package that has to be installed."""
        return self.owner.partition(".")[0]


def called(owner: str, name: str, parameters: str | None, purpose: str) -> UpstreamName:
    """Make the row of a function or operator that we call, with the parameters we pass; None: they are not known."""
    return UpstreamName(
        owner, name, purpose, "called", None if parameters is None else tuple(parameters.split())
    )


def replaced(owner: str, name: str, parameters: str | None, purpose: str) -> UpstreamName:
    """Make the row of a function that we replace, with all its parameters; None: ours takes any."""
    return UpstreamName(
        owner, name, purpose, "replaced", None if parameters is None else tuple(parameters.split())
    )


def data(
    owner: str,
    names: str,
    purpose: str,
    type_name: str = "",
    since: tuple[int, int] | None = None,
    before: tuple[int, int] | None = None,
) -> Iterator[UpstreamName]:
    """Yield rows of attributes, with their type's name; ``since`` and ``before`` where not all versions have them."""
    for name in names.split():
        yield UpstreamName(owner, name, purpose, "data", None, type_name, since, before)


def each(
    kind: Literal["called", "class", "module"], owner: str, names: str, purpose: str
) -> Iterator[UpstreamName]:
    """Yield rows of several names of one kind and one purpose."""
    for name in names.split():
        yield UpstreamName(owner, name, purpose, kind)
