"""A technique that the estimator has never heard of changes an estimate as it changes the bytes of a real run."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

WIDTH, ROWS, LAYERS = 64, 256, 6
FEW_ROWS = 4  # gradients outweigh activations


def model_of_layers() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))


@contextlib.contextmanager
def no_technique(model, optimizer):
    yield


@contextlib.contextmanager
def activations_in_halves(model, optimizer):
    """What the backward pass needs waits as bfloat16."""

    def pack(tensor: Tensor) -> Tensor | tuple[Tensor, torch.dtype]:
        if tensor.dtype != torch.float32 or isinstance(tensor, nn.Parameter) or tensor.dim() < 2:
            return tensor
        return tensor.to(torch.bfloat16), tensor.dtype

    def unpack(packed) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[0].to(packed[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@contextlib.contextmanager
def gradients_freed_as_they_come(model, optimizer):
    """Plain SGD inside the backward pass."""

    def update(parameter: Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(update) for parameter in model.parameters()]
    yield
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def activations_on_the_host(model, optimizer):
    """What the backward pass needs waits in pinned memory, copied on a stream of its own."""
    stream, events = torch.cuda.Stream(), []

    def pack(tensor: Tensor) -> tuple[Tensor, torch.device, torch.cuda.Event] | Tensor:
        if isinstance(tensor, nn.Parameter) or tensor.shape[0] != ROWS:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        event = stream.record_event()
        events.append(event)
        tensor.record_stream(stream)
        return host, tensor.device, event

    def unpack(packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        host, device, event = packed
        event.wait()
        return host.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    assert events


def train(device, technique, rows=ROWS) -> None:
    model = model_of_layers().to(device)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    for _ in range(2):
        hidden_BD = torch.randn(rows, WIDTH, device=device)
        with technique(model, optimizer):
            model(hidden_BD).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def real_peak(technique, rows=ROWS) -> int:
    with StorageTracker() as tracker:
        train("cpu", technique, rows)
    return tracker.peak_bytes


def traced_peak(technique, rows=ROWS) -> int:
    with TracingMachine() as machine:
        train("cpu", technique, rows)
    return machine.recorder.peak_bytes


def on_gpu(technique, rows=ROWS):
    with VirtualGPU("a10g") as gpu:
        train("cuda", technique, rows)
    return gpu.report()


def test_techniques_that_run_on_a_cpu_take_the_bytes_of_a_real_run():
    for technique, rows in ((activations_in_halves, ROWS), (gradients_freed_as_they_come, FEW_ROWS)):
        assert traced_peak(no_technique, rows) == real_peak(no_technique, rows)
        assert traced_peak(technique, rows) == real_peak(technique, rows)
        assert real_peak(technique, rows) < real_peak(no_technique, rows)


def test_freed_gradients_are_not_in_the_estimate():
    plain, technique = on_gpu(no_technique, FEW_ROWS), on_gpu(gradients_freed_as_they_come, FEW_ROWS)
    one_layer = (WIDTH * WIDTH + WIDTH) * 4
    assert plain.by_category_at_peak["gradient"] >= LAYERS * one_layer
    assert technique.by_category_at_peak["gradient"] < 2 * one_layer
    assert plain.allocated_peak_bytes - technique.allocated_peak_bytes >= (LAYERS - 2) * one_layer


def test_offloaded_activations_move_from_the_device_to_pinned_memory():
    plain, technique = on_gpu(no_technique), on_gpu(activations_on_the_host)
    one_tensor = ROWS * WIDTH * 4
    saved = 2 * LAYERS  # the input of each linear layer and of each GELU
    assert technique.host_pinned_bytes == saved * one_tensor
    assert plain.host_pinned_bytes == 0
    assert plain.allocated_peak_bytes - technique.allocated_peak_bytes >= saved * one_tensor / 2


def test_offloading_waits_where_copies_are_slower_than_computing():
    plain, technique = on_gpu(no_technique).step, on_gpu(activations_on_the_host).step
    assert plain is not None
    assert technique is not None
    assert technique.seconds > plain.seconds
