"""Defects as they would be planted, and the tests that could see them."""

from __future__ import annotations

from reached_tests import REPOSITORY, Imports
from witnesses import OPERATORS, defects_in, drawn

SOURCE = '''"""A room."""

import contextlib


def size(one, other):
    if one < 0:
        return 0
    if one > 100 and other:
        return one + other
    return f"{one}" + "é"


@contextlib.contextmanager
def held(lock):
    lock.take()
    yield
    lock.free()
'''


def test_each_operator_changes_one_place(tmp_path):
    path = tmp_path / "lowmem_ft" / "room.py"
    path.parent.mkdir()
    path.write_text(SOURCE, encoding="utf-8")
    lines = SOURCE.splitlines()
    changed = {}
    for defect in defects_in(path, tmp_path):
        after = defect.planted(path.read_bytes()).decode().splitlines()
        ((before, now),) = [pair for pair in zip(lines, after, strict=True) if pair[0] != pair[1]]
        changed[defect.name] = (before.strip(), now.strip())
    assert changed == {
        "lowmem_ft.room:size condition 1": ("if one < 0:", "if False:"),
        "lowmem_ft.room:size condition 2": ("if one > 100 and other:", "if one > 100:"),
        "lowmem_ft.room:size bound 1": ("if one > 100 and other:", "if one > 114 and other:"),
        "lowmem_ft.room:size sign 1": ("return one + other", "return one - other"),
        "lowmem_ft.room:held restore 1": ("lock.free()", "pass"),
    }


def test_the_same_seed_draws_the_same_and_every_operator():
    one = drawn(24, 1)
    assert [defect.name for defect in one] == [defect.name for defect in drawn(24, 1)]
    assert {defect.name.split()[1] for defect in drawn(80, 1)} == OPERATORS.keys()
    assert len({defect.path.rpartition("/")[0] for defect in one}) == 24


def test_the_test_of_a_file_reaches_it_first():
    happens_before = REPOSITORY / "lowmem_ft/virtual_gpu/races/happens_before.py"
    first, *others = Imports().tests_of([happens_before])
    assert first.name == "test_happens_before.py"
    assert REPOSITORY / "tests/invariants/test_no_races.py" in others
    assert REPOSITORY / "tests/data/test_data_loading.py" not in others
