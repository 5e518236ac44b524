"""Processes that each hold the whole model train what one does with the same rows a step: each technique."""

from __future__ import annotations

import pytest
from trained_by_processes import CASES as OF_ENGINES
from trained_by_processes import EXACT, assert_alike, trained

CASES = OF_ENGINES["ddp"]

BY_DEFAULT = ("offload.optimizer=host", "lora", "optimizer.master=split16")

TRIPLED = {"loss": 5e-3, "norm": 0.5}
"""Each process takes its loss times their number, since the mean over them divides by it: in bfloat16 three times a
value is rounded otherwise than the value, two or four times as it is. The first step's norms were apart by 2e-4, and
after six steps with a learning rate of 0.01 losses by 2.6e-3 and a norm by 0.27; by 7e-5 and 6e-3 with four."""

TRIPLED_ONCE = 5e-4


@pytest.fixture(scope="module")
def by_default(forks, untied, tmp_path_factory):
    return trained(forks, tmp_path_factory.mktemp("default"), untied, "ddp", (1, 2), BY_DEFAULT)


@pytest.fixture(scope="module")
def in_all(forks, untied, tmp_path_factory):
    return trained(forks, tmp_path_factory.mktemp("all"), untied, "ddp", (1, 2, 3, 4), CASES)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_two_processes_train_what_one_does(by_default, name):
    assert_alike(by_default[1][name], by_default[2][name], CASES[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_each_technique_in_several_processes_trains_what_one_does(in_all, name, world):
    one, many, near = in_all[1][name], in_all[world][name], CASES[name][1]
    if world == 3 and near != EXACT:
        assert many["norm"][0] == pytest.approx(one["norm"][0], rel=TRIPLED_ONCE)
        near = TRIPLED
    assert_alike(one, many, near)
