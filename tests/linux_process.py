"""What Linux tells a process of its own memory, where the test says what is resident: the kernel takes pages at will.

Pages are reclaimed under load, mapped ahead of anybody who reads them, and counted late: no test looks at those of the
process that it runs in.
"""

from __future__ import annotations


class LinuxProcess:
    """``/proc/self/status`` and ``/proc/self/clear_refs`` in one.

    Attributes:
        held: resident bytes that are no page of a file.
        of_files: resident pages of files.
        can_reset: whether the peak may begin anew, which some containers forbid.
    """

    def __init__(self, held: int, of_files: int) -> None:
        self.held, self.of_files = held, of_files
        self.can_reset = True
        self._peak = held + of_files

    def becomes(self, *, held: int | None = None, of_files: int | None = None) -> None:
        """Hold so much from now on, in bytes."""
        self.held = self.held if held is None else held
        self.of_files = self.of_files if of_files is None else of_files
        self._peak = max(self._peak, self.held + self.of_files)

    def exists(self) -> bool:
        return True

    def read_text(self) -> str:
        sizes = {"VmHWM": self._peak, "VmRSS": self.held + self.of_files, "RssFile": self.of_files}
        return "Name:\tpython\n" + "".join(f"{name}:\t{size // 1024:8} kB\n" for name, size in sizes.items())

    def write_text(self, code: str) -> None:
        assert code == "5", "what clear_refs takes for: let the peak begin anew"
        if not self.can_reset:
            raise PermissionError("/proc/self/clear_refs")
        self._peak = self.held + self.of_files
