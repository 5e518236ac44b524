"""Models with a recurrent state take the kernels of packages on a virtual GPU, whatever is installed here."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
import torch
from tiny_models import model_of
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.packages import KERNEL_PACKAGES, LEFT_OUT_VARIABLE
from lowmem_ft.foundation.upstream.patches import UpstreamChangedError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

TOKENS = 96
FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "causal_conv1d_update")
OURS = {
    "short convolutions: kernels of causal-conv1d, which has to be installed where the run is",
    "gated delta rule: kernels of flash-linear-attention, which has to be installed where the run is",
}
REFERENCE = {
    "short convolutions: transformers' reference, as without causal-conv1d",
    "gated delta rule: transformers' reference, as without flash-linear-attention",
}


def tiny_hybrid():
    """Three layers with the gated delta rule and one with attention, on the meta device."""
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )
    with torch.device("meta"):
        return model_of(config, dtype=torch.bfloat16)


def step(machine, rows=2, *, checkpointed=False):
    """Trace forward and backward: peak bytes, and the names of the kernels."""
    with machine:
        model = machine.place(tiny_hybrid())
        if checkpointed:
            model.gradient_checkpointing_enable()
        ids = torch.ones(rows, TOKENS, dtype=torch.long, device=machine.device)
        model(input_ids=ids, labels=ids).loss.backward()
        return machine.recorder.peak_bytes, [one.name for one in machine.work.entries]


def said(machine):
    return {choice for choice in machine.choices if choice in OURS | REFERENCE}


def test_a_hybrid_takes_the_kernels_and_the_answer_says_so():
    gpu = VirtualGPU("a100-80gb")
    _, names = step(gpu)
    assert said(gpu) == OURS
    assert names.count("causal_conv1d_fwd") == names.count("causal_conv1d_bwd") == 3
    assert names.count("chunk_fwd_kernel_o") == names.count("chunk_bwd_kernel_dqkwg") == 3
    assert "linalg_solve_triangular" not in names


def test_a_checkpointed_layer_runs_them_again_in_backward():
    _, names = step(VirtualGPU("a100-80gb"), checkpointed=True)
    assert names.count("causal_conv1d_fwd") == 6
    assert names.count("chunk_bwd_kernel_dqkwg") == 3


def cells_of(name):
    function = getattr(modeling_qwen3_5, name)
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))


def test_a_package_that_is_installed_here_is_not_asked(monkeypatch):
    def installed(*args, **kwargs):
        raise AssertionError("a kernel without a GPU")

    for name in FUNCTIONS:
        cells = cells_of(name)
        monkeypatch.setattr(cells["implementation"], "cell_contents", installed)
        monkeypatch.setattr(cells["is_new_implementation"], "cell_contents", True)
    _, names = step(VirtualGPU("a100-80gb"))
    assert names.count("chunk_fwd_kernel_o") == 3
    with pytest.raises(AssertionError, match="without a GPU"):
        step(TracingMachine())


def test_a_decorator_that_decides_otherwise_is_an_error_and_no_silent_reference(monkeypatch):
    module: Any = types.ModuleType("transformers.models.new.modeling_new")
    module.use_kernel_func_from_hub_with_fallback = None
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(UpstreamChangedError, match="applicable_params"), VirtualGPU("a100-80gb"):
        pass


def test_after_the_block_and_on_a_machine_without_gpu_models_call_what_they_did():
    def found():
        return [{key: cell.cell_contents for key, cell in cells_of(name).items()} for name in FUNCTIONS]

    before = found()
    with TracingMachine():
        assert found() == before
    with VirtualGPU("a100-80gb"):
        assert found() != before
    assert found() == before


@pytest.mark.parametrize("lacks", [{"causal-conv1d"}, {"flash-linear-attention"}])
def test_a_machine_without_the_packages_takes_the_reference(lacks):
    gpu = VirtualGPU(dataclasses.replace(find_gpu("a100-80gb"), lacks=frozenset(lacks)))
    _, names = step(gpu)
    assert said(gpu) == {
        *(choice for choice in OURS if not any(one in choice for one in lacks)),
        *(choice for choice in REFERENCE if any(one in choice for one in lacks)),
    }
    assert ("linalg_solve_triangular" in names) == ("flash-linear-attention" in lacks)


def packed_step(gpu):
    """Trace a forward over two documents end to end, told apart as transformers' collator tells them apart."""
    with gpu:
        model = gpu.place(tiny_hybrid())
        ids = torch.ones(1, TOKENS, dtype=torch.long, device=gpu.device)
        offsets = torch.tensor([0, 30, TOKENS], dtype=torch.int32, device=gpu.device)
        numbers = torch.zeros(1, TOKENS, dtype=torch.int32, device=gpu.device)
        places = torch.cat([torch.arange(30), torch.arange(TOKENS - 30)])[None].to(gpu.device)
        model(
            input_ids=ids,
            position_ids=places,
            cu_seq_lens_q=offsets,
            cu_seq_lens_k=offsets,
            max_length_q=TOKENS - 30,
            max_length_k=TOKENS - 30,
            seq_idx=numbers,
            use_cache=False,
        ).logits.sum().backward()
        return {entry.name: entry.num_bytes for entry in gpu.work.entries if entry.kind == "kernel"}


def test_packed_documents_keep_their_states_apart_and_need_the_packages():
    moved = packed_step(VirtualGPU("a100-80gb"))
    chunks, states = 1 + 2, 4 * 16 * 16 * 2  # of 30 and 66 tokens; 4 heads
    _, whole = step_kernels(VirtualGPU("a100-80gb"))
    name = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
    assert moved[name] - whole[name] == pytest.approx((chunks - 2) * states, abs=128)  # and offsets
    lacking = dataclasses.replace(find_gpu("a100-80gb"), lacks=frozenset(KERNEL_PACKAGES))
    with pytest.raises(ValueError, match="can't keep packed sequences apart without"):
        packed_step(VirtualGPU(lacking))


def step_kernels(gpu):
    """Trace a step of one row: peak bytes, and the bytes that each kernel moves."""
    peak, _ = step(gpu, rows=1)
    return peak, {entry.name: entry.num_bytes for entry in gpu.work.entries if entry.kind == "kernel"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gpu_name", ["t4", "h100-80gb"])
def test_frozen_models_under_autocast_and_padding_take_them_too(dtype, gpu_name):
    with VirtualGPU(gpu_name) as gpu:
        model = gpu.place(tiny_hybrid()).requires_grad_(False)
        model.enable_input_require_grads()
        ids = torch.ones(2, TOKENS, dtype=torch.long, device=gpu.device)
        mask = torch.ones(2, TOKENS, dtype=torch.long, device=gpu.device)
        mask[1, 50:] = 0
        with torch.autocast("cuda", dtype=dtype):
            model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        products = {one.dtype for one in gpu.work.entries if one.name == "chunk_fwd_kernel_o"}
    assert products == {str(dtype).removeprefix("torch.")}
    assert said(gpu) == OURS


def test_packages_can_be_left_out(monkeypatch):
    monkeypatch.setenv(LEFT_OUT_VARIABLE, "1")
    left_out = VirtualGPU("a100-80gb")
    found = step(left_out)
    assert said(left_out) == REFERENCE
    monkeypatch.setenv(LEFT_OUT_VARIABLE, "0")
    lacking = dataclasses.replace(find_gpu("a100-80gb"), lacks=frozenset(KERNEL_PACKAGES))
    assert step(VirtualGPU(lacking)) == found


def test_a_modeling_file_that_is_imported_within_the_block_is_adapted(forks):
    program = """
import sys
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
name = "transformers.models.lfm2.modeling_lfm2"
def is_ours(function):
    cells = dict(zip(function.__code__.co_freevars, function.__closure__))
    return cells["implementation"].cell_contents.__module__.startswith("lowmem_ft")
with VirtualGPU("a100-80gb"):
    assert name not in sys.modules
    from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn
    print(is_ours(causal_conv1d_fn))
print(is_ours(causal_conv1d_fn))
"""
    assert forks.run(program).stdout.split() == ["True", "False"]
