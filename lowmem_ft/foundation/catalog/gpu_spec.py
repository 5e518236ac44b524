"""The properties of a GPU on which memory and time depend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lowmem_ft.foundation.catalog.clock_rates import ClockRates, clock_rates, rates_of_estimates
from lowmem_ft.foundation.packages import KERNEL_PACKAGES, kernel_packages_left_out


@dataclass(frozen=True, kw_only=True)
class Price:
    """Price of one GPU for an hour, on demand, in US dollars.

    Args:
        provider: the company that rents it out.
        usd_per_hour: price of one GPU; the price of an instance with eight is divided by eight.
        date: date of the source, ISO; a month if the source names no day.
        source: where the price was read.
    """

    provider: str
    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of the catalogue.

    Args:
        name: name that users type, such as ``rtx-4090``.
        full_name: its driver's name for it.
        memory_bytes: bytes that CUDA can hand out, as ``torch.cuda.get_device_properties`` reports in ``total_memory``:
            the limit for all processes together.
        nvidia_smi_bytes: the total that nvidia-smi prints, with the few hundred MiB that the driver keeps; None if not
            known.
        compute_capability: such as (8, 9).
        num_multiprocessors: number of streaming multiprocessors.
        dense_flops: peak operations per second by type (``float32``, ``tf32``, ``bfloat16``, ``float16``), without
            sparsity and with float32 accumulation, as in training; types that the hardware lacks are missing.
        bandwidth: bandwidth of its memory, bytes per second.
        pcie_generation: PCIe generation of its host link.
        pcie_lanes: PCIe lanes of its host link.
        context_bytes: bytes that a process holds on it in addition to tensors: the CUDA context and the loaded kernels.
        context_is_estimate: whether the context's size was never measured on such a GPU.
        nvlink: bytes per second that it sends over NVLink to the other GPUs of its machine, all links together; 0: it
            has no NVLink, or one bridge to one other GPU, which a ring of more cannot use.
        held_by_others_bytes: bytes that other processes and displays hold of it now, for a GPU of this machine; None:
            not known.
        has_triton: whether its machine has Triton, on which torch's CUDA wheels for Linux depend, and the C compiler
            that Triton needs.
        lacks: packages of ``KERNEL_PACKAGES`` that its machine does not have.
        segments_grow: whether a run there lets the segments of torch's allocator grow if the environment has no
            setting, as under Linux.
        rates: shares of these rates that programs reach, and the seconds of its machine's host.
        prices: prices on demand; empty if no known provider rents it out.
        sources: the source of each number, by field.
        note: what is only guessed of a GPU of this machine that the catalogue does not know; empty: it knows it.
    """

    name: str
    full_name: str
    memory_bytes: int
    nvidia_smi_bytes: int | None = None
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    dense_flops: Mapping[str, float]
    bandwidth: float
    pcie_generation: int
    pcie_lanes: int
    context_bytes: int
    context_is_estimate: bool = True
    nvlink: float = 0.0
    held_by_others_bytes: int | None = None
    has_triton: bool = True
    lacks: frozenset[str] = frozenset()
    segments_grow: bool = True
    rates: ClockRates = field(default_factory=rates_of_estimates)
    prices: tuple[Price, ...] = ()
    sources: Mapping[str, str]
    note: str = ""

    @property
    def available_bytes(self) -> int:
        """Bytes that one more process may take: all of the memory except what others are known to hold."""
        return self.memory_bytes - (self.held_by_others_bytes or 0)

    @property
    def reaches_peers(self) -> bool:
        """True if GPUs of this kind read each other's memory over PCIe, which NVIDIA's driver denies to GeForce."""
        return "GeForce" not in self.full_name

    @property
    def kernel_packages(self) -> tuple[str, ...]:
        """Packages with kernels that transformers takes in a run there; none if estimates leave them out."""
        return () if kernel_packages_left_out() else tuple(sorted(KERNEL_PACKAGES.keys() - self.lacks))

    @property
    def has_bfloat16(self) -> bool:
        """True if it computes with bfloat16 in hardware: since compute capability 8.0; before, torch emulates it."""
        return self.compute_capability >= (8, 0)

    @property
    def in_its_rows_machine(self) -> Gpu:
        """The GPU with the host of the machine that runs of it were timed on, to predict those runs."""
        return replace(self, rates=clock_rates(self.name, self.compute_capability))

    @property
    def cheapest_price(self) -> Price | None:
        """The lowest price per hour; None if no known provider rents it out."""
        return min(self.prices, key=lambda price: price.usd_per_hour, default=None)
