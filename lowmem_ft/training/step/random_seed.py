"""The seed of a run. Apart from the state, as an estimate need not wait for the import of ``set_seed``."""

from __future__ import annotations

from transformers import set_seed

from lowmem_ft.recipe import TrainingConfig


def seed_generators(config: TrainingConfig, process_index: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators; each process draws other numbers."""
    set_seed(config.seed + process_index, deterministic=config.full_determinism)
