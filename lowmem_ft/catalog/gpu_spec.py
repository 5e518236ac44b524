"""What a GPU is, as far as memory and time depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Price:
    """What one GPU costs for an hour, on demand, in US dollars.

    Args:
        provider: who rents it out.
        usd_per_hour: of one GPU; an instance with eight is divided by eight.
        date: of the source, ISO; a month where the source names no day.
        source: where it was read.
    """

    provider: str
    usd_per_hour: float
    date: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of the catalogue.

    Args:
        name: as typed by users, such as ``rtx-4090``.
        full_name: as its driver calls it.
        memory_bytes: what CUDA can hand out, as ``torch.cuda.get_device_properties`` reports in ``total_memory``: the
            limit for what processes use.
        nvidia_smi_bytes: the total that nvidia-smi prints, with the few hundred MiB that the driver keeps; None if not
            known.
        compute_capability: such as (8, 9).
        num_multiprocessors: streaming multiprocessors.
        dense_flops: peak operations a second by type (``float32``, ``tf32``, ``bfloat16``, ``float16``), without
            sparsity and with float32 accumulation, as training has it; a type that the hardware lacks is missing.
        bandwidth: of its memory, bytes a second.
        pcie_generation: of its host link.
        pcie_lanes: of its host link.
        context_bytes: what a process holds on it beside the tensors: the CUDA context and the kernels it has loaded.
        nvlink: bytes a second that it sends over NVLink to the other cards of its machine, all links together; 0: it
            has none, or one bridge to one other card, which a ring of more cannot use.
        held_by_others_bytes: what other processes and displays hold of it now, where it is one of this machine's; None:
            not known.
        has_triton: whether the machine that it is in has Triton, which torch's CUDA wheels for Linux depend on, and the
            C compiler that Triton needs.
        segments_grow: whether a run there lets the segments of torch's allocator grow where the environment has no
            setting, as under Linux.
        prices: on demand; empty if nobody rents it out.
        sources: where each of the numbers comes from, by field.
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
    nvlink: float = 0.0
    held_by_others_bytes: int | None = None
    has_triton: bool = True
    segments_grow: bool = True
    prices: tuple[Price, ...] = ()
    sources: Mapping[str, str]

    @property
    def available_bytes(self) -> int:
        """What one more process may take: all of the memory, but for what others are known to hold."""
        return self.memory_bytes - (self.held_by_others_bytes or 0)

    @property
    def context_is_estimate(self) -> bool:
        """Whether nobody has read the size of its context: it follows from the number of multiprocessors."""
        return self.sources.get("context_mib", "estimate").startswith("estimate")

    @property
    def reaches_peers(self) -> bool:
        """Whether cards of this kind read each other's memory over PCIe, which NVIDIA's driver keeps from GeForce."""
        return "GeForce" not in self.full_name

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes with bfloat16 in hardware: since compute capability 8.0; before, torch emulates it."""
        return self.compute_capability >= (8, 0)

    @property
    def cheapest_price(self) -> Price | None:
        """The lowest price an hour; None if nobody rents it out."""
        return min(self.prices, key=lambda price: price.usd_per_hour, default=None)
