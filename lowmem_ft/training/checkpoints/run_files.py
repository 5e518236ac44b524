"""The files of a run: the trained model, and a session to continue from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_ft.training.checkpoints.session_files import load_session, save_session, save_trained
from lowmem_ft.training.distributed.processes import Processes
from lowmem_ft.training.session import Session


class RunFiles(Processes):
    """Files that the main process writes alone; runtimes whose processes hold parts override the saving."""

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the trained weights or adapters, and the tokenizer, so that vanilla libraries load them.

        Every process calls it; a process that alone holds everything writes alone.

        Raises:
            CheckpointError: if the folder, read back, does not hold the weights.
        """
        if self.is_main:
            save_trained(session, tokenizer, folder)

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
        return save_session(session, tokenizer, folder) if self.is_main else {}

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Restore what :meth:`save_session` wrote, except the model's own weights: it was built from the folder.

        Args:
            session: receives adapters and the optimizer's state; every process calls this.
            folder: a checkpoint.
            optimizer_scalars: the result of :meth:`save_session`.

        Raises:
            CheckpointError: if they are not those of this run.
        """
        load_session(session, folder, optimizer_scalars)
