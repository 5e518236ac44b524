"""llama.cpp's own converter from a model folder to a GGUF file, in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

from lowmem_ft.foundation.errors import MissingPackageError, ModelError, UserError

logger = logging.getLogger(__name__)

CONVERTER = "convert_hf_to_gguf.py"
GGUF_TYPES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
"""Types of weights by the converter's names, with the bytes of one.

Q8_0 has a scale of two bytes for 32 weights of one. Norms, in float32, are hardly any.
"""

_FILES_THAT_NAME_CODE = ("config.json", "tokenizer_config.json")


def check_converter(folder: Path | None) -> Path:
    """Return the path of the converter in a folder of llama.cpp.

    Raises:
        UserError: if no folder is given, or it has no converter; says how to get it.
    """
    if folder is not None and (folder / CONVERTER).is_file():
        return folder / CONVERTER
    seen = "got none" if folder is None else f"and {folder} has no such file"
    raise UserError(
        f"--gguf runs llama.cpp's converter, {CONVERTER}, which is found by --llama-cpp DIR, {seen}. Get it with `git "
        "clone --depth 1 https://github.com/ggml-org/llama.cpp`, or unpack the .tar.gz of "
        "https://pypi.org/project/llama-cpp-python/#files, which has it in vendor/llama.cpp; the package gguf alone "
        "does not convert."
    )


def refuse_own_code(folder: Path, name: str) -> None:
    """Refuse a model folder that names Python code: the converter would run it without asking.

    Raises:
        ModelError: if a config names classes of its own.
    """
    for file in _FILES_THAT_NAME_CODE:
        path = folder / file
        if path.is_file() and "auto_map" in json.loads(path.read_text("utf-8")):
            raise ModelError(
                f"llama.cpp's converter runs the Python code that a model brings, and the {file} of {name} names some "
                "(auto_map). Export models of transformers' own classes, or run the converter yourself."
            )


def convert_to_gguf(converter: Path, folder: Path, target: Path, gguf_type: str) -> None:
    """Convert a model folder to a GGUF file, without a network.

    Args:
        converter: from :func:`check_converter`.
        folder: a plain model folder, without code of its own.
        target: the new file.
        gguf_type: type of its weights, by the converter's name.

    Raises:
        MissingPackageError: if the converter needs a package that is not installed.
        ModelError: if it does not know the model, with its last words.
    """
    words = [sys.executable, str(converter), str(folder), "--outfile", str(target), "--outtype", gguf_type]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    logger.info("llama.cpp's converter writes %s.", target.name)
    ended = subprocess.run(
        words,
        env=os.environ | offline,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if ended.returncode == 0 and target.is_file():
        return
    if missing := re.search(r"No module named '(\w+)'", ended.stdout):
        raise MissingPackageError("llama.cpp's converter", missing[1], "export")
    last = next((line for line in reversed(ended.stdout.splitlines()) if line.strip()), "it said nothing")
    raise ModelError(
        f"llama.cpp's converter in {converter.parent} failed (exit code {ended.returncode}): {last.strip()} Use a "
        "newer llama.cpp, or a model that it supports."
    )
