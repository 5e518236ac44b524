"""Whether the host waits for a copy, asked to or not: CUDA goes by the memory on the host."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch

from lowmem_ft.foundation.host.pinned_memory import PAGE_BYTES, HostMemory
from lowmem_ft.foundation.units import MIB
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.device.host_copies import SENT_AT_ONCE_BYTES
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

LARGE = SENT_AT_ONCE_BYTES + 1


def host(num_bytes=LARGE, *, pinned=False):
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned)


def device():
    return torch.zeros(LARGE, dtype=torch.uint8, device="cuda")


def pinned_by_a_thread():
    """As data loaders with workers do."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        tensor = torch.zeros(LARGE, dtype=torch.uint8)
    found = []
    thread = threading.Thread(target=lambda: found.append(tensor.pin_memory()))
    thread.start()
    thread.join()
    return found[0]


WAITS = {
    "to the device, told to": lambda: host().to("cuda"),
    "to the device, told to, pinned": lambda: host(pinned=True).to("cuda"),
    "to the device, pageable": lambda: host().to("cuda", non_blocking=True),
    "into the device, pageable": lambda: device().copy_(host(), non_blocking=True),
    "to the host, told to": lambda: device().cpu(),
    "into the host, pageable": lambda: host().copy_(device(), non_blocking=True),
}
GOES_ON = {
    "to the device, pinned": lambda: host(pinned=True).to("cuda", non_blocking=True),
    "to the device, pinned now": lambda: host().pin_memory().to("cuda", non_blocking=True),
    "to the device, pinned by a data loader": lambda: pinned_by_a_thread().to("cuda", non_blocking=True),
    "to the device, few": lambda: host(SENT_AT_ONCE_BYTES).to("cuda", non_blocking=True),
    "into the host, pinned": lambda: host(pinned=True).copy_(device(), non_blocking=True),
    "to the host": lambda: device().to("cpu", non_blocking=True),
    "within the device": lambda: device().clone(),
}


@pytest.mark.parametrize("copy", [*WAITS, *GOES_ON])
def test_the_host_waits_where_cuda_lets_it_wait(copy):
    with VirtualGPU("l4") as gpu:
        kept = {**WAITS, **GOES_ON}[copy]()
        assert gpu.work.num_host_waits == (copy in WAITS)
    assert bool(gpu.choices) == copy.endswith("pageable")
    for choice in gpu.choices:
        assert "test_host_copies.py" in choice
        assert "non_blocking=True lets the host wait" in choice
    del kept


def test_what_is_brought_to_the_host_without_waiting_is_pinned():
    with VirtualGPU("l4") as gpu:
        kept = device().to("cpu", non_blocking=True)
        report = gpu.report()
    assert report.host_pinned_bytes >= kept.nbytes


def test_a_copy_that_waits_holds_up_the_host_on_the_clock():
    """The kernel before it takes ten seconds; what is issued behind the copy begins later than that, or at once."""

    def end_of_next(copy):
        with VirtualGPU("l4") as gpu:
            gpu.work.add(Work("kernel", 0, num_bytes=10 * int(gpu.spec.bandwidth)))
            copy()
            gpu.work.mark("next")
            return Clock(gpu.work.entries).times_on(gpu.spec).starts[-1]

    assert end_of_next(WAITS["to the device, pageable"]) > 10
    assert end_of_next(GOES_ON["to the device, pinned"]) < 0.1


ASKED_TO_WAIT = {
    **{name: copy for name, copy in WAITS.items() if "told to" in name},
    "a number is read": lambda: device()[0].item(),
    "a condition": lambda: bool(device()[0] > 0),
    "where it is not zero": lambda: device().nonzero(),
    "a mask": lambda: device()[device() > 0],
    "indices from the host": lambda: device()[torch.tensor([0, 1])],
    "a comparison": lambda: torch.equal(device(), device()),
    "a stream": lambda: torch.cuda.current_stream().synchronize(),
}
SILENT = {
    "indices that are there": lambda: device()[torch.zeros(2, dtype=torch.int64, device="cuda")],
    **GOES_ON,
    **{name: copy for name, copy in WAITS.items() if "pageable" in name},
    "all streams": lambda: torch.cuda.synchronize(),
    "an event": lambda: torch.cuda.current_stream().record_event().synchronize(),
}


@pytest.mark.parametrize("call", [*ASKED_TO_WAIT, *SILENT])
def test_cudas_debug_mode_warns_of_waits_or_refuses_them(call):
    """Not of all: pageable memory makes the driver wait, and the device as a whole or an event may be waited for."""
    program = {**ASKED_TO_WAIT, **SILENT}[call]
    with VirtualGPU("l4"):
        assert torch.cuda.get_sync_debug_mode() == 0
        program()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            program()
        assert [str(one.message) for one in heard] == ["called a synchronizing CUDA operation"] * (
            call in ASKED_TO_WAIT
        )
        assert all(one.filename == __file__ for one in heard)
        torch.cuda.set_sync_debug_mode(2)
        assert torch.cuda.get_sync_debug_mode() == 2
        if call in ASKED_TO_WAIT:
            with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
                program()
        else:
            program()


PINS = {
    "made so": lambda: torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True),
    "pinned later": lambda: torch.empty(3 * MIB, dtype=torch.uint8).pin_memory(),
    "brought to the host": lambda: torch.empty(3 * MIB, dtype=torch.uint8, device="cuda").to(
        "cpu", non_blocking=True
    ),
}


@pytest.mark.parametrize("pin", PINS)
def test_what_torch_pins_takes_a_power_of_two(pin):
    with VirtualGPU("l4") as gpu:
        kept = PINS[pin]()
        del kept
        again = PINS[pin]()
    assert gpu.report().host_pinned_bytes == 4 * MIB
    assert again.nbytes == 3 * MIB


def test_host_memory_of_our_own_takes_whole_pages():
    with VirtualGPU("l4") as gpu:
        kept = HostMemory(torch.device("cuda"), is_limited=False).allocate(3 * MIB + 1, torch.uint8)
        assert kept.is_pinned()
    assert gpu.report().host_pinned_bytes == 3 * MIB + PAGE_BYTES
