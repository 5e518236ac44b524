"""Loops are run in full, except while a trace counts their rounds."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from lowmem_ft.repetition import abridged_for, in_rounds, left_behind, rounds, stand_for


@dataclass
class Recording:
    times: int = 1
    kept: list[int] = field(default_factory=list)

    def left_behind(self, tensor: Tensor) -> None:
        self.kept.append(self.times)


def test_without_a_recording_every_round_is_its_own():
    assert list(rounds("abcdef")) == [(item, 1) for item in "abcdef"]
    assert list(in_rounds("abcdef")) == list("abcdef")
    stand_for(5)
    left_behind(torch.empty(1))


@pytest.mark.parametrize(
    "items, expected",
    [
        ("", []),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
        ("abcd", [("a", 1), ("b", 2), ("d", 1)]),
        ("abcdefghij", [("a", 1), ("b", 8), ("j", 1)]),
    ],
)
def test_a_recording_gets_the_first_the_second_for_all_like_it_and_the_last(items, expected):
    recording = Recording()
    with abridged_for(recording):
        assert list(rounds(items)) == expected
        assert [(item, recording.times) for item in in_rounds(items)] == expected
    assert sum(times for _, times in expected) == len(items)
    assert recording.times == 1


def test_what_a_round_leaves_behind_is_told_with_its_count():
    recording = Recording()
    with abridged_for(recording):
        for _ in in_rounds(range(6)):
            left_behind(torch.empty(1))
    assert recording.kept == [1, 4, 1]
