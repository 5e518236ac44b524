"""The settings string is read as PyTorch reads it, and what cannot be honoured is refused."""

import logging

import pytest

from lowmem_ft.foundation.allocator_setting import allocator_setting
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.units import MIB


def test_nothing_set_means_the_defaults():
    assert AllocatorConfig.parse("") == AllocatorConfig()


def test_reads_every_key():
    config = AllocatorConfig.parse(
        "expandable_segments:True, max_split_size_mb:128, max_non_split_rounding_mb:64,"
        "large_segment_size_mb:32, garbage_collection_threshold:0.8, roundup_power2_divisions:4,"
    )
    assert config == AllocatorConfig(
        expandable_segments=True,
        max_split_size_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        large_segment_size_bytes=32 * MIB,
        garbage_collection_threshold=0.8,
        roundup_power2_divisions=(4,) * 16,
    )


# Numbers: c10/test/core/AllocatorConfig_test.cpp of PyTorch.
@pytest.mark.parametrize(
    "megabytes, divisions",
    [(32, 8), (64, 8), (128, 2), (256, 4), (512, 2), (1024, 4), (2048, 1), (4096, 1), (8192, 1)],
)
def test_divisions_by_size_as_in_upstreams_own_test(megabytes, divisions):
    config = AllocatorConfig.parse("roundup_power2_divisions:[64:8,128:2,256:4,512:2,1024:4,>:1]")
    assert config.roundup_divisions(megabytes * MIB) == divisions


@pytest.mark.parametrize("size", [1, 512, MIB - 1, MIB, 2 * MIB - 1])
def test_sizes_below_the_first_interval_share_its_divisions(size):
    assert AllocatorConfig.parse("roundup_power2_divisions:[4:2]").roundup_divisions(size) == 2


def test_intervals_between_two_named_ones_are_off():
    config = AllocatorConfig.parse("roundup_power2_divisions:[4:2,16:4]")
    assert [config.roundup_divisions(size * MIB) for size in (2, 4, 8, 16, 32)] == [2, 2, 0, 4, 0]


def test_rest_alone_leaves_sizes_below_2_mib_as_they_are():
    config = AllocatorConfig.parse("roundup_power2_divisions:[>:4]")
    assert config.roundup_divisions(2 * MIB - 1) == 0
    assert config.roundup_divisions(2 * MIB) == 4


@pytest.mark.parametrize(
    "text, hint",
    [
        ("expandable_segment:True", "Did you mean `expandable_segments`?"),
        ("expandable_segments", "True or False"),
        ("expandable_segments:true", "True or False"),
        ("max_split_size_mb:2", "at least 20"),
        ("large_segment_size_mb:64,max_split_size_mb:40", "at least 64"),
        ("large_segment_size_mb:10", "at least 11"),
        ("max_non_split_rounding_mb:10", "at least 20"),
        ("garbage_collection_threshold:0", "between 0 and 1"),
        ("garbage_collection_threshold:half", "between 0 and 1"),
        ("roundup_power2_divisions:0", "a power of two"),
        ("roundup_power2_divisions:[60:4]", "a power of two"),
        ("roundup_power2_divisions:[64:8", "a power of two"),
        ("max_split_size_mb:30,,expandable_segments:True", "no key ``"),
        ("backend:own", "native"),
        ("per_process_memory_fraction:0.5", "budget.device"),
    ],
)
def test_what_cannot_be_honoured_is_refused(text, hint):
    with pytest.raises(UserError) as raised:
        AllocatorConfig.parse(text)
    assert hint in str(raised.value)
    assert "PYTORCH_CUDA_ALLOC_CONF" in str(raised.value)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("text", ["garbage:1", "max_split_size_mb:2"])
def test_the_variable_that_is_set_is_named(monkeypatch, variable, text):
    monkeypatch.setenv(variable, text)
    with pytest.raises(UserError, match=rf"^{variable}\b"):
        AllocatorConfig.parse(allocator_setting())


def test_all_problems_are_told_at_once():
    with pytest.raises(UserError) as raised:
        AllocatorConfig.parse("foo:1,bar:2,max_split_size_mb:2")
    assert len(raised.value.problems) == 3


def test_keys_without_effect_on_device_memory_are_accepted_and_named(caplog):
    with caplog.at_level(logging.INFO, logger="lowmem_ft"):
        config = AllocatorConfig.parse("backend:native,pinned_use_background_threads:True")
    assert config == AllocatorConfig()
    assert "pinned_use_background_threads" in caplog.text
