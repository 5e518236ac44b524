"""The data that every measured number needs: date, command, hardware and versions; and the GPU's clock and power."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "transformers", "accelerate", "liger-kernel", "bitsandbytes")
"""Packages whose kernels, or whose Python between kernels, a measured number depends on."""

_TURNS = Path(tempfile.gettempdir()) / "lowmem_ft_measurement.lock"
"""File that a process locks while it is on the GPU."""


def measured_on(device: str) -> dict[str, Any]:
    """Return date, command, hardware, host and versions, to store with a measurement on ``cpu`` or ``cuda``."""
    import torch

    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name(device)
        if device == "cuda"
        else f"{processor()}, {torch.get_num_threads()} threads",
        "host": host_facts(),
        "versions": installed_versions(),
    }


def installed_versions() -> dict[str, str]:
    """Return the version of each of ``PACKAGES`` that is installed."""
    found = {name: version_of(name) for name in PACKAGES}
    return {name: number for name, number in found.items() if number is not None}


def version_of(package: str) -> str | None:
    """Return a package's version; None: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def host_facts() -> dict[str, str | int | None]:
    """Return what tells hosts apart that launch kernels at different speeds: processor, kernel, sandbox, Python."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()}",
        "sandbox": _sandbox(platform.release(), _text(Path("/proc/version"))),
        "python": platform.python_version(),
    }


def _sandbox(release: str, banner: str) -> str | None:
    """Return what this system runs in, if its kernel tells; None: it does not.

    Args:
        release: the kernel's release, in which Firecracker's guests mostly say so (``6.18.44-fc``).
        banner: what ``/proc/version`` says; gVisor's has a date of its own (``pkg/sentry/syscalls/linux/linux64.go``).
    """
    if "Sun Jan 10 15:06:54 PST 2016" in banner:
        return "gVisor"
    if "fc" in release.split("-"):
        return "Firecracker"
    return None


def processor() -> str:
    """Return the processor's name; only the architecture if the system has no name."""
    lines = _text(Path("/proc/cpuinfo")).splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def driver_version() -> str:
    """Return the display driver's version by ``nvidia-smi``; some containers lack that."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class GpuMeter:
    """Reads the first GPU's clock and power from outside the process that computes, which it does not hold up.

    NVML (package nvidia-ml-py) is asked where it is there, else ``nvidia-smi`` runs and prints; without either, as
    without a GPU, clock and power are unknown.

    Attributes:
        gpu_name: the GPU's name; None: this machine has no GPU, or no driver.
        driver: its driver's version.
    """

    def __init__(self) -> None:
        self.gpu_name: str | None = None
        self.driver: str | None = None
        self._nvml, self._handle = _nvml_and_first_gpu()
        self._smi: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._seen: list[tuple[float, float]] = []
        if self._nvml is not None:
            self.gpu_name = _as_text(self._nvml.nvmlDeviceGetName(self._handle))
            self.driver = _as_text(self._nvml.nvmlSystemGetDriverVersion())
        elif shutil.which("nvidia-smi") is not None:
            self._ask_nvidia_smi()

    def look(self) -> None:
        """Take clock and power of now."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # a moment without an answer is no sample
                self._seen.append(_clock_and_power(self._nvml, self._handle))
        elif self._smi is not None and self._smi.stdout is not None:
            *lines, self._unread = (self._unread + (self._smi.stdout.read() or b"")).split(b"\n")
            self._seen += [seen for line in lines if (seen := _numbers(line)) is not None]

    def means(self) -> dict[str, float | None]:
        """Return the mean clock and power since the last call; None where the driver does not tell."""
        self.look()
        seen, self._seen = self._seen, []
        clocks, watts = zip(*seen, strict=True) if seen else ((), ())
        return {
            "sm_clock_mhz_mean": round(statistics.fmean(clocks)) if clocks else None,
            "power_watts_mean": round(statistics.fmean(watts)) if watts else None,
        }

    def close(self) -> None:
        """End ``nvidia-smi``, if it runs."""
        if self._smi is not None:
            self._smi.kill()
            self._smi.wait()

    def _ask_nvidia_smi(self) -> None:
        asked = ["nvidia-smi", "--id=0", "--format=csv,noheader,nounits"]
        try:
            names = subprocess.run(
                [*asked, "--query-gpu=name,driver_version"], stdout=subprocess.PIPE, text=True, check=True
            )
            self.gpu_name, self.driver = (part.strip() for part in names.stdout.strip().split(",", 1))
            self._smi = subprocess.Popen(
                [*asked, "--query-gpu=clocks.sm,power.draw", "--loop-ms=200"], stdout=subprocess.PIPE
            )
        except (OSError, ValueError, subprocess.CalledProcessError):  # no driver, or no answer
            return
        assert self._smi.stdout is not None
        os.set_blocking(self._smi.stdout.fileno(), False)


def _nvml_and_first_gpu() -> tuple[Any, Any]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetClockInfo(
            handle, pynvml.NVML_CLOCK_SM
        )  # some sandboxes know the GPU, but not this
        pynvml.nvmlDeviceGetPowerUsage(handle)
    except pynvml.NVMLError:
        return None, None
    return pynvml, handle


def _clock_and_power(nvml: Any, handle: Any) -> tuple[float, float]:
    """Return MHz of the multiprocessors, and watts."""
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    return float(clock), nvml.nvmlDeviceGetPowerUsage(handle) / 1000


def _as_text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older versions of the package return bytes


def _numbers(line: bytes) -> tuple[float, float] | None:
    """Return the two numbers of a line of ``nvidia-smi``; None: it says that one of them is not to be had."""
    try:
        clock, watts = map(float, line.split(b","))
    except ValueError:
        return None
    return clock, watts


def require_device(device: str) -> None:
    """Exit if a script shall measure on a device that torch does not see: it would run on the processor instead.

    Raises:
        SystemExit: with a message that says what is missing.
    """
    if device != "cuda":
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"--device cuda needs a CUDA device, and torch {torch.__version__} sees none on this machine."
        )


def wait_for_the_gpu() -> None:
    """Keep the GPU from this script's other processes until this one ends; wait while another has it.

    Processes that take turns import everything at once, which takes longer than some measurements do.
    """
    fcntl.flock(os.open(_TURNS, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def _text(file: Path) -> str:
    return file.read_text() if file.exists() else ""
