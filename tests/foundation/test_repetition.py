"""Loops are run in full, except while a trace says which of their rounds it needs."""

from __future__ import annotations

from lowmem_ft.foundation.repetition import abridged_for, rounds


class LastOnly:
    def rounds(self, items):
        return iter(list(items)[-1:])


def test_without_a_recording_every_round_is_done():
    assert list(rounds("abcdef")) == list("abcdef")
    assert list(rounds(iter("abcdef"))) == list("abcdef")


def test_a_recording_says_which_rounds_are_done_until_its_block_ends():
    with abridged_for(LastOnly()):
        assert list(rounds("abcdef")) == ["f"]
    assert list(rounds("abcdef")) == list("abcdef")
