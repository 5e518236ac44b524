"""A lock that allows one run at a time in a folder: two would delete each other's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

from filelock import FileLock, Timeout

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.launch_variables import whole_number

LOCK_FILE = ".lock"


class FolderLock:
    """A lock that the main process of a run holds; the system releases it when that process ends, in whatever way.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(folder / LOCK_FILE)

    def acquire(self) -> None:
        """Acquire the lock; the folder must exist.

        Raises:
            UserError: if another run holds it.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"training.output_dir={self._folder} is the folder of a run that is still active. Wait for its end, "
                "stop it, or choose another folder."
            ) from error
        except OSError as error:
            raise UserError(f"training.output_dir={self._folder} cannot be written: {error}.") from error

    def probe(self) -> None:
        """Acquire and release the lock, to report a conflict early.

        Only the main process does: several processes of a run would find each other's lock.

        Raises:
            UserError: if another run holds it.
        """
        if not whole_number("RANK") and (self._folder / LOCK_FILE).exists():
            self.acquire()
            self.release()

    def release(self) -> None:
        """Release the lock if it is held, and leave no file behind."""
        if self._lock.is_locked and os.name != "nt":  # on Windows filelock does it
            # While it is held: later it may be another run's.
            (self._folder / LOCK_FILE).unlink(missing_ok=True)
        self._lock.release()
