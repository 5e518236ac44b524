"""Memory that a real run holds and leaks, and where its time goes, by phase and by layer: for any PyTorch program.

A library of its own: it imports nothing of recipes, techniques, optimizers or our training loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.monitoring.activations import activation_report
    from lowmem_ft.monitoring.leaks import LeakFinder, find_leaks
    from lowmem_ft.monitoring.meter import MemoryMeter
    from lowmem_ft.monitoring.profiling.step_profiler import StepProfiler
    from lowmem_ft.monitoring.recording import record_snapshot

__all__ = ["LeakFinder", "MemoryMeter", "StepProfiler", "activation_report", "find_leaks", "record_snapshot"]

__getattr__ = lazy_exports(__name__)
