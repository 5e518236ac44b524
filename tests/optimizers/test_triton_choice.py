"""When the Triton kernel updates, and what is said where it does not."""

import logging

import pytest
import torch
from torch import nn

from lowmem_ft.errors import UserError
from lowmem_ft.gradient_slice import GradientSlice
from lowmem_ft.optimizers import ChunkedOptimizer, triton_choice
from lowmem_ft.optimizers.adamw import AdamW
from lowmem_ft.optimizers.triton_choice import uses_kernel
from lowmem_ft.optimizers.triton_update import rule_in_kernel

GPU = torch.device("cuda", 0)
HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _ampere_with_triton(monkeypatch):
    monkeypatch.setattr(triton_choice, "_works", {})
    monkeypatch.setattr(triton_choice, "_told", set())
    monkeypatch.setattr(triton_choice, "is_installed", lambda package: True)
    monkeypatch.setattr(triton_choice, "is_virtual", lambda device: False)
    monkeypatch.setattr(triton_choice, "compute_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def trial_of(found):
    expected = torch.linspace(-1, 1, 1000)
    return lambda kernel: {"weight": expected if kernel == "eager" else found(expected)}


def test_it_is_taken_where_it_agrees_and_tried_once():
    kernels = []

    def trial(kernel):
        kernels.append(kernel)
        return trial_of(lambda expected: expected * (1 + 2**-20))(kernel)

    assert uses_kernel("auto", GPU, "formats", trial)
    assert uses_kernel("auto", GPU, "formats", trial)
    assert kernels == ["eager", "untried"]


@pytest.mark.parametrize(
    "found",
    [
        lambda expected: expected * 1.01,
        lambda expected: expected.where(torch.arange(1000) != 500, torch.nan),
        lambda expected: expected.where(torch.arange(1000) != 900, 0.0),
    ],
)
def test_a_kernel_that_computes_something_else_is_not(found, caplog):
    with caplog.at_level(logging.WARNING):
        for formats in ("one", "other"):
            assert not uses_kernel("auto", GPU, formats, trial_of(found))
    assert caplog.text.count("computes another weight") == 1


def test_one_that_does_not_compile_is_told_once(caplog):
    def found(expected):
        raise RuntimeError("no C compiler\nand so on")

    with caplog.at_level(logging.WARNING):
        assert not uses_kernel("auto", GPU, "formats", trial_of(found))
    assert "RuntimeError: no C compiler)" in caplog.text
    with pytest.raises(UserError, match="no C compiler"):
        uses_kernel("triton", GPU, "formats", trial_of(found))


def test_without_triton_the_log_says_how_to_get_it(monkeypatch, caplog):
    monkeypatch.setattr(triton_choice, "is_installed", lambda package: False)
    with caplog.at_level(logging.WARNING):
        assert not uses_kernel("auto", GPU, "formats", trial_of(lambda expected: expected))
    assert "pip install triton" in caplog.text


def test_older_gpus_go_without(monkeypatch, caplog):
    monkeypatch.setattr(triton_choice, "compute_capability", lambda device: (7, 5))
    with caplog.at_level(logging.WARNING):
        assert not uses_kernel("auto", GPU, "formats", trial_of(lambda expected: expected))
    assert "has 7.5" in caplog.text


def test_a_cpu_updates_by_operations_without_a_word(caplog, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cpu, trial = torch.device("cpu"), trial_of(lambda expected: expected)
    assert not uses_kernel("auto", cpu, "formats", trial)
    assert not caplog.text
    with pytest.raises(UserError, match="needs an NVIDIA GPU, got cpu"):
        uses_kernel("triton", cpu, "formats", trial)


def test_a_rule_derived_from_ours_is_not_mistaken_for_it():
    class Mine(AdamW):
        pass

    assert rule_in_kernel(AdamW(), 1, HYPERPARAMETERS) is not None
    assert rule_in_kernel(Mine(), 1, HYPERPARAMETERS) is None


def test_an_optimizer_that_demands_it_says_so(monkeypatch):
    monkeypatch.setattr(triton_choice, "is_installed", lambda package: False)
    parameter = nn.Parameter(torch.zeros(300))
    optimizer = ChunkedOptimizer([parameter], AdamW(), HYPERPARAMETERS)
    optimizer.kernel = "triton"
    with pytest.raises(UserError, match="Triton is not installed"):
        optimizer.update([GradientSlice(parameter, torch.ones(300))])
