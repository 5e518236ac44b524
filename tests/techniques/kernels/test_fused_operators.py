"""Liger's operators in a model: transformers' gradients up to rounding, in every technique, and nothing left behind.

The kernels are transcriptions in torch (``tests/transcribed_liger.py``): what is tested is which operator a module
gets, with which settings, and what else holds or needs the tensors that it writes over.
"""

from __future__ import annotations

import copy
import logging
import sys
from unittest import mock

import pytest
import torch
from tiny_models import FAMILY_SIZES, model_of, tiny_llama
from torch.testing import assert_close
from transformers import AutoConfig, GPT2Config

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")

from transcribed_liger import LAUNCHES, TRANSCRIPTIONS, transcribed_kernels

from lowmem_ft.foundation.errors import MissingPackageError, ModelError, UserError
from lowmem_ft.foundation.host import HostMemory
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.kernels import fused_operators
from lowmem_ft.techniques.kernels.fused_operators import enable_fused_operators
from lowmem_ft.techniques.kernels.liger_patches import ARCHITECTURES
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp

CPU = torch.device("cpu")
IDS = torch.arange(24).view(2, 12) + 3
BY_ROUNDING = {"rtol": 2e-5, "atol": 1e-7}
"""Sums of float32 in another order, over 32 numbers and 24 tokens, through two layers."""

EXPERTS = ("mixtral", "qwen3_moe")
GEGLU = ("gemma", "gemma2", "gemma3_text")


@pytest.fixture(autouse=True)
def _transcribed():
    with transcribed_kernels():
        yield


def enable(model, kernels="liger", dtype=torch.float32):
    return enable_fused_operators(model, kernels, device=CPU, compute_dtype=dtype)


def family(architecture):
    """A model of an architecture whose norms are not all 1, as those of a new one are."""
    config = AutoConfig.for_model(architecture, **FAMILY_SIZES, head_dim=8, attn_implementation="eager")
    model = model_of(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def gradients_of(model):
    model.zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return {"loss": loss.detach()} | {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def names_of(model):
    """What its modules' classes come from, and what its modules have of their own."""
    modules = {type(part).__module__ for part in model.modules()}
    theirs = {name: dict(vars(sys.modules[name])) for name in modules}
    return theirs, [dict(vars(part)) for part in model.modules()]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_an_architectures_gradients_are_transformers_own_up_to_rounding(architecture):
    model = family(architecture)
    stock, names = gradients_of(model), names_of(model)
    fused = enable(model)
    expected = {"rms_norm", "rotary", "geglu" if architecture in GEGLU else "swiglu"}
    expected -= {"swiglu"} if architecture in EXPERTS else {"rotary"} if architecture == "glm4" else set()
    assert set(fused.operators) == expected
    assert names_of(model)[0] == names[0]  # other models of this process keep transformers' own
    found = gradients_of(model)
    assert stock.keys() == found.keys()
    assert any(not torch.equal(found[name], stock[name]) for name in stock)
    for name, value in stock.items():
        off = (found[name] - value).norm() / value.norm()
        assert off < 2e-5, name
    fused.remove()
    assert names_of(model) == names
    assert_close(gradients_of(model), stock, rtol=0, atol=0)


def test_a_model_keeps_what_its_norms_and_activations_get_and_no_more():
    kept = []
    for kernels in ("none", "liger"):
        model = tiny_llama()
        enable(model, kernels)
        saved: dict[int, int] = {}

        def note(tensor, saved=saved):
            if not isinstance(tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                saved[storage._cdata] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model.model(input_ids=IDS).last_hidden_state.sum()
        kept.append(sum(saved.values()))
        del loss
    stock, fused = kept
    tokens, hidden, inner, layers = IDS.numel(), 32, 48, 2
    # Each activation of a gate, and each norm's input divided by its root mean square: two in a layer, and the last.
    assert stock - fused == tokens * (layers * (inner + 2 * hidden) + hidden) * 4


def test_a_second_backward_pass_over_one_graph_is_refused_as_its_inputs_are_gone():
    model = tiny_llama()
    enable(model)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="wrote its gradients over its inputs"):
        loss.backward()


def norm_cases():
    for shape, weight in (((2, 12, 32), True), ((4096 * 8 + 8, 8), True), ((3, 300), True), ((3, 32), False)):
        for mode, offset, in_place in (("llama", 0.0, False), ("gemma", 1.0, True), ("none", 0.0, True)):
            yield shape, weight, (1e-6, offset, mode, in_place, None)


def launches_of(function, inputs, strided):
    """Return what a function launches, with which arguments, and its results and gradients."""
    launched = []

    def noting(name):
        def run(given, grid, computes=TRANSCRIPTIONS[name]):
            seen = {
                key: (value.shape, value.stride(), value.dtype) if isinstance(value, torch.Tensor) else value
                for key, value in given.items()
            }
            launched.append((name, grid, seen))
            computes(given, grid)

        return run

    leaves = [one.detach().clone().requires_grad_(one.requires_grad) for one in inputs]
    with mock.patch.dict(TRANSCRIPTIONS, {name: noting(name) for name in TRANSCRIPTIONS}):
        outputs = function(*(leaf * 1 if leaf.dim() > 1 else leaf for leaf in leaves))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        d_outputs = [torch.linspace(-1, 1, one.numel()).reshape(one.shape).to(one.dtype) for one in outputs]
        if strided:
            d_outputs = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in d_outputs]
        torch.autograd.backward(outputs, d_outputs)
    return launched, [one.detach() for one in outputs], [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_our_functions_launch_what_ligers_do_and_return_the_same_bits(dtype, strided):
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

    from lowmem_ft.techniques.kernels import liger_functions as ours

    torch.manual_seed(0)

    def drawn(*shape, trained=True):
        return torch.randn(*shape).to(dtype).requires_grad_(trained)

    cases = [
        (
            lambda x, w, settings=settings: ours._Norm.apply(x, w, *settings),
            lambda x, w, settings=settings: LigerRMSNormFunction.apply(x, w, *settings),
            [drawn(*shape), drawn(shape[-1], trained=trained)],
        )
        for shape, trained, settings in norm_cases()
    ]
    cases.append((ours.SwiGLU.apply, LigerSiLUMulFunction.apply, [drawn(2, 5, 40), drawn(2, 5, 40)]))
    for rows, width in ((1, 8), (2, 4)):  # of angles; a part of each head is turned
        angles = torch.randn(rows, 6, width)

        def turns(turn, angles=angles):
            return lambda q, k: turn(q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin())

        heads = [drawn(2, 6, 3, 8), drawn(2, 6, 2, 8)]
        cases.append((turns(ours.rotary), turns(LigerRopeFunction.apply), heads))
    for own, ligers, inputs in cases:
        (launched, *values), (expected, *their_values) = (
            launches_of(function, inputs, strided) for function in (own, ligers)
        )
        assert launched == expected
        assert_close(values, their_values, rtol=0, atol=0, equal_nan=True)


def test_another_release_has_ligers_own_functions_and_says_so(monkeypatch, caplog):
    from lowmem_ft.techniques.kernels import liger_functions

    model = tiny_llama()
    handle = enable(model)
    ours = gradients_of(model)
    handle.remove()
    monkeypatch.setattr(liger_functions, "VERSION", "0.8.4")
    caplog.set_level(logging.INFO)
    enable(model)
    assert "Liger's own functions launch them" in caplog.text
    assert_close(gradients_of(model), ours, rtol=0, atol=0)


def checkpointed(mode):
    return lambda model: [enable_checkpointing(model, CheckpointingConfig(mode=mode))]


def offloaded(model):
    return [enable_activation_offload(model, OffloadConfig(activations="all"), HostMemory(CPU))]


def tiled(model):
    return [enable_tiled_mlp(model, TilingConfig(mlp=3))]


def tiled_and_checkpointed(model):
    return [*tiled(model), *checkpointed("full")(model)]


@pytest.mark.parametrize(
    "switch_on", [checkpointed("full"), checkpointed("selective"), offloaded, tiled, tiled_and_checkpointed]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_technique_that_computes_again_or_elsewhere_gets_the_same_bits(switch_on, dtype):
    config = AutoConfig.for_model("qwen3", **FAMILY_SIZES, head_dim=8, attn_implementation="sdpa")
    model = model_of(config, dtype=dtype)
    enable(model, dtype=dtype)
    plain = gradients_of(model)
    for technique in switch_on(model):
        assert technique
    tolerance = {"rtol": 0, "atol": 0}
    if switch_on in (tiled, tiled_and_checkpointed):  # sums over tokens in another order
        tolerance = BY_ROUNDING if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-4}
    assert_close(gradients_of(model), plain, **tolerance)


def test_adapters_fused_with_their_layers_get_the_same_gradients():
    pytest.importorskip("peft")
    config = AdapterConfig(name="lora", r=4)
    found = []
    for kernels in ("none", "liger"):
        model = tiny_llama(num_key_value_heads=2)
        torch.manual_seed(1)
        adapter = enable_lora(model, config)
        for name, parameter in adapter.parameters().items():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        enable(model, kernels)
        enable_fused_adapters(model, config)
        found.append(gradients_of(model))
    assert_close(found[1], found[0], **BY_ROUNDING)


def test_an_activation_that_is_not_ligers_is_found_in_the_trial(caplog):
    model = tiny_llama(hidden_act="gelu")
    stock = gradients_of(copy.deepcopy(model))
    with pytest.raises(UserError, match=r"model\.kernels=liger cannot take swiglu on cpu: .* LlamaMLP of"):
        enable(model)
    assert enable(model, "auto").operators == ("rms_norm", "rotary")
    assert "transformers' own swiglu" in caplog.text
    assert_close(gradients_of(model), stock, **BY_ROUNDING)


@pytest.mark.parametrize(
    "kernel,operator",
    [
        ("_rms_norm_backward_kernel", "rms_norm"),
        ("_block_rms_norm_backward_kernel", "rms_norm"),
        ("_triton_rope", "rotary"),
    ],
)
def test_a_kernel_that_computes_something_else_is_not_taken(kernel, operator, monkeypatch, caplog):
    computes = TRANSCRIPTIONS[kernel]

    def wrongly(given, grid):
        computes(given, grid)
        next(value for name, value in given.items() if name in ("dX_ptr", "k_ptr"))[0] *= 1.5

    monkeypatch.setitem(TRANSCRIPTIONS, kernel, wrongly)
    assert operator not in enable(tiny_llama(), "auto").operators
    assert "computes" in caplog.text


def test_a_kernel_that_does_not_run_is_not_taken(monkeypatch, caplog):
    def fails(given, grid):
        raise RuntimeError("no compiler")

    monkeypatch.setitem(TRANSCRIPTIONS, "_swiglu_forward_kernel", fails)
    assert enable(tiny_llama(), "auto").operators == ("rms_norm", "rotary")
    assert "its kernel does not run here (RuntimeError: no compiler)" in caplog.text


def test_memory_that_runs_out_in_the_trial_says_nothing_about_a_kernel(monkeypatch):
    def fails(given, grid):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setitem(TRANSCRIPTIONS, "_swiglu_forward_kernel", fails)
    with pytest.raises(torch.OutOfMemoryError):
        enable(tiny_llama(), "auto")


def test_a_module_that_is_called_with_tensors_of_the_host_has_its_own_forward(monkeypatch):
    """Weights that are to be streamed are there when a technique tries a module out."""
    model = tiny_llama()
    x = torch.randn(2, 3, 32)
    stock = model.model.layers[0].mlp(x)
    monkeypatch.setattr(fused_operators, "_lacks", lambda device: None)
    monkeypatch.setattr(fused_operators, "disagreements", lambda *args: {})
    enable_fused_operators(model, "liger", device=torch.device("meta"), compute_dtype=torch.float32)
    LAUNCHES.clear()
    assert torch.equal(model.model.layers[0].mlp(x), stock)
    assert torch.equal(model.model.layers[0].mlp(x=x), stock)
    assert not LAUNCHES


def test_the_trial_leaves_random_numbers_and_the_model_as_they_are():
    model = tiny_llama()
    torch.manual_seed(3)
    before, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    enable(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(model.state_dict(), weights, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_processor_has_transformers_own_and_says_so_once(monkeypatch, caplog):
    monkeypatch.delenv("TRITON_INTERPRET")
    caplog.set_level(logging.INFO)
    assert enable(tiny_llama(), "auto").operators == ()
    assert [record.message for record in caplog.records] == [
        "Kernels: transformers' own; Liger's need an NVIDIA GPU, got cpu."
    ]
    with pytest.raises(
        UserError, match=r"model\.kernels=liger needs an NVIDIA GPU, got cpu\. Set model\.kernels="
    ):
        enable(tiny_llama())


def test_an_architecture_without_them_has_transformers_own(caplog):
    model = model_of(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=64, bos_token_id=1, eos_token_id=2)
    )
    caplog.set_level(logging.INFO)
    assert enable(model, "auto").operators == ()
    assert len(caplog.records) == 1
    with pytest.raises(ModelError, match=r"one of the architectures .*, got gpt2 \(GPT2LMHeadModel\)\. Set"):
        enable(model)


def test_a_missing_package_is_named_with_its_extra(monkeypatch, caplog):
    import lowmem_ft.foundation.packages as packages

    for module in (packages, fused_operators):
        monkeypatch.setattr(module, "is_installed", lambda package: False)
    caplog.set_level(logging.INFO)
    assert enable(tiny_llama(), "auto").operators == ()
    assert "Liger's need the package liger-kernel, which is not installed" in caplog.text
    with pytest.raises(MissingPackageError, match=r"pip install 'lowmem-ft\[liger\]'"):
        enable(tiny_llama())


def test_a_release_that_rotates_otherwise_is_not_taken(monkeypatch, caplog):
    monkeypatch.setattr(fused_operators, "installed_version", lambda package: "0.8.4")
    caplog.set_level(logging.INFO)
    assert enable(tiny_llama(), "auto").operators == ()
    with pytest.raises(UserError, match=r"liger-kernel 0\.8\.5 or newer, got 0\.8\.4"):
        enable(tiny_llama())


def test_what_was_chosen_is_said_with_its_version():
    assert enable(tiny_llama(), "none").kernels() == {}
    (said,) = enable(tiny_llama()).kernels().values()
    assert said.startswith("liger-kernel 0.8")
    assert said.endswith(": rms_norm, rotary, swiglu")
