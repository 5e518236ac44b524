"""How fast processes exchange data: over NVLink, over PCIe, through the host's memory, over a network."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.catalog.gpu_spec import Gpu

PCIE_LANE_BYTES_PER_SECOND = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}

NVLINK_EFFICIENCY = 0.8
"""Of what a card sends over all its links: 230 to 250 GB/s of 300 with eight A100 (docs.alayanew.com, "NCCL-tests in
practice", 2026), some 360 of 450 with eight H100 where switches do not sum by themselves."""

PEER_EFFICIENCY = 0.6
"""Of PCIe's rate after line coding, where cards reach each other: 35 to 45 GB/s of 63 with eight H100 PCIe (as above).
"""

THROUGH_HOST_EFFICIENCY = 0.4
"""Of the same rate, where all goes through the host's memory and every card sends and receives at once: 21 to 31 GB/s
both ways together, of 31.5 each way (NVIDIA/nccl issue 814, peer access disabled)."""

NETWORK_BYTES_PER_SECOND = 12.5e9
"""Between machines, of each: 100 Gb/s. Networks differ by a factor of thirty; a rate that is stated, not known."""

SECONDS_PER_COLLECTIVE = 40e-6
"""Of one that carries nothing: 40 to 43 microseconds among eight RTX 4090 (NVIDIA/nccl issue 1530)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a process sends over while a collective runs.

    Args:
        name: in words.
        bytes_per_second: that each process sends.
    """

    name: str
    bytes_per_second: float


def pcie_rate(gpu: Gpu) -> float:
    """Bytes a second of a card's host link each way, after line coding."""
    return PCIE_LANE_BYTES_PER_SECOND[gpu.pcie_generation] * gpu.pcie_lanes


def link_between(gpu: Gpu, num_machines: int = 1) -> Link:
    """The slowest link of a ring through all cards.

    A ring leaves each machine once, with whatever network that has.

    Args:
        gpu: the cards.
        num_machines: that they are in.
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
