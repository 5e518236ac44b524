"""What a process of ours holds on the host before any tensor; apart from what traces it, to be read without torch."""

from __future__ import annotations

from lowmem_ft.units import MIB

PROCESS_BYTES = 600 * MIB
"""Python with the libraries of a run, beside its tensors: 526 to 555 MiB at the end of ``lowmem-ft train recipe=tiny``
in one virtual environment and 636 in another with the same versions, of whose libraries the system maps larger pieces
at once; 625 to 655 with a tokenizer of 49 thousand tokens, which takes a KiB a token (Linux x86-64, Python 3.11,
torch 2.13.0+cpu, transformers 5.23.0, 2026-11-22)."""

LEAST_PROCESS_BYTES = 300 * MIB
"""Below which no process is that has imported torch and transformers: 486 MiB before the model is loaded where all
optional packages are (as above), and less without them."""

CUDA_PROCESS_BYTES = 1898 * MIB
"""What CUDA's libraries add on the host: an allowance, 1.5 to 3 GiB resident in reports of users; not measured here."""
