"""The tensors of a session as files: what is trained, and the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from lowmem_ft.models import save_model, save_tokenizer
from lowmem_ft.optimizers import OptimizerState, export_optimizer_state, import_optimizer_state
from lowmem_ft.training.session import Session
from lowmem_ft.units import GIB

_SHARD_BYTES = 2 * GIB
"""safetensors holds one file in host memory while writing it; this bounds that, whatever the optimizer's size."""


def save_trained(session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write what is trained, and the tokenizer, as vanilla libraries load it: a model folder, or PEFT's adapters.

    Raises:
        CheckpointError: if the folder, read back, does not hold it.
    """
    with session.techniques.at_rest():
        if session.techniques.save(folder):
            save_tokenizer(tokenizer, folder)
        else:
            save_model(session.unwrapped_model, tokenizer, folder)


def save_optimizer_state(session: Session, folder: Path) -> dict[str, Any]:
    """Write ``optimizer-*.safetensors``; return what is no tensor."""
    state = export_optimizer_state(session.optimizer, session.unwrapped_model.named_parameters())
    for index, shard in enumerate(_shards(state.tensors)):
        contiguous = {name: tensor.detach().contiguous() for name, tensor in shard.items()}
        save_file(contiguous, folder / f"optimizer-{index:05d}.safetensors")
    return state.scalars


def load_session(session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
    """Restore adapters and the optimizer's state; the model itself was built from ``folder``.

    Raises:
        CheckpointError: if the adapters or the optimizer's state are not this run's.
    """
    session.techniques.load(folder)
    state = OptimizerState(
        tensors=_TensorsOfFiles(sorted(folder.glob("optimizer-*.safetensors"))), scalars=optimizer_scalars
    )
    weights = _TensorsOfFiles(sorted(folder.glob("model*.safetensors")))
    named_parameters = session.unwrapped_model.named_parameters()
    with session.techniques.at_rest():
        import_optimizer_state(session.optimizer, named_parameters, state, weights.get)


def _shards(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard:
        yield shard


class _TensorsOfFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each read when it is asked for and not kept."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt", backend="pread")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
