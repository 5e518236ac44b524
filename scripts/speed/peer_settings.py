"""Settings of another tool's program that its users choose from, and their names on a command line."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

ROWS, TOKENS = 16, 2048
"""Rows of a step, and tokens of a row."""

Head = Literal["own", "whole", "wide", "stock"]
"""The head of a program, which computes its loss: as the tool does with Liger's kernels by default;
with Liger's cross entropy on all logits of a micro-batch; with Liger's fused product and cross entropy in chunks
sixteen times as long; without any of Liger's kernels, which torch.compile may do better alone."""
HEADS_IN_WORDS = {
    "whole": "whole logits",
    "wide": "chunks of the loss 16 times as long",
    "stock": "without Liger",
}

_SETTING = re.compile(
    r"(?P<rows>[1-9]\d*):(?P<checkpoints>on|off)(:(?P<head>own|whole|wide|stock))?(?P<compiled>:compiled)?"
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A choice of the tool's user.

    Args:
        rows: rows of a micro-batch.
        checkpoints: whether layers are checkpointed.
        head: how the loss is computed.
        compiled: whether the model is compiled by torch.compile.
    """

    rows: int
    checkpoints: bool
    head: Head = "own"
    compiled: bool = False

    def __str__(self) -> str:
        """Write what :func:`setting_of` reads."""
        words = [str(self.rows), "on" if self.checkpoints else "off"]
        words += [] if self.head == "own" else [self.head]
        return ":".join(words + ["compiled"] * self.compiled)

    def in_words(self) -> str:
        """Return the words of a table."""
        words = [f"{self.rows} x {TOKENS}", f"checkpointing {'on' if self.checkpoints else 'off'}"]
        words += [] if self.head == "own" else [HEADS_IN_WORDS[self.head]]
        return ", ".join(words + ["compiled"] * self.compiled)


def setting_of(text: str) -> Setting:
    """Read a setting, such as ``2:off`` or ``2:off:whole:compiled``: rows, whether layers are checkpointed, the rest.

    Raises:
        argparse.ArgumentTypeError: if it is anything else.
    """
    match = _SETTING.fullmatch(text)
    if match is None or ROWS % int(match["rows"]):
        raise argparse.ArgumentTypeError(
            f"expected rows that divide {ROWS}, then :on or :off, then maybe :whole, :wide or :stock, then maybe "
            f":compiled, got {text!r}"
        )
    return Setting(
        rows=int(match["rows"]),
        checkpoints=match["checkpoints"] == "on",
        head=cast("Head", match["head"] or "own"),
        compiled=match["compiled"] is not None,
    )


def all_settings(
    *, checkpoints: Sequence[bool] = (False, True), heads: Sequence[Head] = ("own",)
) -> tuple[Setting, ...]:
    """Return every combination, those with fewer rows first."""
    return tuple(
        Setting(rows=rows, checkpoints=on, head=head, compiled=compiled)
        for on, head, compiled, rows in itertools.product(checkpoints, heads, (False, True), (1, 2, 4))
    )
