"""The files of a run: the trained model, a session to continue from, and the records of its trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from lowmem_ft.models.files.shard_files import MODEL, OPTIMIZER, by_file, cut_tensors, num_rows, shard_files
from lowmem_ft.models.gathering import write_gathered_weights
from lowmem_ft.models.other_parts import language_names_in
from lowmem_ft.models.saving import save_model, save_tokenizer, verify_saved_model
from lowmem_ft.optimizers import OptimizerState, StateParts, export_optimizer_state, import_optimizer_state
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.folder.own_files import copy_model_files
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.session import Session


class RunFiles:
    """Files that only the main process writes; runtimes whose processes hold parts override the saving.

    Args:
        ranks: the processes of the run.
        console: the console on which this process shows the run's progress; None: it shows none.
    """

    def __init__(self, ranks: Ranks, console: Console | None = None) -> None:
        self._ranks, self.console = ranks, console

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the trained weights or adapters, and the tokenizer, so that vanilla libraries load them.

        Every process calls it; if one process holds everything, only that process writes.

        Raises:
            CheckpointError: if the folder, read back, does not hold the weights.
        """
        if self._ranks.is_main:
            with session.techniques.at_rest():
                if session.techniques.save(folder):
                    save_tokenizer(tokenizer, folder)
                else:
                    save_model(session.unwrapped_model, tokenizer, folder)

    def save_from_checkpoint(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, checkpoint: Path, folder: Path
    ) -> None:
        """Write what :meth:`save_trained` would have written at a checkpoint's step; only the main process calls this.

        Files are copied: loading them into streamed, offloaded or sharded weights would take a loader for each, and
        memory.

        Args:
            session: the session that wrote the checkpoint; its weights are not read.
            tokenizer: the tokenizer, which is in the checkpoint.
            checkpoint: a complete checkpoint.
            folder: an existing folder.

        Raises:
            CheckpointError: if the folder, read back, does not hold the checkpoint's weights.
            OSError: if it cannot be written.
        """
        copy_model_files(checkpoint, folder)
        if shard_files(checkpoint, MODEL):
            model, saved_weight = session.unwrapped_model, weights_saved_in(checkpoint)
            write_gathered_weights(model, folder, writes=True, values=saved_weight)
            verify_saved_model(model, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write the trained weights, the tokenizer and the optimizer's tensors, for :meth:`load_session`.

        Args:
            session: the session to save; every process calls this, and writes its own part if it holds only a part.
            tokenizer: the tokenizer to save.
            folder: the folder of a new checkpoint, the same for all processes.
            identity: the random name of that checkpoint.

        Returns:
            In the main process, the optimizer's values that are not tensors, in JSON types.

        Raises:
            CheckpointError: if the folder, read back, does not hold the trained weights.
        """
        if not self._ranks.is_main:
            return {}
        self.save_trained(session, tokenizer, folder)
        state = export_optimizer_state(session.optimizer, session.unwrapped_model.named_parameters())
        write_state(state.tensors.items(), folder)
        return state.scalars

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Restore what :meth:`save_session` wrote, except the model's own weights: it was built from the folder.

        Args:
            session: receives adapters and the optimizer's state, of sharded parameters this process's part; every
                process calls this, in any number of processes.
            folder: a checkpoint that one process wrote, or several.
            optimizer_scalars: the result of :meth:`save_session`.

        Raises:
            CheckpointError: if they are not those of this run.
        """
        session.techniques.load(folder)
        named_parameters = session.unwrapped_model.named_parameters()
        with session.techniques.at_rest():
            state = saved_state(folder, optimizer_scalars)
            import_optimizer_state(session.optimizer, named_parameters, state, weights_saved_in(folder))

    def start_trackers(self, recipe: Recipe) -> None:
        """Open the trackers of ``training.report_to`` and pass them the recipe."""

    def log(self, record: dict[str, Any]) -> None:
        """Pass one record of metrics, including its ``step``, to the trackers."""

    def end_trackers(self) -> None:
        """Flush and close the trackers."""


def write_state(tensors: Iterable[tuple[str, torch.Tensor]], folder: Path, *, writes: bool = True) -> None:
    """Write the tensors of an optimizer's state to files.

    Args:
        tensors: tensors by their names in :class:`~lowmem_ft.optimizers.OptimizerState`. If they are gathered from
            several processes while they are iterated, all processes call this, and one that fails to write continues to
            iterate.
        folder: an existing folder.
        writes: whether this process writes.

    Raises:
        OSError: if a file cannot be written.
        SafetensorError: likewise.
    """
    problem: Exception | None = None
    for index, shard in enumerate(by_file(tensors, lambda tensor: tensor.nbytes)):
        if writes and problem is None:
            contiguous = {name: tensor.detach().contiguous() for name, tensor in shard.items()}
            try:
                save_file(contiguous, folder / f"optimizer-{index:05d}.safetensors")
            except Exception as error:
                # Of any type: the other processes would wait for what this one does not gather.
                problem = error
    if problem is not None:
        raise problem


def weights_saved_in(folder: Path) -> Callable[[str], torch.Tensor | None]:
    """Return a function that reads a checkpoint's weight by its name, and returns None if there is no such weight."""
    weights = _TensorsOfFiles(sorted(folder.glob("model*.safetensors")))
    cut_weights = cut_tensors(shard_files(folder, MODEL))
    in_files = language_names_in(folder, [*weights, *cut_weights])

    def saved_weight(own_name: str) -> torch.Tensor | None:
        name = in_files.get(own_name, own_name)
        return cut_weights[name][...] if name in cut_weights else weights.get(name)

    return saved_weight


def saved_state(folder: Path, scalars: dict[str, Any]) -> OptimizerState:
    """Return the optimizer state of a checkpoint, whose tensors are read lazily.

    Args:
        folder: a checkpoint that one process wrote, or several.
        scalars: the result of :meth:`RunFiles.save_session`.
    """
    cut = cut_tensors(shard_files(folder, OPTIMIZER))
    if not cut:
        return OptimizerState(
            tensors=_TensorsOfFiles(sorted(folder.glob("optimizer-*.safetensors"))), scalars=scalars
        )
    parts = {
        name: StateParts(tensor.parts, [num_rows(values) for _, values in tensor.parts])
        for name, tensor in cut.items()
    }
    return OptimizerState(tensors=parts, scalars=scalars)


class _TensorsOfFiles(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, each read on access and not kept."""

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
