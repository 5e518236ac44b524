"""A GPU's part of a profile by torch: what it did, and how long it waited for the host."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch.profiler import profile

KINDS = {
    "attention": ("flash", "sdpa", "fmha"),
    "products": ("nvjet", "gemm", "cublas", "cutlass"),
    "update": ("update_chunk", "koptimizer"),
    "Liger": ("rms_norm", "swiglu", "_triton_rope", "liger_", "element_mul"),
}
"""Parts of the names of kernels; the first kind with one counts."""


def events_of(recorded: profile) -> list[dict[str, Any]]:
    """Return what the GPU did: kernels, copies, fills; ``ts`` and ``dur`` in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def digest(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds in which the GPU computed and waited, by length of the gaps and by kind of kernel."""
    events = sorted(events, key=lambda event: event["ts"])
    seconds: Counter[str] = Counter()
    gaps: Counter[str] = Counter()
    end = events[0]["ts"]
    for event in events:
        seconds[kind_of(event["name"])] += event["dur"] * 1e-6
        gap = max(event["ts"] - end, 0)
        gaps["below 10 us" if gap < 10 else "below 100 us" if gap < 100 else "longer"] += gap * 1e-6
        end = max(end, event["ts"] + event["dur"])
    span = (end - events[0]["ts"]) * 1e-6
    return {
        "kernels": len(events),
        "profiled_seconds": span,
        "busy_seconds": span - sum(gaps.values()),
        "idle_seconds": dict(gaps),
        "seconds_by_kind": dict(seconds),
    }


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "others")
