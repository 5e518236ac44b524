"""Rates at which ranks exchange data: over NVLink, over PCIe, through the host's memory, over a network."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.foundation.catalog.gpu_spec import Gpu

PCIE_LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

NVLINK_EFFICIENCY = 0.8
"""Share that a rank reaches of its GPU's send rate over all NVLinks.

230 to 250 GB/s of 300 with eight A100 (docs.alayanew.com, "NCCL-tests in practice", 2026), some 360 of 450 with eight
H100 where switches do not sum by themselves.
"""

PEER_EFFICIENCY = 0.6
"""Share of PCIe's rate after line coding, where GPUs reach each other.

35 to 45 GB/s of 63 with eight H100 PCIe (same source as NVLink).
"""

THROUGH_HOST_EFFICIENCY = 0.4
"""Share of the same rate where all data goes through the host's memory and every GPU sends and receives at once.

21 to 31 GB/s both ways together, of 31.5 each way (NVIDIA/nccl issue 814, peer access disabled).
"""

NETWORK_BYTES_PER_SECOND = 12.5e9
"""Bytes a second that each machine sends: 100 Gb/s, stated and not known, as networks differ by a factor of thirty."""

SECONDS_PER_COLLECTIVE = 40e-6
"""Seconds of a collective without data: 40 to 43 microseconds among eight RTX 4090 (NVIDIA/nccl issue 1530)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """The link that a rank sends over while a collective runs.

    Args:
        name: its name in words.
        bytes_per_second: bytes a second that each rank sends.
    """

    name: str
    bytes_per_second: float


def pcie_rate(gpu: Gpu) -> float:
    """Return the bytes a second of a GPU's host link each way, after line coding."""
    return PCIE_LANE_BYTES_PER_SECOND[gpu.pcie_generation] * gpu.pcie_lanes


def link_between(gpu: Gpu, num_machines: int = 1) -> Link:
    """Return the slowest link of a ring through all GPUs.

    A ring leaves each machine once, over whatever network that has.

    Args:
        gpu: the kind of GPU.
        num_machines: number of machines that the GPUs are in.
    """
    if gpu.nvlink:
        within = Link(name="NVLink", bytes_per_second=gpu.nvlink * NVLINK_EFFICIENCY)
    elif gpu.reaches_peers:
        within = Link(name="PCIe", bytes_per_second=pcie_rate(gpu) * PEER_EFFICIENCY)
    else:
        within = Link(
            name="PCIe through host memory", bytes_per_second=pcie_rate(gpu) * THROUGH_HOST_EFFICIENCY
        )
    if num_machines == 1 or within.bytes_per_second < NETWORK_BYTES_PER_SECOND:
        return within
    return Link(name="a network of 100 Gb/s", bytes_per_second=NETWORK_BYTES_PER_SECOND)
