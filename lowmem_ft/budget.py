"""The promise a run makes about memory: how much of the device and of the host it may take."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.knob import knob


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that a run may use, as text such as ``24GiB`` (2**30 bytes each) or ``24GB`` (10**9)."""

    device: str | None = knob(None, "Device memory the run may use, such as 24GiB; null: all there is.")
    host: str | None = knob(None, "Host memory (resident) the run may use, such as 64GiB; null: no limit.")
    enforce: bool = knob(
        True, "On CUDA, cap the caching allocator at budget.device, so that exceeding it is an OOM."
    )
