"""Names by which a program may refer to its device: the only one, or that of its rank."""

from __future__ import annotations

from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.calls.active import active_gpu_or_none


def device_index(device: Any, *, optional: bool = True) -> int:
    """Return the index of a device, by the very rules of ``torch.cuda``.

    Args:
        device: the device as a program names it.
        optional: whether a device without an index is the current one.

    Raises:
        ValueError: if torch does not take it.
        UserError: for the GPU of another rank, or a second one.
    """
    if isinstance(device, (str, torch.device)) and torch.device(device).type == DEVICE_TYPE:
        index = torch.device(device).index
        device = torch.device("cuda") if index is None else torch.device("cuda", index)
    if device is None or device == -1:
        return 0
    index = _get_device_index(device, optional=optional)
    gpu = active_gpu_or_none()
    if gpu is not None and index == gpu.peers.process_index:
        return 0
    if index and gpu is not None and gpu.peers.num_processes > 1:
        raise UserError(
            f"Each rank has its own GPU, but rank {gpu.peers.process_index} asks for cuda:{index}. Let the program "
            "take that of LOCAL_RANK."
        )
    if index:
        raise UserError(
            f"A virtual GPU represents one device, cuda:0, got cuda:{index}. Run one process of the program, on one "
            "GPU."
        )
    return index
