"""Where the state of an optimizer waits between updates, and how it visits the device chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from lowmem_ft.host.copy_engine import CopyEvent


class StateStorage(Protocol):
    """The place of optimizer state: beside the weights (:class:`DeviceStorage`), or in host memory."""

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, one-dimensional, where state waits.

        Args:
            num_elements: its length.
            dtype: its type.
            device: where the weight is that it belongs to.
        """
        ...

    def visit(
        self, chunks: Iterable[Mapping[str, Tensor]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """For each chunk its tensors on the device, in the chunks' order.

        What the caller changes in them in place is written back when it asks for the next chunk. ``chunks`` may be
        read ahead, so that copies run while an earlier chunk is updated.

        Args:
            chunks: by name, views of tensors where they wait; no element is in two of them.
            device: where the update runs.
        """
        ...

    def written(self, tensor: Tensor) -> CopyEvent:
        """The end of the last copy that brought back what waits in a tensor's storage."""
        ...


class DeviceStorage:
    """State beside the weight it belongs to: a visit gives the very tensors."""

    def allocate(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros on the weight's device."""
        return torch.zeros(num_elements, dtype=dtype, device=device)

    def visit(
        self, chunks: Iterable[Mapping[str, Tensor]], device: torch.device
    ) -> Iterator[dict[str, Tensor]]:
        """The chunks themselves; one that waits elsewhere is copied there and back."""
        for chunk in chunks:
            here = {name: tensor.to(device) for name, tensor in chunk.items()}
            yield here
            for name, tensor in chunk.items():
                if here[name] is not tensor:
                    tensor.copy_(here[name])

    def written(self, tensor: Tensor) -> CopyEvent:
        """Nothing is ever on its way."""
        return CopyEvent()
