"""Processes that each hold the whole model train what one does with the same rows a step: each technique."""

from __future__ import annotations

import pytest
from trained_by_processes import CASES as OF_ENGINES
from trained_by_processes import EXACT, assert_alike, trained

CASES = OF_ENGINES["ddp"]

BY_DEFAULT = ("offload.optimizer=host", "lora", "mixed_precision=bf16", "optimizer.master=split16")
"""The first three go through DDP; sums of bfloat16 gradients in float32 do not."""


@pytest.fixture(scope="module")
def by_default(forks, untied, tmp_path_factory):
    folder = tmp_path_factory.mktemp("default")
    return trained(forks, folder, untied, "ddp", (1, 3), BY_DEFAULT, steps=2, rows=6)


@pytest.fixture(scope="module")
def in_all(forks, untied, tmp_path_factory):
    return trained(forks, tmp_path_factory.mktemp("all"), untied, "ddp", (1, 2, 3, 4), CASES)


@pytest.mark.parametrize("name", BY_DEFAULT)
def test_three_processes_train_what_one_does(by_default, name):
    one, three = by_default[1][name], by_default[3][name]
    assert three["norm"][0] == pytest.approx(
        one["norm"][0], rel=EXACT["norm"]
    )  # losses times 3: 2e-4 in bfloat16
    assert_alike(one, three, CASES[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_each_technique_in_several_processes_trains_what_one_does(in_all, name, world):
    assert_alike(in_all[1][name], in_all[world][name], CASES[name][1])
