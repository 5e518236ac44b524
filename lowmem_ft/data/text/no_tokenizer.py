"""A stand-in where no tokenizer can be read: rows that are tokens already are counted without one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from lowmem_ft.foundation.errors import UserError


class NoTokenizer:
    """No tokenizer, with the part of one's interface that rows of tokens need; they are shown as their ids.

    Args:
        reason: the error to raise where text is to be tokenized; it says why no tokenizer can be read.
    """

    is_fast = True
    chat_template = bos_token_id = eos_token_id = unk_token_id = None
    pad_token_id = 0  # any will do, as padding has no label

    def __init__(self, reason: UserError) -> None:
        self.reason = reason

    def refuse(self) -> NoReturn:
        """Raise the error that says why there is no tokenizer."""
        raise self.reason

    def decode(self, ids: Sequence[int]) -> str:
        """Return the ids, each followed by a blank."""
        return "".join(f"{one} " for one in ids)
