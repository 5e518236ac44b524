"""Detection of Linux inside Windows (WSL 2), whose CUDA driver lacks some features of Linux's.

Source: NVIDIA, CUDA on WSL User Guide, "Known Limitations for Linux CUDA Applications" (2026): unified memory behaves
as on Windows, so that nothing exceeds the device's memory, and pinned host memory is scarce. Growing segments of
torch's allocator can fail there at the first allocation (pytorch issue 192330).
"""

from __future__ import annotations

import platform
import sys


def is_wsl() -> bool:
    """Return whether the kernel is Microsoft's, by ``uname -r`` (``5.15.167.4-microsoft-standard-WSL2``)."""
    return sys.platform == "linux" and "microsoft" in platform.release().lower()
