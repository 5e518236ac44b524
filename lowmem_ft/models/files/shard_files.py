"""Tensors sharded among several processes, each of which writes its parts to its own safetensors files.

A file's header says where each part begins, in the format of torch's ``HuggingFaceStorageWriter``, so that
``torch.distributed.checkpoint`` reads these files, too; our reader needs no process group, and reads into any number of
processes. The header also names the file's checkpoint: the files of two checkpoints have the same names and sizes.

Reading names and headers imports no torch.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.system.atomic_write import flush_to_disk
from lowmem_ft.foundation.units import GIB

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

MODEL, OPTIMIZER = "model", "optimizer"
"""Contents of files."""

MOST_BYTES = 2 * GIB
"""Maximum bytes of tensors in one file.

safetensors holds a file in host memory while writing it: this bounds that, whatever the optimizer's size.
"""

_NAME = re.compile(rf"shard-(\d{{5}})-of-(\d{{5}})-({MODEL}|{OPTIMIZER})-\d{{5}}\.safetensors")
_BEGINS, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's
_CHECKPOINT = "lowmem_ft_checkpoint"
_SHAPES = "lowmem_ft_shapes"


def _file_name(process_index: int, num_processes: int, what: str, number: int) -> str:
    """Return the name of one of a process's files."""
    return f"shard-{process_index:05d}-of-{num_processes:05d}-{what}-{number:05d}.safetensors"


def shard_files(folder: Path, what: str) -> list[Path]:
    """Return the files of all processes in a folder, in the order of the processes; none in any other folder."""
    if not folder.is_dir():
        return []
    return sorted(
        file for file in folder.iterdir() if (found := _NAME.fullmatch(file.name)) and found[3] == what
    )


def checkpoint_of(file: Path) -> str | None:
    """Return the checkpoint that a file was written for; None: it is not one of ours, or is damaged."""
    try:
        with file.open("rb") as raw:
            length = struct.unpack("<Q", raw.read(8))[0]
            return json.loads(raw.read(length))["__metadata__"][_CHECKPOINT]
    except (OSError, ValueError, KeyError, TypeError, struct.error, OverflowError, MemoryError):
        return None


@dataclass(frozen=True)
class Part:
    """A process's part of a tensor.

    Args:
        values: this process's values, contiguous or not.
        begins: where they begin in the whole, in each dimension.
        shape: shape of the whole.
    """

    values: Tensor
    begins: Sequence[int]
    shape: Sequence[int]


class ShardWriter:
    """Writes one process's files of a checkpoint.

    Args:
        folder: the folder that all processes write into.
        checkpoint: its id; the same in all processes, and in no other checkpoint.
        process_index: index of this process.
        num_processes: number of processes that write.
    """

    def __init__(self, folder: Path, checkpoint: str, process_index: int, num_processes: int) -> None:
        self._folder, self._checkpoint = folder, checkpoint
        self._process_index, self._num_processes = process_index, num_processes

    def write(self, what: str, parts: Iterable[tuple[str, Part]]) -> None:
        """Write parts by name, as many to a file as fit, each file flushed to disk.

        Raises:
            OSError: if one cannot be written.
            SafetensorError: likewise.
        """
        for number, together in enumerate(by_file(parts, lambda part: part.values.nbytes)):
            name = _file_name(self._process_index, self._num_processes, what, number)
            self._write(self._folder / name, together)

    def _write(self, file: Path, parts: Mapping[str, Part]) -> None:
        from safetensors.torch import save_file

        begins = {name: {_OFFSETS: list(part.begins)} for name, part in parts.items()}
        metadata = {
            "format": "pt",
            _CHECKPOINT: self._checkpoint,
            _BEGINS: json.dumps(begins),
            _SHAPES: json.dumps({name: list(part.shape) for name, part in parts.items()}),
        }
        save_file({name: part.values.detach().contiguous() for name, part in parts.items()}, file, metadata)
        flush_to_disk(file)  # on the writer: another machine's kernel does not know of these pages


class CutTensor:
    """A tensor in parts, in the form that ``from_pretrained(state_dict=...)`` takes; read on demand.

    Args:
        name: name of the tensor.
        shape: shape of the whole.
        parts: by the first row of each, safetensors' slice of it.

    Raises:
        CheckpointError: if a row is in no part.
    """

    def __init__(self, name: str, shape: Sequence[int], parts: Iterable[tuple[int, Any]]) -> None:
        self._shape, self.parts = list(shape), sorted(parts, key=lambda part: part[0])
        end = 0
        for first, values in self.parts:
            end = first + num_rows(values) if first == end else -1
        if self._shape and end != self._shape[0]:
            raise CheckpointError(
                f"The checkpoint is damaged: some of the {self._shape[0]} rows of {name} are missing. Resume from "
                "another checkpoint."
            )

    def get_shape(self) -> list[int]:
        """Return the shape of the whole."""
        return self._shape

    def get_dtype(self) -> str:
        """Return the type by safetensors' name."""
        return self.parts[0][1].get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        """Join the parts; for a slice of rows, read only those rows."""
        import torch

        rows = range(self._shape[0] if self._shape else 1)
        if isinstance(index, slice) and index.step in (None, 1) and rows[index]:
            rows, index = rows[index], ...
        read = [
            values[max(rows.start - first, 0) : min(rows.stop - first, num_rows(values))]
            if self._shape
            else values[...]
            for first, values in self.parts
            if first < rows.stop and rows.start < first + num_rows(values)
        ] or [self.parts[0][1][...]]  # no rows at all
        whole = torch.cat(read) if len(read) > 1 else read[0]
        return whole[index]


def num_rows(values: Any) -> int:
    """Return the rows of a tensor, or of safetensors' slice of one; 0 dimensions count as one row."""
    shape = values.get_shape() if hasattr(values, "get_shape") else values.shape
    return shape[0] if shape else 1


def cut_tensors(files: Iterable[Path]) -> dict[str, CutTensor]:
    """Return by name the tensors whose parts these files hold.

    Raises:
        CheckpointError: if a part is missing, or a file was not written by :class:`ShardWriter`.
    """
    from safetensors import safe_open

    parts: dict[str, list[tuple[int, Any]]] = {}
    shapes: dict[str, list[int]] = {}
    for file in files:
        opened: Any = safe_open(file, framework="pt", backend="pread")
        try:
            metadata = opened.metadata()
            begins = json.loads(metadata[_BEGINS])
            shapes |= json.loads(metadata[_SHAPES])
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                first = begins[name][_OFFSETS][0] if begins[name][_OFFSETS] else 0
                parts.setdefault(name, []).append((first, opened.get_slice(name)))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file} is damaged: its header does not say which rows it holds. Resume from another checkpoint."
            ) from error
    return {name: CutTensor(name, shapes[name], found) for name, found in parts.items()}


def by_file(tensors: Iterable[tuple[str, T]], num_bytes: Callable[[T], int]) -> Iterator[dict[str, T]]:
    """Group named tensors into files, in their order.

    Args:
        tensors: tensors, or values that represent them.
        num_bytes: returns the bytes of one.

    Yields:
        The tensors of one file: at most ``MOST_BYTES``, or a single one.
    """
    together: dict[str, T] = {}
    size = 0
    for name, tensor in tensors:
        if together and size + num_bytes(tensor) > MOST_BYTES:
            yield together
            together, size = {}, 0
        together[name] = tensor
        size += num_bytes(tensor)
    if together:
        yield together
