"""A run sets torch's allocator up unless its environment does, and estimates of recipes know."""

import os

import pytest
import torch

from lowmem_ft.foundation import allocator_setting, wsl
from lowmem_ft.foundation.allocator_setting import use_growing_segments
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.virtual_gpu.replay.trace_estimate import (
    allocator_config_of_environment,
    allocator_config_of_runs,
)

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (NEW, OLD):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(allocator_setting.sys, "platform", "linux")
    monkeypatch.setattr(wsl.platform, "release", lambda: "6.1.0-28-amd64")


def test_a_run_grows_its_segments_and_its_estimate_knows():
    assert allocator_config_of_runs(find_gpu("rtx-4090")).expandable_segments
    assert not allocator_config_of_environment().expandable_segments
    use_growing_segments()
    assert os.environ[NEW] == "expandable_segments:True"
    assert allocator_config_of_environment() == allocator_config_of_runs(find_gpu("rtx-4090"))


@pytest.mark.parametrize("name", [NEW, OLD])
@pytest.mark.parametrize("setting", ["", "max_split_size_mb:64"])
def test_what_the_environment_says_counts(name, setting, monkeypatch):
    monkeypatch.setenv(name, setting)
    use_growing_segments()
    assert {key: os.environ.get(key) for key in (NEW, OLD)} == {NEW: None, OLD: None, name: setting}
    assert not allocator_config_of_runs(find_gpu("rtx-4090")).expandable_segments


def test_a_gpu_in_use_keeps_what_it_has(monkeypatch):
    """Torch has read the variables by then: what they say later would be true of nothing."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    use_growing_segments()
    assert NEW not in os.environ


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_torch_has_them_on_linux_alone(platform, monkeypatch):
    monkeypatch.setattr(allocator_setting.sys, "platform", platform)
    use_growing_segments()
    assert NEW not in os.environ


def test_under_wsl_a_run_and_its_estimate_leave_torchs_default(monkeypatch, cuda_driver):
    """There the first allocation can fail with growing segments; cards of the catalogue are rented with Linux."""
    monkeypatch.setattr(wsl.platform, "release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    cuda_driver(name="NVIDIA GeForce RTX 4090", total_memory=2**34, major=8, minor=9)
    use_growing_segments()
    assert NEW not in os.environ
    own = this_machines_gpu()
    assert not allocator_config_of_runs(own).expandable_segments
    assert allocator_config_of_runs(find_gpu("rtx-4090")).expandable_segments
    monkeypatch.setenv(NEW, "expandable_segments:True")  # the user has tried it
    assert allocator_config_of_runs(own).expandable_segments
