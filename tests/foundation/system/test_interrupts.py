"""Signals in the instants in which a block of signal handlers ends."""

from __future__ import annotations

import signal

from lowmem_ft.foundation.system import signals
from lowmem_ft.foundation.system.interrupts import on_interrupt


def test_a_signal_as_the_wait_in_cpp_closes_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr(signals, "end_at_once", lambda number, frame, leaves: ended.append((number, leaves)))
    set_wakeup_fd, calls = signal.set_wakeup_fd, []

    def interrupted(descriptor, **options):
        before = set_wakeup_fd(descriptor, **options)
        calls.append(descriptor)
        if len(calls) == 2:  # nobody listens any more, and the handlers before are not back yet
            signal.raise_signal(signal.SIGINT)
        return before

    monkeypatch.setattr(signal, "set_wakeup_fd", interrupted)
    with on_interrupt("and nothing was written.", in_native_code=True):
        assert ended == []
    assert ended == [(signal.SIGINT, "and nothing was written.")]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
