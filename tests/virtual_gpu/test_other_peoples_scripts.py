"""Training code that knows nothing of this package runs on a virtual GPU as it stands, and leaves torch as it was."""

from __future__ import annotations

import contextlib

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from tiny_models import SIZES, tiny_llama
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    default_data_collator,
)
from transformers.utils.import_utils import is_torch_cuda_available

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

ROWS = [{"input_ids": list(range(16)), "labels": list(range(16))}] * 12


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        hidden_BD = self.embed(hidden_BD)
        for layer in self.layers:
            # Random states would count in a trace alone: no operator makes them, so the tracker does not see them.
            hidden_BD = checkpoint(
                layer, hidden_BD, use_reentrant=self.use_reentrant, preserve_rng_state=False
            )
        return hidden_BD


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_BD):
        ctx.save_for_backward(hidden_BD)
        return hidden_BD * 2

    @staticmethod
    def backward(ctx, grad_BD):
        (hidden_BD,) = ctx.saved_tensors
        return grad_BD * 2 + 0 * hidden_BD


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, hidden_BD):
        return Doubled.apply(self.linear(hidden_BD))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True), 2)


MODELS = {
    "mlp": mlp,
    "cnn": cnn,
    "encoder": encoder,
    "custom function": Custom,
    "reentrant checkpoints": lambda: Checkpointed(True),
    "checkpoints": lambda: Checkpointed(False),
}


def train(device, model=mlp, *, autocast=None, accumulate=1, scaler=None, **adamw) -> None:
    """A loop as people write it."""
    network = model().to(device)
    optimizer = torch.optim.AdamW(network.parameters(), **adamw)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    shape = (2, 6, 64) if model is encoder else (8, 64)
    for step in range(3 * accumulate):
        hidden = torch.randn(shape).to(device)
        with contextlib.nullcontext() if autocast is None else torch.autocast(str(device), autocast):
            loss = network(hidden).square().mean() / accumulate
        (loss if scaler is None else scaler.scale(loss)).backward()
        if (step + 1) % accumulate:
            continue
        if scaler is not None:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
        optimizer.zero_grad()
        assert loss.item() is not None


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("adamw", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_the_bytes_are_those_of_the_program_on_real_tensors(model, adamw, accumulate):
    with StorageTracker() as tracker:
        train("cpu", model, accumulate=accumulate, **adamw)
    with TracingMachine() as machine:
        train("cpu", model, accumulate=accumulate, **adamw)
    assert machine.recorder.peak_bytes == tracker.peak_bytes


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "vgpu"])
def test_the_device_may_be_called_by_any_of_its_names(device):
    with VirtualGPU("t4") as gpu:
        train(device)
    with VirtualGPU("t4") as other:
        train(other.device)
    assert gpu.report().by_category_at_peak == other.report().by_category_at_peak


def on_meta_and_placed(gpu):
    with torch.device("meta"):
        model = mlp()
    return gpu.place(model)


def placed_twice(gpu):
    return on_meta_and_placed(gpu).to("cuda").cuda()


def on_the_host_and_moved(gpu):
    return mlp().to(gpu.device)


def made_on_the_device(gpu):
    with torch.device("cuda"):
        return mlp()


@pytest.mark.parametrize(
    "make", [on_meta_and_placed, placed_twice, on_the_host_and_moved, made_on_the_device]
)
def test_a_model_is_the_same_however_it_comes_to_the_device(make):
    with VirtualGPU("t4") as gpu:
        model = make(gpu)
        assert gpu.recorder.live_bytes == sum(parameter.nbytes for parameter in model.parameters())
        train("cuda", lambda: model)
    report = gpu.report()
    assert report.model.parameters == 64 * 256 * 2 + 256 + 64
    weights, biases, blocks = (
        2 * 64 * 256 * 4,
        256 * 4 + 64 * 4,
        256,
    )  # the smaller bias takes a block of 512 bytes
    assert report.by_category_at_peak["parameter"] == weights + biases + blocks


def test_autocast_by_cudas_name_casts():
    with VirtualGPU("a100-80gb"):
        model, hidden_BD = mlp().cuda(), torch.randn(8, 64, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.is_autocast_enabled()
            assert torch.get_autocast_dtype("cuda") == torch.bfloat16
            assert model(hidden_BD).dtype == torch.bfloat16
        with torch.amp.autocast("cuda"):
            assert model(hidden_BD).dtype == torch.float16
        assert not torch.is_autocast_enabled()


def test_a_loss_scaler_scales():
    with VirtualGPU("t4") as gpu:
        scaler = torch.amp.GradScaler("cuda")
        train("cuda", autocast=torch.float16, scaler=scaler)
        assert scaler.is_enabled()
    assert gpu.report().by_phase["optimizer_step"] > 0


def test_the_functions_of_cuda_answer_for_the_virtual_gpu():
    with VirtualGPU("t4") as gpu:
        assert torch.cuda.is_available()
        assert is_torch_cuda_available()
        assert torch.cuda.get_device_name() == "Tesla T4"
        assert torch.cuda.get_device_capability() == (7, 5)
        assert torch.cuda.get_device_properties(0).total_memory == gpu.spec.memory_bytes
        weight = torch.zeros(1024, device="cuda")
        assert torch.cuda.memory_allocated() == weight.nbytes
        assert torch.cuda.mem_get_info()[0] == gpu.spec.memory_bytes - weight.nbytes
        torch.cuda.manual_seed_all(0)
        torch.cuda.synchronize()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_of_a_data_loader_are_moved_from_pinned_memory(num_workers):
    loader = DataLoader(
        TensorDataset(torch.randn(16, 64)), batch_size=8, num_workers=num_workers, pin_memory=True
    )
    with VirtualGPU("t4") as gpu:
        model = mlp().cuda()
        for (hidden_BD,) in loader:
            model(hidden_BD.to("cuda", non_blocking=True)).mean().backward()
    assert any(entry.kind == "copy" and not entry.blocking for entry in gpu.work.entries)
    # A loop holds its batch until it has the next.
    assert gpu.report().host_pinned_bytes == 2 * 8 * 64 * 4


def test_pinned_memory_is_pinned_and_counted():
    with VirtualGPU("t4") as gpu:
        empty = torch.empty(1024, pin_memory=True)
        copied = torch.arange(1024).pin_memory()
        assert empty.is_pinned()
        assert copied.is_pinned()
        assert copied.pin_memory() is copied
        assert copied[7].item() == 7
        assert not torch.empty(3).is_pinned()
    assert gpu.report().host_pinned_bytes == 1024 * 4 + 1024 * 8


@pytest.mark.parametrize("module", [lambda gpu: torch.cuda, lambda gpu: torch.get_device_module(gpu.device)])
def test_copies_on_a_stream_of_their_own_overlap_with_computing(module):
    def step(blocking: bool) -> float:
        with VirtualGPU("t4") as gpu:
            cuda = module(gpu)
            weight = nn.Parameter(torch.randn(2048, 2048, device="cuda"))
            optimizer = torch.optim.SGD([weight])
            host, stream = torch.empty(2048, 2048, pin_memory=True), cuda.Stream()
            stream.wait_stream(cuda.current_stream())
            with contextlib.nullcontext() if blocking else cuda.stream(stream):
                host.copy_(weight.detach(), non_blocking=not blocking)
                weight.record_stream(stream)
            (weight @ weight).sum().backward()
            cuda.current_stream().wait_stream(stream)
            optimizer.step()
        step = gpu.report().step
        assert step is not None
        return step.seconds

    assert step(blocking=False) < step(blocking=True)


# As scripts for transformers 5.17 to 5.22 call it, which know no other name.


def test_a_loop_over_accelerate_runs_and_its_state_is_put_back():
    before = PartialState()
    assert before.device.type == "cpu"
    with VirtualGPU("t4") as gpu:
        accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2)
        model = tiny_llama()
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(ROWS, batch_size=2, collate_fn=default_data_collator)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert gpu.report().by_category_at_peak["optimizer_state"] > 0
    assert PartialState().device.type == "cpu"


def test_a_local_checkpoint_loads_without_its_values(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with VirtualGPU("t4") as gpu:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cuda:0")
        tokens_BT = torch.ones(2, 8, dtype=torch.long, device="cuda")
        model(input_ids=tokens_BT, labels=tokens_BT).loss.backward()
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    report = gpu.report()
    assert report.by_category_at_peak["parameter"] >= size
    assert report.host_peak_bytes > 0


def test_a_local_checkpoint_loads_in_4_bits_and_may_be_moved_again(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_llama().save_pretrained(tmp_path)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    with VirtualGPU("a100-80gb") as gpu:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=nf4, device_map={"": 0})
        layer = model.model.layers[0].mlp.up_proj
        weight = layer.weight
        assert weight.nbytes == SIZES["hidden_size"] * SIZES["intermediate_size"] // 2
        before = gpu.recorder.live_bytes
        model.to("cuda")
        assert gpu.recorder.live_bytes == before
        assert layer.weight.quant_state is weight.quant_state
        model(torch.ones(2, 8, dtype=torch.long, device="cuda"))
    assert gpu.report().model.parameters == tiny_llama().num_parameters()


def test_a_compiled_model_is_traced_as_written():
    with VirtualGPU("t4") as gpu:
        train("cuda", lambda: torch.compile(mlp()))
    assert gpu.report().by_category_at_peak["optimizer_state"] > 0
    assert any("torch.compile: " in choice for choice in gpu.report().choices)


class ProgramError(Exception):
    pass


def test_an_error_of_the_program_passes_unchanged_and_torch_is_as_before():
    names = ("to", "cuda", "numpy", "pin_memory", "record_stream")
    before = [getattr(torch.Tensor, name) for name in names], torch.cuda.is_available, torch.save
    error = ProgramError("mine")

    def program() -> None:
        with VirtualGPU("t4"), torch.autocast("cuda"):
            mlp().cuda()(torch.randn(2, 64).cuda())
            raise error

    with pytest.raises(ProgramError) as raised:
        program()
    assert raised.value is error
    assert before == ([getattr(torch.Tensor, name) for name in names], torch.cuda.is_available, torch.save)
    assert not is_torch_cuda_available()
    assert type(torch.ones(1)) is torch.Tensor
    with VirtualGPU("t4") as another:
        train(another.device)
    assert another.report().fits


def test_one_virtual_gpu_at_a_time():
    with (
        VirtualGPU("t4"),
        pytest.raises(UserError, match=r"One virtual GPU at a time, got l4 inside .* t4"),
        VirtualGPU("l4"),
    ):
        pass


def test_a_virtual_gpu_runs_one_block():
    gpu = VirtualGPU("t4")
    with gpu:
        pass
    with pytest.raises(UserError, match="Make another"), gpu:
        pass


def test_there_is_no_second_device():
    with VirtualGPU("t4"), pytest.raises(UserError, match="represents one device, cuda:0, got cuda:1"):
        torch.zeros(1, device="cuda:1")


def test_an_operator_without_a_fake_rule_is_refused_by_name():
    torch.library.define("lowmem_ft_test::opaque", "(Tensor x) -> Tensor")
    torch.library.impl("lowmem_ft_test::opaque", "cpu", torch.clone)
    with (
        VirtualGPU("t4"),
        pytest.raises(
            ModelError, match=r"opaque.default.* at \S*test_other_peoples_scripts.py:\d+.*register_fake"
        ),
    ):
        torch.ops.lowmem_ft_test.opaque(torch.randn(3, device="cuda"))


def test_metrics_read_zeros_and_a_forward_that_goes_on_by_numpy_is_refused():
    class Reads(nn.Module):
        def forward(self, hidden_BD):
            return hidden_BD.cpu().numpy()

    with VirtualGPU("t4"):
        hidden_BD = torch.randn(2, 3, device="cuda")
        assert hidden_BD.cpu().numpy().tolist() == [[0.0] * 3] * 2
        assert torch.arange(3).cuda().cpu().numpy().tolist() == [0, 1, 2]
        with pytest.raises(ModelError, match=r"calls Tensor.numpy\(\)"):
            Reads()(hidden_BD)


def test_the_report_prints_its_verdict():
    with VirtualGPU("t4") as gpu:
        train("cuda")
    text = str(gpu.report())
    assert text.startswith("t4: fits, ")
    assert "optimizer_state" in text
    with VirtualGPU("t4") as gpu:
        torch.empty(20 * 2**30, dtype=torch.uint8, device="cuda")
    assert str(gpu.report()).startswith("t4: does not fit, ")
