"""One run at a time in a folder: two would delete each other's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from lowmem_ft.foundation.errors import UserError

LOCK_FILE = ".lock"


class FolderLock:
    """Held by the main process of a run; the system lets go of it when that process ends, however it does.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / LOCK_FILE)

    def acquire(self) -> None:
        """Take it, in a folder that exists.

        Raises:
            UserError: if another run has it.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"training.output_dir={self._folder} is the folder of a run that is still going on. Wait for its end, "
                "stop it, or choose another folder."
            ) from error
        except OSError as error:
            raise UserError(f"training.output_dir={self._folder} cannot be written: {error}.") from error

    def probe(self) -> None:
        """The same, and let go again: to tell early. Only the main process asks, or they would meet each other.

        Raises:
            UserError: if another run has it.
        """
        if os.environ.get("RANK", "0") == "0" and (self._folder / LOCK_FILE).exists():
            self.acquire()
            self.release()

    def release(self) -> None:
        """Let go of it, if it is held, and leave no file behind."""
        if self._lock.is_locked and os.name != "nt":  # there filelock does it
            (self._folder / LOCK_FILE).unlink(missing_ok=True)  # while it is held: later it may be another's
        self._lock.release()
