"""What a process of ours holds on the host before any tensor; apart from what traces it, to be read without torch."""

from __future__ import annotations

from lowmem_ft.foundation.units import KIB, MIB

LIBRARIES_BYTES = 362 * MIB
"""What Python with the libraries of a run holds beside tensors and tokenizer, without pages of files: with a build of
torch for CPUs (``scripts/measure_memory.py --whole-runs``; see ``memory/uncertainty.py``)."""

LEAST_PROCESS_BYTES = 250 * MIB
"""Below which no process is that has imported torch and transformers: 297 MiB held once they, datasets and accelerate
are there, and less without optional packages."""

CUDA_BUILD_BYTES = 140 * MIB
"""What a build of torch for CUDA holds beside that where there is no GPU: 130 MiB of torch 2.11.0, 152 of 2.14.1."""

TOKEN_BYTES = KIB
"""Of a tokenizer, for each token: 44 MiB of one with 49 thousand, 128 of one with 131 thousand."""

PROCESS_BESIDE_GPU_BYTES = 2498 * MIB
"""The same with CUDA's libraries in use: an allowance, 1.5 to 3 GiB resident in reports of users; not measured here."""
