"""Storage of an optimizer's state between updates, and its visits to the device chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from lowmem_ft.foundation.host.copy_engine import CopyEvent


class StateStorage(Protocol):
    """Storage of optimizer state: on the weights' device (:class:`DeviceStorage`), or in host memory."""

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate one-dimensional zeros in this storage.

        Args:
            num_elements: its length.
            dtype: its type.
            device: the device of its weight.
        """
        ...

    def visit(
        self, chunks: Iterable[Mapping[str, Tensor]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """Yield for each chunk its tensors on the device, in the chunks' order.

        In-place changes by the caller are written back when it requests the next chunk. ``chunks`` may be read ahead,
        so that copies run while an earlier chunk is updated.

        Args:
            chunks: by name, views of tensors in this storage; no element is in two of them.
            device: the device that the update runs on.
        """
        ...

    def written(self, tensor: Tensor) -> CopyEvent:
        """Return the end of the last copy back to a tensor's storage."""
        ...


class DeviceStorage:
    """State on its weight's device: a visit yields the stored tensors themselves."""

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros on the weight's device."""
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def visit(
        self, chunks: Iterable[Mapping[str, Tensor]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the chunks themselves; one that is stored elsewhere is copied to the device and back."""
        for chunk in chunks:
            here = {name: tensor.to(device) for name, tensor in chunk.items()}
            yield here
            for name, tensor in chunk.items():
                if here[name] is not tensor:
                    tensor.copy_(here[name])

    def written(self, tensor: Tensor) -> CopyEvent:
        """Return a complete event: no copy is ever in progress."""
        return CopyEvent()
