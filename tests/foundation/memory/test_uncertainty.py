"""What the verdict makes of a figure near its limit, as the docs promise it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from lowmem_ft.foundation.memory.uncertainty import TIGHT_SHARE, is_tight, with_headroom
from lowmem_ft.foundation.units import GIB

ROOT = Path(__file__).parents[3]
PROMISES = {
    "docs/planning.md": r"and (\d+)% of each is left: what fits tightly is no plan",
    "docs/estimating.md": r"\*\*tight\*\* if less than (\d+)% of the limit",
}


@pytest.mark.parametrize("file", PROMISES)
def test_the_share_that_stays_free_is_the_one_that_users_are_told(file):
    told = re.search(PROMISES[file], " ".join((ROOT / file).read_text("utf-8").split()))
    assert told is not None
    assert int(told[1]) == round(100 * TIGHT_SHARE)


def test_tight_is_what_leaves_less_than_that_share():
    limit = 24 * GIB
    most = round(limit * (1 - TIGHT_SHARE))
    assert not is_tight(most - 1, limit)
    assert is_tight(most + 1, limit)
    assert not is_tight(most + 1, None)


def test_headroom_is_the_least_limit_that_is_not_tight():
    needed = np.array([1.0, 700.0, 23.7]) * GIB
    for bytes_needed, limit in zip(needed.tolist(), with_headroom(needed).tolist(), strict=True):
        assert is_tight(round(bytes_needed), round(limit - GIB / 1000))
        assert not is_tight(round(bytes_needed), round(limit + GIB / 1000))
