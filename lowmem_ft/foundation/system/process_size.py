"""Host memory of our processes before any tensor; apart from the tracing code, so that reading it needs no torch."""

from __future__ import annotations

from lowmem_ft.foundation.units import KIB, MIB

LIBRARIES_BYTES = 362 * MIB
"""Bytes that Python with the libraries of a run holds, without tensors, tokenizer and pages of files: with a build of
torch for CPUs (``scripts/measure_memory.py --whole-runs``; see ``foundation/memory/uncertainty.py``)."""

LEAST_PROCESS_BYTES = 250 * MIB
"""Least bytes of any process that has imported torch and transformers: 297 MiB held with them, datasets and
accelerate, and less without optional packages."""

CUDA_BUILD_BYTES = 140 * MIB
"""Bytes that a build of torch for CUDA adds without a GPU: 130 MiB with torch 2.11.0, 152 with 2.14.1."""

TOKEN_BYTES = KIB
"""Bytes of a tokenizer per token: 44 MiB for one with 49 thousand, 128 for one with 131 thousand."""

HOST_BYTES_WITH_CUDA = 2498 * MIB
"""Bytes of a process with CUDA's libraries in use: an allowance, as users report 1.5 to 3 GiB resident; not measured
here."""
