"""What the checker calls a race is one: on a device whose copies come late, the same program gets other numbers."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import RaceError
from lowmem_ft.foundation.host import copy_engine
from lowmem_ft.foundation.host.copy_engine import CopyEngine


def computing_with_what_a_copy_brings(engine, host, here, waits):
    arrived = engine.to_device(host, here)
    if waits:
        engine.wait(arrived)
    return here.sum()


def reading_on_the_host_what_a_copy_brings(engine, host, here, waits):
    left = engine.to_host(here, host)
    if waits:
        left.synchronize()
    return host.sum()


def sending_back_what_another_copy_brings(engine, host, here, waits):
    back = host.clone().pin_memory()
    arrived = engine.to_device(host, here)
    engine.to_host(here, back, after=[arrived] if waits else []).synchronize()
    return back.sum()


SUM_AFTER = {
    computing_with_what_a_copy_brings: 4,
    reading_on_the_host_what_a_copy_brings: 0,
    sending_back_what_another_copy_brings: 4,
}
"""What each program returns if it waits, of four ones on the host and four zeros on the device."""


class LateStream:
    """A stream whose work is done when somebody waits for it, or at once; each of its events is the end of it all."""

    def __init__(self, *, at_once=False):
        self.at_once, self.work = at_once, []

    def give(self, work):
        self.work.append(work)
        if self.at_once:
            self.synchronize()

    def synchronize(self):
        while self.work:
            self.work.pop(0)()

    def record_event(self):
        return self

    def wait_event(self, other):
        self.give(other.synchronize)


class LateCPU(TorchFunctionMode):
    """A CPU as the device of a copy engine: what it computes is done at once, its copies when somebody waits."""

    def __init__(self):
        super().__init__()
        self.current = LateStream(at_once=True)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.is_pinned:
            return True
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.copy_:
            return self.current.give(partial(args[0].copy_, args[1]))
        return func(*args, **(kwargs or {}))

    def Stream(self, device):
        return LateStream()

    def current_stream(self, device):
        return self.current

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


@pytest.mark.parametrize("waits", [True, False], ids=["with the wait", "without it"])
@pytest.mark.parametrize("program", SUM_AFTER, ids=lambda program: program.__name__)
def test_a_missing_wait_is_found_where_late_copies_show_it(program, waits, monkeypatch):
    gpu = VirtualGPU("t4", check_streams=True)
    with contextlib.suppress(RaceError), gpu:
        host, here = torch.ones(4, pin_memory=True), torch.zeros(4, device=gpu.device)
        program(CopyEngine(gpu.device), host, here, waits)
    cpu, late = torch.device("cpu"), LateCPU()
    monkeypatch.setattr(copy_engine, "kernels_of", lambda device: "cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda device: late)
    host, here = torch.ones(4), torch.zeros(4)
    with late:
        result = program(CopyEngine(cpu), host, here, waits)
    assert (gpu.races == ()) == waits
    assert (result == SUM_AFTER[program]) == waits
