"""Findings in a script that a recipe cannot express, collected to be reported all at once."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe.command_lines import command_line, quoted

logger = logging.getLogger(__name__)


def script_estimate() -> str:
    """Return a sentence with the command that estimates the running program, whatever a recipe can express."""
    path, *arguments = sys.argv
    if not path.endswith(".py") or path.endswith("__main__.py"):  # a test or a notebook
        path, arguments = "train.py", []
    command = command_line("estimate", "--script", path, *(["--", *arguments] if arguments else []))
    return f"{quoted(command)} estimates the script itself."


@dataclass
class Reading:
    """Findings of one reading of a script.

    Attributes:
        problems: findings that make a recipe of it wrong.
        warnings: what the recipe leaves out, each with its consequence for memory.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, sentence: str) -> None:
        """Add a finding that a recipe cannot express."""
        self.problems.append(sentence)

    def warn(self, sentence: str) -> None:
        """Add a finding that the recipe leaves out."""
        self.warnings.append(sentence)

    def finish(self) -> None:
        """Report all findings.

        Raises:
            UserError: if there is a problem.
        """
        if self.problems:
            raise UserError(*self.problems)
        for sentence in self.warnings:
            logger.warning("%s", sentence)
