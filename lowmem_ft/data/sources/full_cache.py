"""The error of a disk without room for the cache of ``datasets``, in which read and tokenized rows are kept."""

from __future__ import annotations

import errno
import shutil

import datasets.config

from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)


def full_cache(error: BaseException) -> DataError | None:
    """Return the error to show instead of one that a full disk caused; None: it has another cause."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return None
    folder = datasets.config.HF_DATASETS_CACHE
    try:
        free = f" ({format_bytes(shutil.disk_usage(folder).free)} free on that disk)"
    except OSError:
        free = ""
    return DataError(
        f"The cache of datasets, HF_DATASETS_CACHE={folder}, cannot be written: {error.strerror}{free}. It keeps a "
        "copy of the rows and their tokens. Free some space, or set HF_DATASETS_CACHE to a folder on another disk."
    )
