"""Shared by all tests: no network, one thread, tiny random models and a tiny tokenizer."""

from __future__ import annotations

import os
from pathlib import Path

# Before any HuggingFace import: tests never ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def disk_folder(tmp_path):
    """A folder on a disk: temporary ones are in RAM on some machines. What is tested leaves nothing behind."""
    from lowmem_ft.errors import UserError
    from lowmem_ft.memory.mapped_files import MappedFiles

    try:
        return MappedFiles(tmp_path).folder
    except UserError:
        return MappedFiles(Path(__file__).parent).folder
