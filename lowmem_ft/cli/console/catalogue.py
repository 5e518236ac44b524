"""Commands that list a catalogue, or show one entry of it: ``gpus`` and ``models``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import raise_problems

EntryT = TypeVar("EntryT")
"""A dataclass whose ``sources`` say where each of its fields was read."""


@dataclass(frozen=True)
class Catalogue(Generic[EntryT]):
    """A catalogue as its command prints it.

    Args:
        key: name of the command, and of the list in its JSON.
        name_help: help of the argument that names one entry.
        description: description of the command.
        epilog: words below its options.
        load: returns all entries by name.
        find: returns the entry of a name, or raises a ``UserError``.
        as_json: returns an entry as JSON types.
        row: returns the cells of an entry.
        columns: their headings.
        left: headings of the columns of words.
        spare: headings of the columns that a narrow terminal leaves out, the first ones first.
        details: returns what an entry has in addition to its row: a sentence, and pairs that are listed below it.
    """

    key: str
    name_help: str
    description: str
    epilog: str
    load: Callable[[], Mapping[str, EntryT]]
    find: Callable[[str], EntryT]
    as_json: Callable[[EntryT], dict[str, Any]]
    row: Callable[[EntryT], Sequence[str]]
    columns: Sequence[str]
    left: Sequence[str]
    spare: Sequence[str]
    details: Callable[[EntryT], tuple[str, Sequence[tuple[str, str]]]]


def show(catalogue: Catalogue[Any], arguments: list[str]) -> int:
    """Print all entries of a catalogue, or all that is known of one.

    Args:
        catalogue: the catalogue.
        arguments: nothing, or an entry's name, and ``--json``.

    Returns:
        The exit code, 0.
    """
    parser = Parser(f"lowmem-ft {catalogue.key}", description=catalogue.description, epilog=catalogue.epilog)
    parser.add_argument("name", nargs="?", metavar="NAME", help=catalogue.name_help)
    parser.add_json()
    parser.add_overwrite()
    options = parser.parse_args(arguments)
    raise_problems(file_problems(options, "json"))
    found = [catalogue.find(options.name)] if options.name else list(catalogue.load().values())

    from lowmem_ft.cli.console.output import Output
    from lowmem_ft.reports.text.document import Document, Pairs, Table

    if options.json:
        Output(options.json).write_json({"schema": 1, catalogue.key: [*map(catalogue.as_json, found)]})
        return 0
    if options.name:
        cells = zip(catalogue.columns, catalogue.row(found[0]), strict=True)
        sentence, pairs = catalogue.details(found[0])
        sources = Pairs((f"{field}:", source) for field, source in found[0].sources.items())
        Output().add(
            Pairs((pair for pair in cells if pair[1]), indent=0),
            Document(sentence, Pairs(pairs), "Sources:", sources, gap=0),
        )
    else:
        rows = map(catalogue.row, found)
        Output().add(Table(catalogue.columns, rows, left=catalogue.left, spare=catalogue.spare))
    return 0
