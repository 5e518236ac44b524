"""NUMA affinity: the CPU cores near a GPU. Copies between a GPU and memory of another node are slower.

Linux places memory on the node of the thread that touches it first, so it is enough to run a process on its GPU's node
before it pins memory. Accelerate's ``ACCELERATE_CPU_AFFINITY`` does so by ``nvidia-ml-py`` and numbers GPUs without
``CUDA_VISIBLE_DEVICES``; the kernel's own tables need neither.
"""

from __future__ import annotations

import os
from pathlib import Path


def run_near(pci_address: str, root: Path = Path("/")) -> frozenset[int]:
    """Keep this process, and threads that it starts from now on, to the cores of a PCI device's NUMA node.

    Cores that the process may not use now, by ``taskset``, a container or a scheduler, stay forbidden.

    Args:
        pci_address: the device's address, such as ``0000:c1:00.0``.
        root: the folder that contains ``sys``.

    Returns:
        The cores, if the process used more of them before; otherwise nothing, and nothing has changed: the machine has
        one node, its tables do not tell, or the process may use no core of that node.
    """
    if not hasattr(os, "sched_setaffinity"):  # not on Linux
        return frozenset()
    allowed = os.sched_getaffinity(0)
    near = _cores_near(pci_address, root) & allowed
    if not near or near == allowed:
        return frozenset()
    os.sched_setaffinity(0, near)
    return frozenset(near)


def _cores_near(pci_address: str, root: Path) -> set[int]:
    try:
        ranges = (root / "sys/bus/pci/devices" / pci_address / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    cores: set[int] = set()
    for part in filter(None, ranges.split(",")):  # such as 0-15,64-79
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores
