"""The weights of a checkpoint as tensors that are read only on demand, and leave nothing resident.

transformers maps checkpoint files into memory: each page it has read stays resident until the whole model is loaded (a
second copy, in the file's type), and on a CPU the weights *are* the file's pages, which a rewritten file would change
under a running training. Reading each tensor with ``pread`` avoids both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.tensors.finiteness import is_finite
from lowmem_ft.models.files.model_files import INDEX_FILE, WEIGHTS_FILE
from lowmem_ft.models.files.shard_files import MODEL, cut_tensors, shard_files

_ROWS: ContextVar[tuple[slice, int] | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def rows_of_weights(rows: slice, number: int) -> Iterator[None]:
    """Let ``[...]`` on a :class:`LazyWeight` read some of its rows alone within a block.

    Args:
        rows: which.
        number: the rows that each weight must have in all.
    """
    token = _ROWS.set((rows, number))
    try:
        yield
    finally:
        _ROWS.reset(token)


class LazyWeight:
    """A tensor of a safetensors file, in the form that ``from_pretrained(state_dict=...)`` takes.

    Args:
        file: the file that holds it.
        name: its name in that file.
        values: safetensors' slice of all of it, which is not checked.
    """

    def __init__(self, file: str, name: str, values: Any) -> None:
        self.file, self.name = file, name
        self.values = values
        self.get_shape, self.get_dtype = values.get_shape, values.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read it, and check it while it is in the CPU's cache.

        Raises:
            ModelError: if it holds NaN or infinity, or if its number of rows differs from that of
                :func:`rows_of_weights`.
        """
        if index is ... and (some := _ROWS.get()) is not None:
            index, number = some
            if self.get_shape()[0] != number:
                raise ModelError(
                    f"A checkpoint must hold the experts that its config.json gives, {number} of each layer; "
                    f"{self.name} in {self.file} has {self.get_shape()[0]}. Download the model again."
                )
        tensor = self.values[index]
        if not is_finite(tensor):
            raise ModelError(
                f"A weight must be finite, but {self.name} in {self.file} holds NaN or infinity, as every loss would. "
                "Download the model again, or choose an earlier checkpoint."
            )
        return tensor


def lazy_weights(path: str, *, backend: str = "pread", **source: Any) -> dict[str, Any]:
    """Return every tensor of a folder's or hub repository's safetensors files by name; ``[...]`` on one reads it.

    Files may hold parts of tensors, as several processes write them into a checkpoint: each tensor is put together.

    Args:
        path: local folder or hub id; missing files are downloaded.
        backend: ``pread``, or ``mmap`` for tensors that are the file's own pages, to be read and released.
        **source: ``revision`` and ``local_files_only``, as ``from_pretrained`` takes them.

    Returns:
        A value for ``from_pretrained(state_dict=...)``. Reading a tensor that is not finite raises, except with
        ``mmap``, which is for weights that were read before.

    Raises:
        FileNotFoundError: if there are no safetensors.
    """
    cut = shard_files(Path(path), MODEL)
    weights: dict[str, Any] = {
        name: LazyWeight(path, name, values) for name, values in cut_tensors(cut).items()
    }
    has_more = not cut or (Path(path) / INDEX_FILE).is_file()
    for file in _safetensors_files(path, source) if has_more else ():
        opened: Any = safe_open(file, framework="pt", backend=backend)
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        if backend == "pread":
            slices = {name: LazyWeight(file, name, values) for name, values in slices.items()}
        weights.update(slices)
    return weights


def causal_lm_class(hf_config: PretrainedConfig, path: str, **source: Any) -> type[PreTrainedModel]:
    """Return the class that ``AutoModelForCausalLM`` would choose for a config."""
    if type(hf_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        own_class = get_class_from_dynamic_module(hf_config.auto_map["AutoModelForCausalLM"], path, **source)
        # Otherwise its code would not be saved with its weights.
        own_class.register_for_auto_class("AutoModelForCausalLM")
        return own_class
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)]
    candidates = {cls.__name__: cls for cls in (found if isinstance(found, tuple) else (found,))}
    named = [candidates[name] for name in hf_config.architectures or () if name in candidates]
    return named[0] if named else next(iter(candidates.values()))


def generation_config(model: PreTrainedModel, path: str, **source: Any) -> GenerationConfig:
    """Return the checkpoint's own generation settings, or those that follow from the model's config if it has none."""
    if cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False, **source):
        return GenerationConfig.from_pretrained(path, **source)
    return GenerationConfig.from_model_config(model.config)


def _safetensors_files(path: str, source: dict[str, Any]) -> list[str]:
    def find(name: str) -> str | None:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **source)

    if index := find(INDEX_FILE):
        shards: Any = get_checkpoint_shard_files(path, index, **source)
        return shards[0]
    if file := find(WEIGHTS_FILE):
        return [file]
    raise FileNotFoundError(f"it has neither {WEIGHTS_FILE} nor {INDEX_FILE}")
