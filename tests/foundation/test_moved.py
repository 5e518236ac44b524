"""Documented modules that have moved are found by their old names."""

from __future__ import annotations

import importlib

import pytest

OLD = [
    ("lowmem_ft.errors", "RaceError"),
    ("lowmem_ft.memory.host_memory", "HostMemory"),
    ("lowmem_ft.optimizers.adamw", "AdamW"),
    ("lowmem_ft.techniques.activation_offload", "enable_activation_offload"),
    ("lowmem_ft.techniques.float32_accumulation", "enable_float32_accumulation"),
    ("lowmem_ft.techniques.fully_sharded", "enable_fsdp2"),
    ("lowmem_ft.techniques.optimizer_offload", "enable_optimizer_offload"),
    ("lowmem_ft.techniques.vertical_accumulation", "enable_vertical_accumulation"),
]


@pytest.mark.parametrize("module, name", OLD)
def test_the_old_name_works_and_says_the_new_one(module, name):
    with pytest.warns(DeprecationWarning, match=rf"{module} is lowmem_ft\.\S+ now") as told:
        found = getattr(importlib.import_module(module), name)
    assert found.__name__ == name
    assert found.__module__ in str(told[0].message)
    assert told[0].filename == __file__


def test_the_configs_of_techniques_are_found_where_all_of_them_were():
    from lowmem_ft.techniques import config
    from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig

    with pytest.warns(DeprecationWarning, match=r"techniques\.config is lowmem_ft\.recipe\.tree now"):
        assert config.CheckpointingConfig is CheckpointingConfig


def test_a_name_that_was_never_there_is_an_error_of_the_new_module():
    with pytest.raises(AttributeError, match=r"lowmem_ft\.foundation\.errors"):
        _ = importlib.import_module("lowmem_ft.errors").Nothing


def test_a_changed_name_works_and_says_the_new_one():
    from lowmem_ft import rehearsal

    with pytest.warns(DeprecationWarning, match=r"rehearsal\.Mending is FixSearch now"):
        assert rehearsal.Mending is rehearsal.FixSearch
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rehearsal.Nothing
