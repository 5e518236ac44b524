"""A machine runs one program, and says what it recorded and decided."""

from __future__ import annotations

import contextlib
import gc
import threading

import numpy as np
import pytest
import torch
from torch import nn

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.linear.bias.requires_grad_(False)

    def forward(self, hidden_BD):
        return self.linear(hidden_BD)


def test_the_trace_has_the_model_and_its_steps():
    with TracingMachine() as machine:
        model = machine.place(Named())
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            with machine.micro_batch():
                model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            machine.step_is_over()
    trace = machine.trace()
    assert (trace.model.name, trace.model.parameters, trace.model.trainable_parameters) == ("Named", 72, 64)
    assert len(trace.step_ends) == len(trace.between_steps) == len(trace.micro_batches) == 2
    assert machine.trace("mine").model.name == "mine"
    assert machine.trace_seconds > 0


def test_this_machine_has_no_accelerator_even_after_a_virtual_gpu():
    """FSDP2 asks torch for one, which keeps the virtual device of a process for good."""
    with VirtualGPU("t4"):
        assert torch.accelerator.current_accelerator() is not None
    with TracingMachine():
        assert torch.accelerator.current_accelerator() is None
        assert torch._C._get_accelerator().type == "cpu"


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_ends_with_the_last_of_its_optimizers(in_backward):
    """Such as one for each parameter, which may step in the backward pass."""
    with TracingMachine() as machine:
        model = machine.place(nn.Linear(8, 8))
        optimizers = {parameter: torch.optim.SGD([parameter]) for parameter in model.parameters()}
        if in_backward:
            for parameter, optimizer in optimizers.items():
                parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        ends = []
        for _ in range(3):
            model(torch.randn(2, 8)).sum().backward()
            if not in_backward:
                for optimizer in optimizers.values():
                    optimizer.step()
            ends.append(len(machine.work.entries))
    assert [index + 1 for index in machine.trace().step_ends] == ends


def test_a_part_called_by_itself_does_not_stand_for_the_model():
    with TracingMachine() as machine:
        model = nn.Sequential(Named(), Named())
        model(torch.randn(2, 8))
        model[0](torch.randn(2, 8))
    assert machine.trace().model.parameters == 2 * 72


def test_a_mark_says_what_a_tensor_is_for():
    with TracingMachine() as machine:
        machine.mark(torch.empty(1), "input")
        kept = torch.empty(2)
        machine.mark(kept, "optimizer_state")
    assert [item.category for item in machine.recorder.timeline.allocations] == ["input", "optimizer_state"]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_as_before(was_enabled):
    (gc.enable if was_enabled else gc.disable)()
    try:
        with TracingMachine():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()


def test_a_machine_runs_one_block():
    machine = TracingMachine()
    with machine:
        pass
    with pytest.raises(UserError, match="A TracingMachine runs one `with` block"), machine:
        pass


def test_a_gpu_that_cannot_be_entered_leaves_nothing_behind(monkeypatch):
    gpu = VirtualGPU("t4")
    monkeypatch.setattr(gpu.recorder, "__class__", type("Broken", (type(gpu.recorder),), {"__enter__": fail}))
    with pytest.raises(ValueError, match="broken"), gpu:
        pass
    assert not torch.cuda.is_available()
    with VirtualGPU("t4"):
        assert torch.cuda.is_available()


def fail(self):
    raise ValueError("broken")


def test_the_cap_of_the_allocator_is_the_programs():
    with VirtualGPU("t4") as gpu:
        torch.cuda.set_per_process_memory_fraction(0.1)
        torch.empty(2 * 2**30, dtype=torch.uint8, device="cuda")
    assert not gpu.report().fits


def test_what_another_thread_computes_is_refused_there_and_at_the_end_of_the_block():
    """Its memory would not be counted, nor its streams be seen."""
    heard = []

    def work(tensor):
        try:
            tensor * 2
        except UserError as error:
            heard.append(str(error))

    def program():
        with VirtualGPU("t4"):
            tensor = torch.ones(2**20, device="cuda")
            thread = threading.Thread(target=work, args=(tensor,))
            thread.start()
            thread.join()
            tensor.sum()

    with pytest.raises(
        UserError, match=r"follows the thread that its block began in, got aten\.mul"
    ) as refused:
        program()
    assert heard == [str(refused.value)]
    assert "test_tracing_machine.py" in heard[0]


WAITS = {
    "got synchronize": lambda stream, host: torch.cuda.synchronize(),
    "got set_stream": lambda stream, host: torch.cuda.set_stream(stream),
    "got Event.record": lambda stream, host: stream.record_event(),
    "got Stream.query": lambda stream, host: stream.query(),
    "got a reading of values": lambda stream, host: host.tolist(),
}


@pytest.mark.parametrize("said", WAITS)
def test_what_another_thread_waits_for_or_reads_is_refused_as_well(said):
    """It would count as a wait of the block's own thread, which nothing holds up, or move that to another stream."""

    def work(stream, host):
        with contextlib.suppress(UserError):
            WAITS[said](stream, host)

    def program():
        with VirtualGPU("t4", check_streams=True):
            thread = threading.Thread(
                target=work, args=(torch.cuda.Stream(), torch.zeros(8, pin_memory=True))
            )
            thread.start()
            thread.join()

    with pytest.raises(UserError, match=f"follows the thread that its block began in, {said} in another"):
        program()


def test_another_thread_may_compute_with_tensors_of_its_own():
    found = []
    with VirtualGPU("t4"):
        thread = threading.Thread(target=lambda: found.append(float(torch.ones(3).sum())))
        thread.start()
        thread.join()
    assert found == [3.0]


def test_memory_of_an_array_is_not_what_torch_has_allocated():
    array = np.ones(2**20, dtype=np.float32)
    machine = TracingMachine()
    machine.recorder.as_torch_reports = True
    with machine:
        shared = torch.from_numpy(array)
        assert (shared.numpy() == array).all()
        held = machine.recorder.live_bytes
        copied = shared.clone()
        assert (held, machine.recorder.live_bytes) == (0, copied.nbytes)
    with VirtualGPU("t4") as gpu:
        shared = torch.from_numpy(array)
        assert gpu.recorder.place_of(torch.from_numpy(array).view(-1)) == "host"
