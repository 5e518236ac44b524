"""Command lines of the scripts here: the help of each is its docstring, as it is written."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def parser_of(docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser without arguments, whose help is a script's docstring."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=docstring, formatter_class=raw)


def answer_of_new_process(script: str, arguments: Sequence[str]) -> Any:
    """Run a script in a process that has imported nothing yet, and return what the last line of its output says.

    Args:
        script: its file.
        arguments: those that make it print one JSON value.

    Raises:
        RuntimeError: if it fails, with the last line of its errors.
    """
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "killed")
    return json.loads(done.stdout.splitlines()[-1])
