"""Shared by all tests: no network, one thread, tiny random models and a tiny tokenizer."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

# Before any HuggingFace import: tests never ask a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("COLUMNS", None)  # pytest imports readline, which sets it for the processes that it starts
os.unsetenv("COLUMNS")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nor do they read what this user has traced, or leave anything with it.
os.environ["LOWMEM_FT_TRACE_CACHE"] = "off"
os.environ["LOWMEM_FT_TRACE_PROCESSES"] = "1"  # the tests run on all cores
import pytest
import torch
from hypothesis import HealthCheck, settings
from linux_process import LinuxProcess
from processes import Forks

pytest_plugins = ["costs"]

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# What is started in the background (`make test &`, nohup) ignores Ctrl-C, and so would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    """Let Triton's kernels be interpreted, unless tests that need a GPU run: Triton asks as it is imported.

    And let Python's collector look each 20,000 new objects, not each 700: imports and rewritten tests are millions
    that stay.
    """
    gc.set_threshold(20_000, 20, 20)
    if "not gpu" in config.option.markexpr or not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_frozen():
    """Half a million objects of imports stay anyway, and what earlier modules have left in caches: none is walked over.

    Else each ``gc.collect()`` would visit all of them, and a Trainer makes several. What asks the collector who holds
    what unfreezes them (``whole_heap``).
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _own_bits_of_optimizers():
    """bitsandbytes keeps for a process how many bits the state of a Trainer's parameters has, by their numbers."""
    if "bitsandbytes" in sys.modules:
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()


def pytest_collection_finish(session):
    """Set what holds for the whole process."""
    # torch asks once what cuBLAS was told, at its first product: tests of deterministic kernels are not the first.
    if torch.cuda.is_available() and any(item.get_closest_marker("gpu") for item in session.items):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def whole_heap():
    """For tests of what walks over the objects that Python knows: all of them, imported ones too."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_environment_object(monkeypatch):
    """Datasets replaces os.environ when it maps in processes, and rich reads the one that it was imported with."""
    monkeypatch.setattr(os, "environ", os.environ)  # put back at the end


@pytest.fixture(autouse=True)
def _own_allocator_setting(monkeypatch, _same_environment_object):
    """Commands set torch's allocator for their process, and estimates of later tests would be by that setting."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that the end of the test restores it, also if it was not set
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch):
    """Commands set logging up for their process, which here is that of all tests and of what captures their logs."""
    monkeypatch.setattr("lowmem_ft.cli.console.logs.set_up_logging", lambda: None)
    log = logging.getLogger("lowmem_ft")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture(scope="session")
def forks():
    """Runs programs in processes of their own, at no cost of imports."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def disk_folder(tmp_path):
    """A folder on a disk: temporary ones are in RAM on some machines. What is tested leaves nothing behind."""
    from lowmem_ft.foundation.errors import UserError
    from lowmem_ft.foundation.host.mapped_files import MappedFiles

    try:
        return MappedFiles(tmp_path).folder
    except UserError:
        return MappedFiles(Path(__file__).parent).folder


class CudaDriver:
    """One CUDA device as libtorch knows it. What torch's own Python checks of an argument, it checks here, too.

    Attributes:
        fraction: the allocator's cap as a share of the device's memory.
        bytes: what the allocator counts: ``allocated`` and ``reserved``, each as it is now and as ``peak``; what this
            process's ``context`` and ``others`` take.
        segments: what the allocator's snapshot shows.
        history: how allocations are recorded; None: they are not.
    """

    def __init__(self, monkeypatch, **properties):
        known = {"name": "NVIDIA H100 80GB HBM3", "total_memory": 80 * 2**30, "major": 9, "minor": 0}
        self.properties = SimpleNamespace(**known, multi_processor_count=132, uuid="abc")
        vars(self.properties).update(properties)
        self.fraction = 1.0
        self.bytes = Counter(context=50)
        self.segments = []
        self.history = None
        self._entries = []
        beneath = {
            "_cuda_getDeviceCount": lambda: 1,
            "_cuda_getDevice": lambda: 0,
            "_cuda_setMemoryFraction": self._set_fraction,
            "_cuda_getMemoryFraction": lambda index: self._of(index) and self.fraction,
            "_cuda_memoryStats": lambda index: self._of(index) and self._stats(),
            "_cuda_emptyCache": lambda: self.bytes.update(
                reserved=self.bytes["allocated"] - self.bytes["reserved"]
            ),
            "_cuda_record_memory_history": self._record_history,
            "_cuda_memorySnapshot": self._snapshot,
            "_cuda_resetPeakMemoryStats": lambda index: self._of(index) and self._reset(),
        }
        for name, function in beneath.items():
            monkeypatch.setattr(torch._C, name, function, raising=False)
        monkeypatch.setattr(torch.cuda, "_get_device_properties", self._properties, raising=False)
        # The device before, of which there is but one; asked for none, the real ones say none.
        monkeypatch.setattr(torch.cuda, "_exchange_device", lambda index: self._of(index) and index)
        monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", lambda index: self._of(index) and index)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
        for module in (torch.cuda, torch.cuda.memory):
            monkeypatch.setattr(module, "_lazy_init", lambda: None)
            monkeypatch.setattr(module, "is_initialized", lambda: True)

    def hold(self, allocated, reserved):
        """Let the allocator hold this much from now on."""
        for name, num_bytes in {"allocated": allocated, "reserved": reserved}.items():
            self.bytes[name] = num_bytes
            self.bytes[f"{name} peak"] = max(self.bytes[f"{name} peak"], num_bytes)
        if self.history is not None:
            self._entries = [*self._entries, {"action": "alloc"}][-self.history["max_entries"] :]

    def cudaMemGetInfo(self, index):
        self._of(index)
        taken = self.bytes["reserved"] + self.bytes["context"] + self.bytes["others"]
        return self.properties.total_memory - taken, self.properties.total_memory

    def _of(self, index):
        assert type(index) is int, index
        assert index in (-1, 0), index
        return True

    def _properties(self, index):
        self._of(index)
        return self.properties

    def _set_fraction(self, fraction, index):
        self._of(index)
        self.fraction = fraction

    def _record_history(
        self,
        enabled,
        context,
        stacks,
        max_entries,
        clear_history,
        compile_context,
        annotations,
        skip_actions,
        record_pinned_host_memory=False,  # this and the next since torch 2.14
        record_cuda=True,
    ):
        assert enabled in (None, "state", "all"), enabled
        assert context in (None, "state", "alloc", "all"), context
        assert stacks in ("python", "all"), stacks
        assert record_cuda
        assert not record_pinned_host_memory
        assert type(clear_history) is type(compile_context) is type(annotations) is bool
        if clear_history or enabled is None:
            self._entries = []
        known = {"context": context, "stacks": stacks, "max_entries": max_entries}
        self.history = None if enabled is None else known

    def _snapshot(self, pool):
        assert pool is None or [type(part) for part in pool] in ([int, int], [int, int, bool]), pool
        return {"segments": self.segments, "device_traces": [list(self._entries)]}

    def _stats(self):
        def counter(name):
            return {"all": {"current": self.bytes[name], "peak": self.bytes[f"{name} peak"]}}

        return {"allocated_bytes": counter("allocated"), "reserved_bytes": counter("reserved")}

    def _reset(self):
        for name in ("allocated", "reserved"):
            self.bytes[f"{name} peak"] = self.bytes[name]


@pytest.fixture
def cuda_driver(monkeypatch):
    """Gives this machine a CUDA device that answers questions and computes nothing; takes its properties.

    Processes of tests have had virtual GPUs, and could not train on a real one.
    """
    monkeypatch.setattr("lowmem_ft.foundation.virtual_device.has_virtual_device", lambda: False)
    return lambda **properties: CudaDriver(monkeypatch, **properties)


@pytest.fixture
def linux_process(monkeypatch):
    """This process, as Linux would show it: the test says what is resident."""
    from lowmem_ft.foundation.system import host_memory
    from lowmem_ft.foundation.units import MIB

    process = LinuxProcess(held=100 * MIB, of_files=50 * MIB)
    monkeypatch.setattr(host_memory, "_STATUS", process)
    monkeypatch.setattr(host_memory, "_CLEAR_REFS", process)
    monkeypatch.setattr(host_memory, "_peak_before", [])
    return process


@pytest.fixture
def llama_as_it_was():
    """Undo what the test's program changes in transformers' Llama: Liger's functions replace its own for good."""
    from transformers.models.llama import modeling_llama

    owners = [
        modeling_llama,
        *(each for each in vars(modeling_llama).values() if _is_of(each, modeling_llama)),
    ]
    kept = [(owner, dict(vars(owner))) for owner in owners]
    yield
    for owner, values in kept:
        for name, value in values.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)


def _is_of(each, module):
    return isinstance(each, type) and each.__module__ == module.__name__


@pytest.fixture(autouse=True)
def no_log_handler_outlives_its_test():
    """A command logs to the captured stderr of its test, which is closed in the next one."""
    before = logging.root.handlers[:]
    yield
    for handler in logging.root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            logging.root.removeHandler(handler)
