"""Errors when the cache of ``datasets``, which stores rows and their tokens, is full or read-only."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import datasets.config

from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EROFS, errno.EACCES)


def full_cache(error: BaseException, written: str | None = None) -> DataError | None:
    """Return the error to show if a full disk or a read-only cache is the cause; None: another cause.

    Args:
        error: the error.
        written: the folder that was written to; None: that of the cache, unless the error names a file.
    """
    if not isinstance(error, OSError) or error.errno not in (*_FULL, *_REFUSED):
        return None
    cache = datasets.config.HF_DATASETS_CACHE
    if error.errno in _REFUSED:
        if not Path(error.filename or cache).is_relative_to(cache):
            return None
        return DataError(
            f"The cache of datasets, HF_DATASETS_CACHE={cache}, cannot be written: {error.strerror}. It keeps a copy "
            "of the rows and their tokens. Set HF_DATASETS_CACHE to a folder that can be."
        )
    named = os.path.dirname(error.filename) if isinstance(error.filename, str) else ""
    folder = Path(written or named or cache)
    try:
        free = f" ({format_bytes(shutil.disk_usage(folder).free)} free on that disk)"
    except OSError:
        free = ""
    if folder.is_relative_to(cache):
        name, way_out = f"The cache of datasets, HF_DATASETS_CACHE={cache},", "set HF_DATASETS_CACHE"
        way_out += " (for downloads HF_HUB_CACHE, too) to a folder on another disk"
    else:
        name, way_out = (
            f"The folder {folder}, where datasets keeps tokens next to the rows,",
            "move it to another disk",
        )
    return DataError(
        f"{name} cannot be written: {error.strerror}{free}. It keeps a copy of the rows and their tokens. Free some "
        f"space, or {way_out}."
    )
