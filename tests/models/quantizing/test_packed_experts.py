"""Fused experts in 4 and 8 bits: the bytes of bitsandbytes, the products of transformers, from files and at random."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, Llama4TextConfig, Qwen3MoeConfig

pytest.importorskip("bitsandbytes")

import bitsandbytes
from safetensors.torch import load_file, save_file

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.tensors.logical_size import is_packed
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.checkpoint_files import LazyWeight
from lowmem_ft.models.files.shard_files import MODEL, CutTensor, Part, ShardWriter
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.quantizing import int8_experts, packed_experts
from lowmem_ft.models.quantizing.nf4_experts import unpack
from lowmem_ft.models.quantizing.packed_experts import PackedExperts, fused_experts

NUM_EXPERTS, HIDDEN = 5, 64
SIZES = {
    "vocab_size": 96,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
FAMILIES = {
    "qwen3_moe": lambda number: Qwen3MoeConfig(**SIZES, num_experts=number, moe_intermediate_size=64),
    # in files of one tensor for all experts, with biases, stored the other way round
    "gpt_oss": lambda number: GptOssConfig(**SIZES, num_local_experts=number),
}
CONFIGS = {family: config_of(NUM_EXPERTS) for family, config_of in FAMILIES.items()}


def model_of(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family])
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(parameter)
    return model


def pack(values, kind, *, is_transposed=False):
    """Pack a tensor in one piece."""
    module = SimpleNamespace(is_transposed=is_transposed)
    return packed_experts.pack(module, values.__getitem__, values.shape, kind)


@pytest.mark.parametrize("shape", [(5, 128, 64), (3, 24, 64 * 11)], ids=["even", "scales that fill no block"])
def test_each_expert_has_the_bytes_of_a_layer_of_its_own(shape):
    values = torch.randn(shape)
    packed = pack(values, "nf4")
    assert isinstance(packed, bitsandbytes.nn.Params4bit)
    assert packed.nbytes == values.numel() // 2
    for index, expert in enumerate(values):
        alone = bitsandbytes.nn.Params4bit(
            expert, requires_grad=False, quant_type="nf4", compress_statistics=True
        ).to("cpu")
        assert torch.equal(packed.view(len(values), -1)[index], alone.flatten())
        whole = bitsandbytes.functional.dequantize_4bit(alone.data, alone.quant_state)
        found = unpack(packed.data, packed.quant_state, slice(index, index + 1), torch.float32)
        assert torch.equal(found[0], whole)
    some = unpack(packed.data, packed.quant_state, slice(1, 3), torch.float32)
    assert some.shape == (2, *shape[1:])
    assert (some - values[1:3]).abs().mean() < 0.1 * values.abs().mean()


@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
def test_each_expert_has_the_rows_and_the_gradients_of_an_8_bit_layer_of_its_own(is_transposed):
    values, rows = torch.randn(3, 24, 40), torch.randn(7, 40)
    packed = pack(values.transpose(1, 2) if is_transposed else values, "int8", is_transposed=is_transposed)
    assert packed.nbytes == values.numel()
    weights = int8_experts.unpack(packed.data, packed.row_scales, slice(0, 3), torch.float32)
    for index, expert in enumerate(values):
        layer = bitsandbytes.nn.Linear8bitLt(40, 24, bias=False, has_fp16_weights=False, threshold=0.0)
        layer.weight = bitsandbytes.nn.Int8Params(expert, requires_grad=False, has_fp16_weights=False)
        layer = layer.to("cpu")
        inputs = rows.clone().requires_grad_()
        product = layer(inputs)
        product.sum().backward()
        own = packed[index].T if is_transposed else packed[index]
        assert torch.equal(own, layer.state.CB if layer.state.CB is not None else layer.weight.CB)
        weight = weights[index].T if is_transposed else weights[index]
        torch.testing.assert_close(inputs.grad, torch.ones(7, 24) @ weight, rtol=1e-3, atol=1e-2)
        error = (product - rows @ weight.T).abs().mean() / product.abs().mean()
        assert error < 0.02  # it rounds its rows to 8 bits, too


@pytest.mark.parametrize("at_once", [1, 2, NUM_EXPERTS], ids="{} at once".format)
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", CONFIGS)
def test_products_and_gradients_are_those_of_the_same_weights_unpacked(family, kind, at_once, monkeypatch):
    _, module = next(fused_experts(model_of(family), kind))
    _, packed = next(fused_experts(model_of(family), kind))
    module.config._experts_implementation = "grouped_mm"
    monkeypatch.setattr(packed_experts, "_UNPACKED_BYTES", at_once * 4 * module.gate_up_proj[0].numel())
    rows, shares = torch.randn(23, HIDDEN, requires_grad=True), torch.rand(23, 2, requires_grad=True)
    chosen = torch.stack(
        [torch.randperm(NUM_EXPERTS - 1)[:2] for _ in range(23)]
    )  # nobody chooses the last one
    PackedExperts.install(packed, torch.float32, kind)
    for name in ("gate_up_proj", "down_proj"):
        exact = packed.forward._weights[name].unpack(slice(0, NUM_EXPERTS), torch.float32)
        assert (exact - module._parameters[name]).abs().mean() < 0.1 * exact.abs().mean()
        module._parameters[name].data = exact
    expected = module(rows, chosen, shares)
    gradients = torch.autograd.grad(expected.square().sum(), (rows, shares))
    found = packed(rows, chosen, shares)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(torch.autograd.grad(found.square().sum(), (rows, shares)), gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_backward_keeps_neither_weights_nor_rows_of_a_product():
    _, module = next(fused_experts(model_of("qwen3_moe"), "nf4"))
    PackedExperts.install(module, torch.float32, "nf4")
    kept = []
    rows = torch.randn(23, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        product = module.forward.product(rows, "gate_up_proj", ends_of(23))
    assert [tensor.shape for tensor in kept] == [(NUM_EXPERTS,)]
    assert product.requires_grad


def ends_of(num_rows):
    return torch.full((NUM_EXPERTS,), num_rows, dtype=torch.int32)


def load(folder, quantization="nf4", **options):
    config = ModelConfig(name_or_path=str(folder), quantization=quantization, **options)
    device = torch.device("cpu")
    return load_model(config, load_model_config(config), attn_implementation="eager", device=device, seed=1)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_is_packed_as_it_is_read(family, kind, tmp_path, monkeypatch):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    with monkeypatch.context() as in_parts:
        expert_bytes = 2 * model.model.layers[0].mlp.experts.gate_up_proj[0].numel()
        in_parts.setattr(packed_experts, "_PACKED_AT_ONCE", 2 * expert_bytes)  # the last has one
        read = load(tmp_path, kind, dtype="bfloat16")
    at_random = load(tmp_path, kind, dtype="bfloat16", weights="random")
    for layer, own in zip(read.model.layers, model.model.layers, strict=True):
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            found = getattr(experts, name)
            whole = getattr(own.mlp.experts, name).data.bfloat16()
            expected = pack(whole, kind, is_transposed=experts.is_transposed)
            assert torch.equal(found, expected)
            if kind == "nf4":
                assert torch.equal(found.quant_state.offset, expected.quant_state.offset)
            else:
                assert torch.equal(experts.get_buffer(f"{name}_row_scales"), expected.row_scales)
            assert not found.requires_grad
    assert [type(one) for one in read.parameters()] == [type(one) for one in at_random.parameters()]
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        exact = model(input_ids=ids, labels=ids).loss
        assert read(input_ids=ids, labels=ids).loss == pytest.approx(exact.item(), rel=0.02)


def counted_by(tracker):
    """Return the reading of a weight, whose tensor safetensors makes out of the tracker's sight."""
    read = LazyWeight.__getitem__

    def counted(*of):
        tensor = read(*of)
        tracker.add(tensor)
        return tensor

    return counted


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_load_holds_one_expert_in_16_bits_however_many_there_are(family, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(packed_experts, "_PACKED_AT_ONCE", 1)
    monkeypatch.setitem(SIZES, "hidden_size", 256)  # experts are larger than any other tensor
    transient = []
    for num_experts in (4, 16):
        folder = tmp_path / str(num_experts)
        model = AutoModelForCausalLM.from_config(FAMILIES[family](num_experts), dtype=torch.bfloat16)
        model.save_pretrained(folder)
        expert_bytes = 2 * model.model.layers[0].mlp.experts.gate_up_proj[0].numel()
        with StorageTracker() as tracker, monkeypatch.context() as reading:
            reading.setattr(LazyWeight, "__getitem__", counted_by(tracker))
            packed = load(folder, kind, dtype="bfloat16")
            transient.append((tracker.peak_bytes - tracker.live_bytes) / expert_bytes)
        assert is_packed(packed.model.layers[0].mlp.experts.down_proj)
    # bitsandbytes' kernels for CPUs take two more of it, whatever the number of experts
    assert transient[1] <= transient[0] < 3


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_rows_of_a_checkpoint_that_several_processes_wrote_are_read_as_they_are_packed(
    kind, tmp_path, monkeypatch
):
    model_of("gpt_oss").save_pretrained(tmp_path)
    whole = load(tmp_path, kind).state_dict()
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for rank in range(2):
        parts = {
            name: Part(half, [rank * len(tensor.chunk(2)[0])] + [0] * (tensor.dim() - 1), tensor.shape)
            for name, tensor in tensors.items()
            for half in tensor.chunk(2)[rank : rank + 1]
        }
        ShardWriter(tmp_path, "a", rank, 2).write(MODEL, parts.items())
    read, join = [], CutTensor.__getitem__
    monkeypatch.setattr(CutTensor, "__getitem__", lambda *of: read.append(join(*of)) or read[-1])
    monkeypatch.setattr(packed_experts, "_PACKED_AT_ONCE", 1)
    found = load(tmp_path, kind).state_dict()
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert [len(tensor) for tensor in read if tensor.dim() == 3] == [1] * (2 * 2 * NUM_EXPERTS)


def test_rows_of_a_tensor_in_parts_are_those_of_the_whole():
    whole, read = torch.arange(21).view(7, 3), []

    class Recorded(torch.Tensor):
        def __getitem__(self, index):
            read.append(len(self.as_subclass(torch.Tensor)[index]))
            return self.as_subclass(torch.Tensor)[index]

    parts = [(first, whole[first:end].as_subclass(Recorded)) for first, end in ((0, 2), (2, 3), (3, 7))]
    cut = CutTensor("a", whole.shape, parts)
    for first in range(7):
        for end in range(first + 1, 8):
            read.clear()
            assert torch.equal(cut[first:end], whole[first:end])
            assert sum(read) == end - first
    assert torch.equal(cut[...], whole)
    assert torch.equal(cut[1:6:2], whole[1:6:2])
    assert cut[3:3].shape == (0, 3)
    assert CutTensor("a", [0, 3], [(0, whole[:0])])[...].shape == (0, 3)


@pytest.mark.parametrize(
    "family, change, said",
    [
        (
            "qwen3_moe",
            lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"),
            r"for model\.layers\.1\.mlp\.experts\.gate_up_proj it has 4 of the 5 tensors mlp\.experts.*up_proj",
        ),
        (
            "qwen3_moe",
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.experts.2.down_proj.weight": torch.ones(64, 60)}
            ),
            r"layers\.1\.mlp\.experts\.down_proj it has .*\[64, 64\].*\[64, 60\]",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": torch.ones(5, 128, 60)}),
            r"layers\.1\.mlp\.experts\.down_proj it has \[5, 128, 60\] instead of \[5, 128, 64\]",
        ),
        (
            "gpt_oss",
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": torch.ones(6, 128, 64)}),
            r"5 of each layer; model\.layers\.1\.mlp\.experts\.down_proj in .*model\.safetensors has 6",
        ),
    ],
    ids=["missing", "of another shape", "fused, of another shape", "fused, too many"],
)
def test_experts_that_the_files_lack_are_named(family, change, said, tmp_path):
    model_of(family).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=rf"A checkpoint must hold .*{said}.*Download"):
        load(tmp_path)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_experts_that_cannot_be_packed_are_refused(kind, tmp_path):
    config = Llama4TextConfig(**SIZES, intermediate_size_mlp=128, num_local_experts=NUM_EXPERTS)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match=rf"{kind} must reach 95%.*experts.*quantization=none.*quantize_partly=true"
    ):
        load(tmp_path, kind)
    model = load(tmp_path, kind, quantize_partly=True)
    assert model.model.layers[0].feed_forward.experts.down_proj.is_floating_point()
