"""The parser of a subcommand's options: it keeps examples in the help, and raises errors like all others."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from lowmem_ft.cli.console.help_formatter import HelpFormatter
from lowmem_ft.foundation.errors import UserError, raise_problems


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are ``UserError``, which the command prints before it exits with 2."""

    def __init__(self, prog: str, **settings: Any) -> None:
        self._options: dict[str, str] = {}
        self._flags: set[str] = set()
        self._names_follow_json = False
        super().__init__(prog=prog, formatter_class=HelpFormatter, **settings)

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:  # noqa: D102
        action = super().add_argument(*names, **settings)
        self._options |= {name.lstrip("-"): name for name in action.option_strings if name.startswith("--")}
        self._flags |= set() if action.nargs is None else {*action.option_strings}
        return action

    def add_once(self, options: Mapping[str, str], **settings: Any) -> None:
        """Add options that may be given once each.

        Args:
            options: the help of each, by its name and the placeholder of its value.
            settings: further arguments of ``add_argument``.
        """
        for option, help_text in options.items():
            name, placeholder = option.split()
            self.add_argument(name, metavar=placeholder, action=_Once, help=help_text, **settings)

    def add_gpu(self, help_text: str, placeholder: str = "NAME") -> None:
        """Add ``--gpu``, whose word is without blanks around it."""
        self.add_once({f"--gpu {placeholder}": help_text}, type=_gpu_word)

    def add_model(self) -> None:
        """Add the argument that names a model, as ``find_model`` reads it."""
        self.add_argument(
            "model", metavar="MODEL", help="hub id, model folder, adapter folder, or the folder of a run"
        )

    def add_json(self) -> None:
        """Add ``--json [FILE.json|-]`` to a command whose arguments are names: any other word after it is one of those.

        ``--json`` alone, like ``-``, is stdout.
        """
        self._names_follow_json = True
        self.add_argument(
            "--json",
            nargs="?",
            const="-",
            metavar="FILE.json|-",
            help="write the same as JSON; - or no FILE.json: to stdout, and nothing else there",
        )

    def add_without_packages(self) -> None:
        """Add the option by which estimates take no package with kernels as installed."""
        from lowmem_ft.foundation.packages import KERNEL_PACKAGES, LEFT_OUT_VARIABLE

        self.add_argument(
            "--without-packages",
            action=_SetsVariable,
            nargs=0,
            const=LEFT_OUT_VARIABLE,
            help=f"estimate layers with a recurrent state as where {', '.join(KERNEL_PACKAGES)} are not installed",
        )

    def add_overwrite(self) -> None:
        """Add the option that allows the others to replace files."""
        self.add_argument("--overwrite", action="store_true", help="replace existing files")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse like argparse, which would take ``-1xl4`` for an option, and a name behind ``--json`` for its file."""
        words: list[str] = []
        for word in sys.argv[1:] if args is None else args:
            if words and re.match(r"-\d", word) and words[-1] in {*self._options.values()} - self._flags:
                words[-1] += f"={word}"
            elif self._names_follow_json and words and words[-1] == "--json" and not _is_json_file(word):
                words[-1:] = ["--json=-", word]
            else:
                words.append(word)
        return super().parse_known_args(words, namespace)

    def parse_options(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the other words, such as settings.

        Raises:
            UserError: if an option is impossible, or a word was meant as one.
        """
        options, others = self.parse_known_args(list(arguments))
        raise_problems(self._misspelt(others))
        return options, others

    def error(self, message: str) -> NoReturn:  # noqa: D102
        raise UserError(f"{message[0].upper()}{message[1:]}. `{self.prog} --help` shows its arguments.")

    def print_help(self, file: Any = None) -> None:
        """Print the help, and fail if it cannot be written, which argparse ignores."""
        print(self.format_help(), file=file or sys.stdout, end="")

    def _misspelt(self, others: Sequence[str]) -> list[str]:
        """Return problems with words that are not options but were meant as one: ``--gpus l4``, ``gpu=l4``.

        Args:
            others: the words that :meth:`parse_options` has left; recipe keys may be among them.

        Returns:
            A sentence for each.
        """
        problems = []
        for word, following in itertools.zip_longest(others, others[1:], fillvalue=""):
            name, equals, value = word.lstrip("-").partition("=")
            option = self._option_near(name)
            if option is None or not (word.startswith("-") or equals):
                continue
            if option not in self._flags | {"--help"} and not (
                equals or "=" in following or following[:2] == "--"
            ):
                value = following
            shown = shlex.join([option, value] if value else [option])
            what = "option" if word.startswith("-") else "setting"
            problems.append(
                f"There is no {what} {word.partition('=')[0]}. Did you mean the option `{shown}`?"
            )
        return problems

    def _option_near(self, name: str) -> str | None:
        near = difflib.get_close_matches(name, self._options, n=1, cutoff=0.75)
        return self._options[near[0]] if near else None


def _gpu_word(word: str) -> str:
    from lowmem_ft.foundation.catalog.gpu_catalog import gpu_word  # the help needs none

    return gpu_word(word)


def _is_json_file(word: str) -> bool:
    return word == "-" or word.lower().endswith(".json")


class _SetsVariable(argparse.Action):
    """An option that holds for this process and those that it starts: each may make traces."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        os.environ[str(self.const)] = "1"


class _Once(argparse.Action):
    """An option that may be given once; argparse would silently take the last of two values."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        if before is not None:
            raise UserError(
                f"{option_string} can be given once, got {before} and {values}. "
                + ("Name one, or use --gpu all." if self.dest == "gpu" else "Leave one out.")
            )
        setattr(namespace, self.dest, values)
