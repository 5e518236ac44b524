"""Files in folders that several processes share: each appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def whole_file(file: Path) -> Iterator[IO[bytes]]:
    """Write or replace a file at the end of a block; an error leaves the old one.

    Args:
        file: the file, in a folder that exists.

    Yields:
        The stream to write to.

    Raises:
        OSError: if it cannot be written.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
