"""Ctrl-C on a virtual GPU: it comes, and not in the middle of a backward pass, where it would end the process."""

from __future__ import annotations

import signal
import time

import pytest
import torch

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

happened: list[str] = []


class PressesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, number):
        ctx.number = number
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        signal.raise_signal(ctx.number)
        happened.append("backward went on")
        return gradient, None


@pytest.fixture(autouse=True)
def as_python_starts():
    happened.clear()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def pressed_in_backward(number: int = signal.SIGINT) -> None:
    with VirtualGPU("t4"):
        weight = torch.ones(4, device="cuda", requires_grad=True)
        PressesInBackward.apply(weight, number).sum().backward()
        happened.append("backward ended")
        for _ in range(1200):  # a signal that another thread sends does not end a sleep
            time.sleep(0.05)
        happened.append("nobody was told")


def test_it_waits_for_the_end_of_backward():
    with pytest.raises(KeyboardInterrupt):
        pressed_in_backward()
    assert happened[0] == "backward went on"
    assert "nobody was told" not in happened


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_of_the_program_is_asked_then(number):
    def handler(number, frame):
        happened.append("handled")
        raise TimeoutError

    before = signal.signal(number, handler)
    with pytest.raises(TimeoutError):
        pressed_in_backward(number)
    assert signal.signal(number, before) is handler
    assert happened.index("backward went on") < happened.index("handled")


def test_elsewhere_it_comes_at_once():
    with VirtualGPU("t4"), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_what_is_ignored_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with VirtualGPU("t4"):
        signal.raise_signal(signal.SIGINT)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN
