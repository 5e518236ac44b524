"""The program's position in code: the running line of its own code, and the line of a library that it has called."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.virtual_gpu.recording.recorder import Recorder
from lowmem_ft.virtual_gpu.values.questions import asking_frames, is_of_library, shown_line


@dataclass(frozen=True, kw_only=True)
class CodePlace:
    """A line of code.

    Args:
        file: its path.
        line: its number.
        function: the function it is in; ``<module>`` outside any.
    """

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        """Return it as text: files of packages without the packages' folder, others relative to the working one."""
        within = "" if self.function == "<module>" else f" in {self.function}"
        return f"{shown_line(self.file, self.line)}{within}"


@dataclass(frozen=True, kw_only=True)
class Running:
    """Lines of code that run at a moment.

    Args:
        own: the innermost line of the program's own code; None if none is running.
        library: the innermost line of all, if it is a library's.
    """

    own: CodePlace | None
    library: CodePlace | None


class PeakPlace:
    """Remembers the lines that ran when a recorder's device used the most memory.

    Args:
        recorder: a machine's recorder, which reports each new peak from now on.
        script: a file whose code counts as the program's own, wherever it is.

    Attributes:
        most_bytes: the most memory that was in use.
    """

    def __init__(self, recorder: Recorder, script: str) -> None:
        self.running = Running(own=None, library=None)
        self.most_bytes = 0
        self._of_load = 0, self.running
        self._script = script
        self._recorder = recorder
        recorder.on_peak = self._at_peak

    def starts_over(self) -> None:
        """Forget what ran since the program was loaded."""
        self.most_bytes, self.running = self._of_load
        self._recorder.reset_peak()

    def _at_peak(self, live_bytes: int) -> None:
        if live_bytes > self.most_bytes:  # programs reset the recorder's own peak
            self.most_bytes = live_bytes
            self.running = _running(self._script)
            if self._recorder.attribution.phase == "load":
                self._of_load = self.most_bytes, self.running


def _running(script: str) -> Running:
    innermost: CodePlace | None = None
    for frame in asking_frames():
        file = frame.f_code.co_filename
        place = CodePlace(file=file, line=frame.f_lineno, function=frame.f_code.co_name)
        if file.startswith(script) or not is_of_library(file):
            return Running(own=place, library=innermost)
        innermost = innermost or place
    return Running(own=None, library=innermost)
