"""A layer and its adapter as one operation: PEFT's numbers, with less saved and nothing of full size in between."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from tiny_models import tiny_llama

pytest.importorskip("peft")

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.adapters.peft_layers import adapted_layers
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp

LAYERS, HIDDEN, RANK, TOKENS = 2, 32, 4, 40
IDS = torch.arange(TOKENS).view(2, 20)


def lora(**options):
    return AdapterConfig(name="lora", r=RANK, **options)


def adapted(dtype=torch.float32, *, quantized=False, **options):
    """A model whose adapters change its outputs, the same each time."""
    model = tiny_llama(dtype, num_key_value_heads=2)
    if quantized:
        with_4_bits(model)
    torch.manual_seed(1)
    adapter = enable_lora(model, lora(**options))
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model, adapter


def with_4_bits(model):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model.is_loaded_in_4bit = True
    for layer in model.model.layers:
        for name, linear in [(n, m) for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)]:
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=False,
                compute_dtype=linear.weight.dtype,
                quant_type="nf4",
            )
            packed.weight = bitsandbytes.nn.Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", module=packed
            )
            packed.support_avx512bf16_for_cpu = False  # else an evaluation packs them otherwise for good
            layer.set_submodule(name, packed.to("cpu"))


def autocast(on):
    return torch.autocast("cpu", torch.bfloat16) if on else contextlib.nullcontext()


def loss_and_gradients(model, adapter, *, with_autocast=False):
    torch.manual_seed(2)
    with autocast(with_autocast):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in adapter.parameters().items()}


def assert_same(ours, theirs, tolerance):
    """Relative to each tensor's length."""
    for name, expected in theirs.items():
        assert expected.norm() > 0, name
        assert ours[name].dtype == expected.dtype
        error = (ours[name].float() - expected.float()).norm() / expected.float().norm()
        assert error < tolerance, (name, error)


TYPES = pytest.mark.parametrize(
    "dtype, with_autocast",
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)],
)


@TYPES
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("quantized", [False, True])
def test_a_layers_output_and_gradients_are_pefts(dtype, with_autocast, dropout, quantized):
    results = []
    for kernel in ("fused", "peft"):
        model, _ = adapted(dtype, quantized=quantized, lora_dropout=dropout, lora_alpha=10.0)
        enable_fused_adapters(model, lora(kernel=kernel))
        layer = model.model.layers[0].mlp.down_proj
        torch.manual_seed(3)
        x = torch.randn(1, 1100, layer.in_features).to(dtype).requires_grad_()  # more than are cast at once
        d_output = torch.randn(1, 1100, layer.out_features)
        with autocast(with_autocast):
            output = layer(x)
        output.backward(d_output.to(output.dtype))
        weights = {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
        results.append({"output": output, "input": x.grad, **weights})
    # Scaled inside their products, gradients are rounded once less than PEFT's.
    assert_same(results[0], results[1], 6 * torch.finfo(torch.bfloat16 if with_autocast else dtype).eps)


@pytest.mark.parametrize("around", ["nothing", "full", "selective", "tiles"])
@pytest.mark.parametrize(
    "dtype, quantized, tolerance",
    [(torch.float32, False, 1e-5), (torch.float32, True, 1e-5), (torch.bfloat16, False, 0.1)],
)
def test_losses_and_gradients_are_pefts(dtype, quantized, tolerance, around):
    """With dropout; inside tiles it draws other numbers than without: there both sides have tiles."""
    results = []
    for kernel in ("fused", "peft"):
        model, adapter = adapted(dtype, quantized=quantized, lora_dropout=0.3)
        enable_fused_adapters(model, lora(kernel=kernel))
        if around == "tiles":
            enable_tiled_mlp(model, TilingConfig(mlp=3))
        elif around != "nothing" and kernel == "fused":
            enable_checkpointing(model, CheckpointingConfig(mode=around))
        loss, gradients = loss_and_gradients(model, adapter, with_autocast=dtype == torch.bfloat16)
        results.append({"loss": loss, **gradients})
    assert_same(results[0], results[1], tolerance)


def test_a_layer_saves_its_input_alone_and_makes_nothing_of_the_outputs_size():
    """With dropout and autocast too, where PEFT keeps the input's copy and mask and three more outputs exist."""
    model, _ = adapted(torch.bfloat16, lora_dropout=0.3)
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 20, layer.in_features).bfloat16().requires_grad_()
    output_bytes = 2 * 20 * layer.out_features * 2

    def bytes_of_a_call():
        with autocast(True), StorageTracker() as tracker:
            output = layer(x)
            live_bytes = tracker.live_bytes
        del output
        return live_bytes

    theirs = bytes_of_a_call()
    with enable_fused_adapters(model, lora()):
        assert bytes_of_a_call() == output_bytes
    assert bytes_of_a_call() == theirs > output_bytes + x.nbytes + x.numel()


def test_the_output_is_the_only_tensor_of_its_size():
    model, _ = adapted()
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(2, 200, layer.in_features, requires_grad=True)
    output_bytes = 2 * 200 * layer.out_features * 4
    with enable_fused_adapters(model, lora()), StorageTracker() as tracker:
        layer(x)
    assert tracker.peak_bytes == output_bytes + 2 * 200 * RANK * 4


def test_recomputation_stops_before_the_last_layer():
    """The last of a decoder layer's products is not computed again."""
    model, adapter = adapted()
    enable_fused_adapters(model, lora())
    enable_checkpointing(model, CheckpointingConfig(mode="full"))
    calls = {"down_proj": 0, "up_proj": 0}
    for name in calls:
        linear = getattr(model.model.layers[0].mlp, name).base_layer
        linear.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    loss_and_gradients(model, adapter)
    assert calls == {"down_proj": 1, "up_proj": 2}


@TYPES
def test_scaled_inside_products_gradients_are_those_of_scaled_factors(dtype, with_autocast):
    """Bit for bit where the scaling is a power of 2, which rounds nothing."""
    model, _ = adapted(dtype, lora_alpha=2.0 * RANK)
    enable_fused_adapters(model, lora())
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(TOKENS, layer.in_features).to(dtype).requires_grad_()
    with autocast(with_autocast):
        output = layer(x)
    output.backward(d_output := torch.randn_like(output))
    weights = [layer.lora_A.default.weight, layer.lora_B.default.weight]
    compute = torch.bfloat16 if with_autocast else torch.float32
    a_RI, b_OR = (weight.detach().to(compute) for weight in weights)
    d_NO, x_NI = d_output.to(compute), x.detach().to(compute)
    d_inner_NR = d_NO @ b_OR * 2
    assert torch.equal(weights[0].grad, (d_inner_NR.t() @ x_NI).to(weights[0].dtype))
    assert torch.equal(weights[1].grad, (d_NO.t() @ (x_NI @ a_RI.t() * 2)).to(weights[1].dtype))
    if compute == dtype:  # else a sum of two types
        through_base = d_NO @ layer.base_layer.weight.to(compute)
        assert torch.equal(x.grad, through_base.addmm_(d_inner_NR, a_RI).to(dtype))


@pytest.mark.parametrize("in_hooks", [False, True])
def test_a_layer_is_one_node_of_autograd_and_the_last_of_a_decoder_layer_two_inside_hooks(in_hooks):
    model, _ = adapted()
    enable_fused_adapters(model, lora())
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    for name, nodes in (("up_proj", 1), ("down_proj", 1 + in_hooks)):
        layer = getattr(model.model.layers[0].mlp, name)
        with hooks if in_hooks else contextlib.nullcontext():
            node, found = layer(torch.randn(3, layer.in_features)).grad_fn, 0
        while node is not None and "Accumulate" not in node.name():
            node, found = node.next_functions[0][0], found + 1
        assert found == nodes


@pytest.mark.parametrize("kernel", ["fused", "peft"])
def test_there_is_no_second_derivative_of_the_fused(kernel):
    model, _ = adapted()
    enable_fused_adapters(model, lora(kernel=kernel))
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(3, layer.in_features, requires_grad=True)
    (d_x,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    expected = pytest.raises(RuntimeError, match="differentiate twice a function")
    with expected if kernel == "fused" else contextlib.nullcontext():
        d_x.sum().backward()


def test_4_bits_are_unpacked_once_a_pass(monkeypatch):
    functional = pytest.importorskip("bitsandbytes.functional")
    model, _ = adapted(quantized=True)
    enable_fused_adapters(model, lora())
    unpacked = []
    dequantize = functional.dequantize_4bit
    monkeypatch.setattr(functional, "dequantize_4bit", lambda *a: unpacked.append(1) or dequantize(*a))
    layer = model.model.layers[0].mlp.up_proj
    layer(torch.randn(3, layer.in_features, requires_grad=True)).sum().backward()
    assert len(unpacked) == 1
    layer(torch.randn(3, layer.in_features)).sum().backward()  # the first layer's input needs no gradient
    assert len(unpacked) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_is_training_without_dropout(dtype):
    model, _ = adapted(dtype)
    enable_fused_adapters(model, lora())
    trained = model(input_ids=IDS).logits
    with torch.no_grad():
        assert torch.equal(model.eval()(input_ids=IDS).logits, trained)


def test_remove_gives_pefts_forward_back_and_peft_takes_its_layers_off():
    model, adapter = adapted()
    stock = model(input_ids=IDS).logits
    attributes = [set(vars(module)) for module in model.modules()]
    fused = enable_fused_adapters(model, lora())
    assert all("forward" in vars(layer) for layer in adapted_layers(model).values())
    fused.remove()
    assert torch.equal(model(input_ids=IDS).logits, stock)
    assert [set(vars(module)) for module in model.modules()] == attributes
    adapter.remove()
    assert not adapted_layers(model)


def test_what_peft_does_otherwise_it_does_itself_and_that_is_said_once(caplog):
    model, adapter = adapted()
    with torch.no_grad():
        with adapter.peft_model.disable_adapter():
            base = model(input_ids=IDS).logits
        both = model(input_ids=IDS).logits
        with caplog.at_level(logging.INFO):
            enable_fused_adapters(model, lora())
            with adapter.peft_model.disable_adapter():
                assert torch.equal(model(input_ids=IDS).logits, base)
            adapter.peft_model.merge_adapter()
            torch.testing.assert_close(model(input_ids=IDS).logits, both)
    assert f"{7 * LAYERS} linear layers and their adapters are one operation each." in caplog.text
    assert caplog.text.count("a layer with disabled adapters") == 1
    assert caplog.text.count("a layer with merged adapters") == 1


def test_dora_stays_pefts(caplog):
    model, adapter = adapted(use_dora=True)
    expected = loss_and_gradients(model, adapter)[0]
    with caplog.at_level(logging.INFO):
        enable_fused_adapters(model, lora(use_dora=True))
    assert torch.equal(loss_and_gradients(model, adapter)[0], expected)
    assert (
        f"0 linear layers and their adapters are one operation each; {7 * LAYERS} of another" in caplog.text
    )


@pytest.mark.parametrize("name", ["up_proj", "down_proj"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_output_can_be_changed_in_place(has_bias, name):
    """As layers of Falcon's kind do."""
    model, _ = adapted()
    layer = getattr(model.model.layers[0].mlp, name)
    if has_bias:
        layer.base_layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features), requires_grad=False)
    x = torch.randn(2, 3, layer.in_features)
    expected = layer(x).detach() + 1
    enable_fused_adapters(model, lora())
    output = layer(x)
    output += 1
    torch.testing.assert_close(output.detach(), expected)
    output.sum().backward()
