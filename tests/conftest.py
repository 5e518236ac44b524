"""Shared by all tests: no network, one thread, tiny random models and a tiny tokenizer."""

from __future__ import annotations

import os

# Before any HuggingFace import: tests never ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
