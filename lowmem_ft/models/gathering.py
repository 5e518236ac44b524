"""Gather a model sharded among several processes, and write it as one that vanilla ``from_pretrained`` loads."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.tensors.local_shards import whole_shape, whole_tensor
from lowmem_ft.models.files.model_files import INDEX_FILE, WEIGHTS_FILE
from lowmem_ft.models.saving import MAX_SHARD_BYTES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Source:
    """A weight of the model.

    Args:
        name: its name in the model.
        saved: the tensors made from it, by their names in files, on the meta device.
    """

    name: str
    saved: Mapping[str, Tensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.saved.values())


@torch.no_grad()
def write_gathered_weights(
    model: PreTrainedModel,
    folder: Path,
    *,
    writes: bool,
    most_bytes: int = MAX_SHARD_BYTES,
    values: Callable[[str], Tensor | None] | None = None,
) -> None:
    """Write the weights to files of at most ``most_bytes``; every process calls this, unless they come from ``values``.

    Each weight is gathered by itself, so that a process holds only one weight of the others' at a time. The writing
    process also holds those of one file, on the host. If its writing fails, it continues gathering, as the others do.

    Args:
        model: the model, with sharded parameters.
        folder: an existing folder.
        writes: whether this process writes.
        values: returns the values of a weight by its name, those of a checkpoint for instance; None: the model's own.
        most_bytes: maximum bytes of the tensors in a file; a larger weight has its own.

    Raises:
        CheckpointError: if the model has a conversion of weights that cannot be reverted one weight at a time.
        OSError: if a file cannot be written.
    """
    tensors = saved_tensors(model)
    files = _plan(_sources(model, tensors), most_bytes)
    problem: Exception | None = None
    for name, sources in zip(_file_names(len(files)), files, strict=True):
        together: dict[str, Tensor] = {}
        for source in sources:
            own = tensors[source.name]
            gathered = whole_tensor(own) if values is None else values(source.name)
            if gathered is None:
                raise CheckpointError(f"The checkpoint has no weight {source.name}. Resume from another one.")
            if writes and problem is None:
                together |= revert_weight_conversion(model, {source.name: gathered.cpu()})
            del gathered
        if writes and problem is None:
            try:
                contiguous = {name: tensor.contiguous() for name, tensor in together.items()}
                save_file(contiguous, folder / name, {"format": "pt"})
            except Exception as error:  # any error: the others would wait for what is not gathered here
                problem = error
    if writes and problem is None and len(files) > 1:
        _write_index(model, folder, files)
    if problem is not None:
        raise problem


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of a model to save, by name: each parameter by one of its names, and buffers."""
    ignored = model._keys_to_ignore_on_save or ()
    parameters = dict(model.named_parameters())
    every_name = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in every_name}
    return {name: tensor for name, tensor in (parameters | buffers).items() if name not in ignored}


def refuse_unsaveable(model: PreTrainedModel) -> None:
    """Reject, before training, a model that :func:`write_gathered_weights` could not write.

    Raises:
        CheckpointError: naming the weights.
    """
    _sources(model, saved_tensors(model))


def _sources(model: PreTrainedModel, tensors: Mapping[str, Tensor]) -> list[_Source]:
    hollow = {
        name: torch.empty(whole_shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    expected = revert_weight_conversion(model, dict(hollow))
    sources = [
        _Source(name, revert_weight_conversion(model, {name: tensor})) for name, tensor in hollow.items()
    ]
    made = {name: tensor.shape for source in sources for name, tensor in source.saved.items()}
    wrong = sorted(
        name
        for name in {*made, *expected}
        if name not in made or name not in expected or made[name] != expected[name].shape
    )
    if wrong:
        raise CheckpointError(
            f"Weights of several processes are saved one at a time, and the files of {type(model).__name__} have some "
            f"that combine several of them: {', '.join(wrong[:3])}. Set distributed.strategy=ddp, or train in one "
            "process."
        )
    return sources


def _plan(sources: list[_Source], most_bytes: int) -> list[list[_Source]]:
    """Assign the weights to files."""
    files: list[list[_Source]] = []
    num_bytes = math.inf
    for source in sources:
        if num_bytes + source.num_bytes > most_bytes:
            files.append([])
            num_bytes = 0
        files[-1].append(source)
        num_bytes += source.num_bytes
    return files


def _file_names(num_files: int) -> Iterator[str]:
    """Yield the files' names as transformers forms them."""
    if num_files == 1:
        yield WEIGHTS_FILE
        return
    stem, _, ending = WEIGHTS_FILE.rpartition(".")
    for number in range(1, num_files + 1):
        yield f"{stem}-{number:05d}-of-{num_files:05d}.{ending}"


def _write_index(model: PreTrainedModel, folder: Path, files: list[list[_Source]]) -> None:
    weight_map = {
        name: file
        for file, sources in zip(_file_names(len(files)), files, strict=True)
        for source in sources
        for name in source.saved
    }
    total_size = sum(source.num_bytes for sources in files for source in sources)
    index = {
        "metadata": {"total_parameters": model.num_parameters(), "total_size": total_size},
        "weight_map": weight_map,
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")
