"""Processes that share a model by FSDP2 train what one process does with the same rows a step: each technique."""

from __future__ import annotations

import pytest
from trained_by_processes import CASES as OF_ENGINES
from trained_by_processes import assert_alike, trained

CASES = OF_ENGINES["fsdp2"]

BY_DEFAULT = ("untied", "qlora", "optimizer.master=split16", "everything")
"""Those that differ most: ``everything`` is tied and updates in backward."""


@pytest.fixture(scope="module")
def by_default(forks, untied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("default")
    return trained(forks, folder, untied, "fsdp2", (1, 3), BY_DEFAULT, steps=2, rows=6)


@pytest.fixture(scope="module")
def in_all(forks, untied, tmp_path_factory):
    return trained(forks, tmp_path_factory.mktemp("all"), untied, "fsdp2", (1, 2, 3, 4), CASES)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_three_processes_train_what_one_does(by_default, name):
    assert_alike(by_default[1][name], by_default[3][name], CASES[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_trains_what_one_does(in_all, name, world):
    assert_alike(in_all[1][name], in_all[world][name], CASES[name][1])
