"""What was found in a script that a recipe has no words for, collected to be said all at once."""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import dataclass, field

from lowmem_ft.foundation.errors import UserError

logger = logging.getLogger(__name__)


def script_estimate() -> str:
    """A sentence with the command that estimates the program that is running, whatever a recipe says of it."""
    path, *arguments = sys.argv
    if not path.endswith(".py") or path.endswith("__main__.py"):  # a test, a notebook
        path, arguments = "train.py", []
    command = ["lowmem-ft", "estimate", "--script", path, *(["--", *arguments] if arguments else [])]
    return f"`{shlex.join(command)}` estimates the script as it is."


@dataclass
class Reading:
    """One script being read.

    Attributes:
        problems: what makes a recipe of it wrong.
        warnings: what the recipe leaves out, each with what that means for memory.
    """

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def problem(self, sentence: str) -> None:
        """Note what a recipe cannot say."""
        self.problems.append(sentence)

    def warn(self, sentence: str) -> None:
        """Note what it leaves out."""
        self.warnings.append(sentence)

    def finish(self) -> None:
        """Say it all.

        Raises:
            UserError: if there is a problem.
        """
        if self.problems:
            raise UserError(*self.problems)
        for sentence in self.warnings:
            logger.warning("%s", sentence)
