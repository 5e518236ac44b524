"""``training.full_determinism`` reaches every library that chooses a kernel, and ends with the run."""

from __future__ import annotations

import os

import pytest
import torch
from transformers import modeling_flash_attention_utils as flash_attention

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run import loop
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.step.deterministic_kernels import deterministic_kernels

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False):
    """The signature of flash-attn's, which transformers reads."""


def settings():
    """What torch, cuBLAS and, by transformers' own code, flash-attn are told."""
    process = flash_attention._lazy_define_process_function(flash_attn_func)
    told = process(query_length=8, key_length=8, is_causal=True)["deterministic"]
    return torch.are_deterministic_algorithms_enabled(), os.environ.get(VARIABLES[0]), told


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_a_run_is_told_and_the_process_after_it_is_not(tiny, monkeypatch):
    seen = []

    def step(retries, window):
        seen.append(settings())
        raise torch.OutOfMemoryError("the run ends here")

    monkeypatch.setattr(loop.Retries, "train_step", step)
    for overrides in (("training.full_determinism=true",), ()):
        with pytest.raises(Exception, match="memory ran out"):
            train(tiny(*overrides, "training.overwrite_output_dir=true"))
    assert seen == [(True, ":4096:8", True), (False, None, False)]
    assert settings() == (False, None, False)


def test_cublas_that_was_told_otherwise_in_this_process_is_explained(monkeypatch):
    """torch keeps what it has read at the first product; this is its own error, of ATen's Context.cpp."""
    refusal = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses "
        "CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment "
        "variable before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or "
        "CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    explained = r"computed with CUBLAS_WORKSPACE_CONFIG=unset\. Train in a separate process"
    with pytest.raises(UserError, match=explained), deterministic_kernels():
        raise RuntimeError(refusal)
    with pytest.raises(RuntimeError, match="another"), deterministic_kernels():
        raise RuntimeError("another")
    assert settings() == (False, None, False)


def test_what_the_user_has_chosen_stays(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_kernels():
            assert settings() == (True, ":16:8", True)
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert settings() == (True, ":16:8", False)
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_estimate_has_the_buffers_of_deterministic_kernels():
    """cuBLAS' workspaces, for one: 32 MiB in place of 8.1 on an Ada."""

    def workspace_bytes(*overrides):
        return estimate_memory(load_recipe("tiny", overrides), "l4").by_category_at_peak["workspace"]

    plain = workspace_bytes()
    assert workspace_bytes("training.full_determinism=true") > plain + 20 * 2**20
    assert settings() == (False, None, False)
