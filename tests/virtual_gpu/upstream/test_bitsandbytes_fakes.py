"""bitsandbytes on a virtual GPU holds the bytes that its real layers and optimizers hold."""

import collections
import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.integrations import replace_with_bnb_linear

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.tensors.logical_size import logical_numel
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers.table import Bitsandbytes
from lowmem_ft.optimizers.updates.bitsandbytes_optimizers import build_bitsandbytes, keep_embeddings_in_32bit
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.kernels.bitsandbytes_operators import MOST_OUTLIER_COLUMNS

bitsandbytes = pytest.importorskip("bitsandbytes")

GPU = find_gpu("a100-80gb")
TOKENS, INPUTS, OUTPUTS = 96, 256, 384


@pytest.fixture
def gpu():
    with virtual_gpu() as gpu:
        yield gpu


# --- optimizers -----------------------------------------------------------------------------------------------------


def small_model(device: str) -> nn.Module:
    """An embedding, a matrix, and vectors that stay in 32 bits for having fewer than 4096 elements."""
    return nn.Sequential(
        nn.Embedding(64, 128, device=device),
        nn.Linear(128, 900, device=device),
        nn.LayerNorm(900, device=device),
    )


def train_two_steps(model: nn.Module, device, algorithm: str, bits: int, paged: bool):
    form = Bitsandbytes(algorithm=algorithm, bits=bits, paged=paged)
    optimizer = build_bitsandbytes([{"params": list(model.parameters())}], form, lr=1e-3)
    keep_embeddings_in_32bit(optimizer, model)
    for _ in range(2):
        model(torch.randint(0, 64, (5,)).to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def state_tensors(optimizer) -> list[torch.Tensor]:
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]


@pytest.mark.parametrize("algorithm, bits", [("AdamW", 8), ("AdamW", 32), ("Lion", 8), ("Lion", 32)])
def test_an_optimizer_keeps_the_state_that_it_keeps_for_real(algorithm, bits):
    """bitsandbytes has the rules for which tensor gets how many bits; both runs go through them."""
    real = storages(state_tensors(train_two_steps(small_model("cpu"), "cpu", algorithm, bits, paged=False)))
    with VirtualGPU(GPU) as gpu:
        model = gpu.place(small_model("meta"))
        optimizer = train_two_steps(model, gpu.device, algorithm, bits, paged=False)
        assert storages(state_tensors(optimizer)) == real
        assert {tensor.device for tensor in state_tensors(optimizer)} == {gpu.device}


def test_a_step_takes_no_temporaries(gpu):
    model = gpu.place(small_model("meta"))
    optimizer = train_two_steps(model, gpu.device, "AdamW", 8, paged=False)
    model(torch.randint(0, 64, (5,)).to(gpu.device)).sum().backward()
    gpu.recorder.reset_peak()
    before = gpu.recorder.live_bytes
    optimizer.step()
    assert gpu.recorder.peak_bytes == before


def test_paged_state_lies_in_managed_memory_from_100_000_elements_on(gpu):
    model = gpu.place(small_model("meta"))
    optimizer = train_two_steps(model, gpu.device, "AdamW", 8, paged=True)
    allocations = gpu.recorder.timeline.allocations
    managed = [item.size_bytes for item in allocations if item.place == "managed"]
    assert managed == [128 * 900] * 2, "both states of the one matrix that is large enough"
    assert {item.category for item in allocations if item.place == "managed"} == {"optimizer_state"}
    kinds = collections.Counter(tensor.device.type for tensor in state_tensors(optimizer))
    assert kinds["cpu"] == 2, "to torch, managed memory is the CPU's"


def test_the_host_waits_after_each_parameter(gpu):
    model = gpu.place(small_model("meta"))
    first = len(gpu.work.entries)
    train_two_steps(model, gpu.device, "AdamW", 8, paged=False)
    waits = [entry for entry in gpu.work.entries[first:] if entry.kind == "synchronize"]
    assert len(waits) == 2 * len(list(model.parameters()))


def test_nothing_of_it_stays_behind():
    functional = bitsandbytes.functional
    before = functional.get_paged, functional.create_dynamic_map, dict(functional.name2qmap)
    constructor = bitsandbytes.nn.Params4bit.__new__
    with VirtualGPU(GPU) as gpu:
        train_two_steps(gpu.place(small_model("meta")), gpu.device, "AdamW", 8, paged=True)
        gpu.place(bitsandbytes.nn.Linear4bit(64, 64, device="meta"))
        assert functional.get_paged is not before[0]
    assert (functional.get_paged, functional.create_dynamic_map, dict(functional.name2qmap)) == before
    assert bitsandbytes.nn.Params4bit.__new__ is constructor
    assert not functional.GlobalPageManager.get_instance().paged_tensors
    optimizer = train_two_steps(small_model("cpu"), "cpu", "AdamW", 8, paged=False)
    assert not any(isinstance(tensor, FakeTensor) for tensor in state_tensors(optimizer))


IMPORT_WITHIN = """
import importlib.util, sys, torch
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
with VirtualGPU(find_gpu("a100-80gb")) as gpu:
    assert importlib.util.find_spec("bitsandbytes") is not None
    assert "bitsandbytes" not in sys.modules, "entering imports nothing"
    import bitsandbytes
    model = gpu.place(torch.nn.Linear(400, 400, device="meta"))
    optimizer = bitsandbytes.optim.PagedAdamW8bit(model.parameters())
    model(torch.ones(2, 400, device=gpu.device)).sum().backward()
    optimizer.step()
    print(sum(item.size_bytes for item in gpu.recorder.timeline.allocations if item.place == "managed"))
assert bitsandbytes.functional.get_paged.__name__ == "get_paged"
"""


def test_it_may_be_imported_within_the_block():
    """As `transformers.Trainer` does. In a process of its own: here the package is imported already."""
    done = subprocess.run([sys.executable, "-c", IMPORT_WITHIN], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [str(2 * 400 * 400)], done.stderr


# --- 4-bit and 8-bit layers -----------------------------------------------------------------------------------------


def linear_4bit(device: str, *, double: bool) -> Any:
    layer = bitsandbytes.nn.Linear4bit(
        INPUTS,
        OUTPUTS,
        bias=False,
        compute_dtype=torch.bfloat16,
        compress_statistics=double,
        quant_type="nf4",
        device=device,
    )
    layer.weight.data = layer.weight.data.to(
        torch.bfloat16
    )  # as from_pretrained(dtype=torch.bfloat16) loads it
    return layer if device == "meta" else layer.to(device)


def linear_8bit(device: str, *, threshold: float) -> Any:
    layer = bitsandbytes.nn.Linear8bitLt(
        INPUTS, OUTPUTS, bias=False, has_fp16_weights=False, threshold=threshold, device=device
    )
    return layer if device == "meta" else layer.to(device)


def quantised_tensors(weight) -> list[torch.Tensor]:
    if isinstance(weight, bitsandbytes.nn.Int8Params):
        return [weight, weight.SCB]
    state = weight.quant_state
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [weight, state.absmax, state.code, *nested]


LAYERS = {
    "nf4": lambda device: linear_4bit(device, double=False),
    "nf4, double": lambda device: linear_4bit(device, double=True),
    "int8": lambda device: linear_8bit(device, threshold=0.0),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_holds_what_it_holds_for_real(kind):
    real = storages(quantised_tensors(LAYERS[kind]("cpu").weight))
    with virtual_gpu() as gpu:
        before = gpu.recorder.live_bytes
        layer = gpu.place(LAYERS[kind]("meta"))
        tensors = quantised_tensors(layer.weight)
        assert storages(tensors) == real
        assert {tensor.device for tensor in tensors} == {gpu.device}
        table = 256 * 4 if kind == "nf4, double" else 0  # bitsandbytes keeps one for the process
        assert gpu.recorder.live_bytes - before == sum(size for _, size in real) + table
        assert device_bytes(gpu, "parameter") == sum(size for _, size in real)
        assert gpu.trace().model.parameters == logical_numel(layer.weight) == INPUTS * OUTPUTS


@pytest.mark.parametrize("kind", LAYERS)
def test_a_weight_still_passes_for_its_class(kind):
    """Libraries ask for the class, and for its name."""
    expected = type(LAYERS[kind]("cpu").weight)
    with virtual_gpu() as gpu:
        layer = LAYERS[kind]("meta")
        for _ in range(2):
            assert isinstance(layer.weight, expected)
            assert type(layer.weight).__name__ == expected.__name__
            assert next(layer.parameters()) is layer.weight
            gpu.place(layer)
        assert layer.weight.to(gpu.device) is layer.weight


@pytest.mark.parametrize("kind", LAYERS)
def test_a_forward_pass_keeps_what_it_keeps_for_real(kind):
    """The output; 4-bit weights are dequantised again, and 8-bit inputs quantised for the product only."""
    layer = LAYERS[kind]("cpu").eval()  # for training with 8 bits the CPU has a product of its own
    inputs = torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    layer(inputs)  # the first call rearranges the layer
    with StorageTracker() as tracker:
        kept = layer(inputs)
        real = tracker.live_bytes
    assert kept.dtype == torch.bfloat16
    with virtual_gpu() as gpu:
        layer = gpu.place(LAYERS[kind]("meta"))
        inputs = torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16, device=gpu.device).requires_grad_()
        layer(inputs)
        before = gpu.recorder.live_bytes
        kept = layer(inputs)
        assert gpu.recorder.live_bytes - before == real


@pytest.mark.parametrize("double", [False, True])
def test_a_4bit_layer_dequantises_its_weight_for_each_pass(double):
    """Peaks by the source of bitsandbytes' CUDA operators: backends/cuda/ops.py and autograd/_functions.py, 0.50.2."""
    weight, scales = 2 * INPUTS * OUTPUTS, 4 * INPUTS * OUTPUTS // 64
    outputs, grad_inputs = 2 * TOKENS * OUTPUTS, 2 * TOKENS * INPUTS
    with virtual_gpu() as gpu:
        layer = gpu.place(linear_4bit("meta", double=double))
        inputs = torch.randn(TOKENS, INPUTS, dtype=torch.bfloat16, device=gpu.device).requires_grad_()
        assert extra_peak(gpu, lambda: layer(inputs)) == weight + outputs + (2 * scales if double else 0)
        result = layer(inputs)
        gradient = torch.ones_like(result)
        assert extra_peak(gpu, lambda: result.backward(gradient)) == weight + grad_inputs


def test_an_8bit_layer_keeps_the_columns_with_outliers():
    with virtual_gpu() as gpu:
        layer = gpu.place(linear_8bit("meta", threshold=6.0))
        inputs = torch.randn(TOKENS, INPUTS, dtype=torch.float16, device=gpu.device).requires_grad_()
        layer(inputs)
        before = gpu.recorder.live_bytes
        kept = layer(inputs)
        assert gpu.recorder.live_bytes - before == 2 * TOKENS * (OUTPUTS + MOST_OUTLIER_COLUMNS)
        kept.sum().backward()
        assert inputs.grad is not None
        assert any("outlier" in choice for choice in gpu.choices)


# --- whole models ---------------------------------------------------------------------------------------------------


def tiny_llama(**quantization):
    """As from_pretrained builds it before it loads weights."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        number = sum(parameter.numel() for parameter in model.parameters())
        replace_with_bnb_linear(model, ["lm_head"], BitsAndBytesConfig(**quantization))
    model.is_loaded_in_4bit = "load_in_4bit" in quantization
    model.is_loaded_in_8bit = "load_in_8bit" in quantization
    return model, number


QUANTIZATIONS = [
    {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    {"load_in_8bit": True},
]


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=["nf4", "int8"])
@pytest.mark.parametrize("built", ["before", "within"])
def test_a_quantised_model_trains(quantization, built):
    outside = tiny_llama(**quantization)
    with virtual_gpu() as gpu:
        model, number = outside if built == "before" else tiny_llama(**quantization)
        gpu.place(model).train()
        assert gpu.trace().model.parameters == number
        ids = torch.randint(0, 128, (2, 16)).to(gpu.device)
        model(input_ids=ids, labels=ids).loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert trained
        assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=["nf4", "int8"])
def test_peft_trains_adapters_on_a_quantised_model(quantization):
    peft = pytest.importorskip("peft")
    model, number = tiny_llama(**quantization)
    model = peft.prepare_model_for_kbit_training(
        model, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    )
    with virtual_gpu() as gpu:
        gpu.place(model).train()
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        count = sum(parameter.numel() for parameter in adapters)
        assert model.get_nb_trainable_parameters() == (count, number + count)
        assert gpu.trace().model.parameters == number + count
        optimizer = build_bitsandbytes(
            [{"params": adapters}], Bitsandbytes(algorithm="AdamW", bits=8, paged=True), lr=1e-3
        )
        for _ in range(2):
            ids = torch.randint(0, 128, (2, 16)).to(gpu.device)
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert len(optimizer.state) == len(adapters) == 2 * 2 * 2


# --- helpers --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def virtual_gpu():
    with VirtualGPU(GPU) as gpu:
        # cuBLAS takes its workspaces with the first products, forward and backward: not what these tests count.
        matrix = torch.ones(2, 2, device=gpu.device, requires_grad=True)
        (matrix @ matrix).sum().backward()
        del matrix
        yield gpu


def storages(tensors) -> list[tuple[str, int]]:
    """Type and bytes of each storage, once."""
    unique = {tensor.untyped_storage()._cdata: tensor for tensor in tensors}
    return sorted((str(tensor.dtype), tensor.untyped_storage().nbytes()) for tensor in unique.values())


def device_bytes(gpu, category: str) -> int:
    timeline = gpu.recorder.timeline
    alive = [timeline.allocations[index] for index in timeline.alive_at(len(timeline.events) - 1)]
    return sum(item.size_bytes for item in alive if item.place == "device" and item.category == category)


def extra_peak(gpu, call) -> int:
    """The most bytes that a call takes beyond what is alive before it."""
    gpu.recorder.reset_peak()
    before = gpu.recorder.live_bytes
    call()
    return gpu.recorder.peak_bytes - before
