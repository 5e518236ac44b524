"""What was found in a script that a recipe has no words for, collected to be said all at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from lowmem_ft.errors import UserError

logger = logging.getLogger(__name__)

SCRIPT_ESTIMATE = "`lowmem-ft estimate --script` estimates the script as it is."


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
