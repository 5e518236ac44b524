"""When the Triton kernel updates, and what is said where it does not."""

import logging

import pytest
import torch
from torch import nn

from lowmem_ft.foundation import packages
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors import triton_use
from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.foundation.tensors.triton_use import Work, uses_kernel
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.optimizers.triton.triton_update import rule_in_kernel
from lowmem_ft.optimizers.updates.adamw import AdamW

GPU = torch.device("cuda", 0)
UPDATE = Work("update", "Weights are updated by many small kernels")
HYPERPARAMETERS = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def _ampere_with_triton(monkeypatch):
    monkeypatch.setattr(triton_use, "_works", {})
    monkeypatch.setattr(triton_use, "_told", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_use, "triton_lacks", lambda: None)
    monkeypatch.setattr(triton_use, "is_virtual", lambda device: False)
    monkeypatch.setattr(triton_use, "compute_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def trial_of(found):
    expected = torch.linspace(-1, 1, 1000)
    return lambda kernel: {"weight": expected if kernel == "eager" else found(expected)}


def test_it_is_taken_where_it_agrees_and_tried_once():
    kernels = []

    def trial(kernel):
        kernels.append(kernel)
        return trial_of(lambda expected: expected * (1 + 2**-20))(kernel)

    assert uses_kernel(UPDATE, "auto", GPU, "formats", trial)
    assert uses_kernel(UPDATE, "auto", GPU, "formats", trial)
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
            assert not uses_kernel(UPDATE, "auto", GPU, formats, trial_of(found))
    assert caplog.text.count("computes a different weight") == 1


def test_one_that_does_not_compile_is_told_once(caplog):
    def found(expected):
        raise RuntimeError("no C compiler\nand so on")

    with caplog.at_level(logging.WARNING):
        assert not uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(found))
    assert "RuntimeError: no C compiler)" in caplog.text
    with pytest.raises(UserError, match="no C compiler"):
        uses_kernel(UPDATE, "triton", GPU, "formats", trial_of(found))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "Triton"],
)
def test_memory_that_runs_out_in_the_trial_says_nothing_of_the_kernel(error):
    def found(expected):
        raise error

    with pytest.raises(RuntimeError, match="out of memory"):
        uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(found))
    assert uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(lambda expected: expected))


def test_a_trial_that_finds_no_room_for_the_kernel_is_made_again_with_what_the_allocator_has_cached(
    monkeypatch,
):
    """Inside the first update, which could not start over."""
    given_back = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))

    def found(expected):
        if not given_back:
            raise RuntimeError("Triton Error [CUDA]: out of memory")
        return expected

    assert uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(found))


def test_what_triton_lacks_is_told_with_the_way_to_get_it(monkeypatch, caplog):
    monkeypatch.setattr(triton_use, "triton_lacks", lambda: "Triton needs a C compiler.")
    with caplog.at_level(logging.WARNING):
        assert not uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(lambda expected: expected))
    assert "takes longer than one Triton kernel: Triton needs a C compiler." in caplog.text


def test_a_run_and_an_estimate_of_this_machine_agree_without_a_compiler(monkeypatch, caplog, cuda_driver):
    monkeypatch.setattr(triton_use, "triton_lacks", packages.triton_lacks)
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    cuda_driver()
    assert not this_machines_gpu().has_triton
    with caplog.at_level(logging.WARNING):
        assert not uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(lambda expected: expected))
    assert "`apt-get install gcc`" in caplog.text


def test_older_gpus_go_without(monkeypatch, caplog):
    monkeypatch.setattr(triton_use, "compute_capability", lambda device: (7, 5))
    with caplog.at_level(logging.WARNING):
        assert not uses_kernel(UPDATE, "auto", GPU, "formats", trial_of(lambda expected: expected))
    assert "has 7.5" in caplog.text


def test_a_cpu_updates_by_operations_without_a_word(caplog):
    cpu, trial = torch.device("cpu"), trial_of(lambda expected: expected)
    assert not uses_kernel(UPDATE, "auto", cpu, "formats", trial)
    assert not caplog.text
    with pytest.raises(UserError, match="needs an NVIDIA GPU, got cpu"):
        uses_kernel(UPDATE, "triton", cpu, "formats", trial)


def test_a_rule_derived_from_ours_is_not_mistaken_for_it():
    class Mine(AdamW):
        pass

    assert rule_in_kernel(AdamW(), 1, HYPERPARAMETERS) is not None
    assert rule_in_kernel(Mine(), 1, HYPERPARAMETERS) is None


def test_an_optimizer_that_demands_it_says_so(monkeypatch):
    monkeypatch.setattr(triton_use, "triton_lacks", lambda: "Triton is not installed.")
    parameter = nn.Parameter(torch.zeros(300))
    optimizer = ChunkedOptimizer([parameter], AdamW(), HYPERPARAMETERS)
    optimizer.kernel = "triton"
    with pytest.raises(UserError, match="Triton is not installed"):
        optimizer.update([GradientSlice(parameter, torch.ones(300))])
