"""Ctrl-C and SIGTERM (a spot machine being taken back) end a run at a step boundary, with a checkpoint."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType

logger = logging.getLogger(__name__)


class Interruption:
    """While active, remembers SIGINT and SIGTERM instead of dying of them; a second signal ends the process at once.

    Signal handlers belong to the main thread; elsewhere (a notebook's worker, a test) this does nothing.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """What the shell expects of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        assert self.signal_number is not None
        return 128 + self.signal_number

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_number = number
        signal.signal(number, self._previous[number])
        logger.warning(
            "%s received: saving at the end of this step, then stopping. Send it again to stop at once.",
            signal.Signals(number).name,
        )
