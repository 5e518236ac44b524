"""Host memory while a model is loaded: the weights, the largest tensor in transit, and little else.

    python scripts/calibrate load [--model FOLDER_OR_GGUF ...] [--offload-folder FOLDER]

Each load runs in a process of its own. Idle is that process after all imports, with the architecture built once on the
meta device. The promise: a peak of at most the weights, the largest tensor (in fp32, which files hold or unpack to)
and 200 MB above idle. With a folder the weights go to mapped files there, as for `offload.folder`, and only memory that
no file can take back counts, sampled all the time: at most the largest tensor, as it is read and as it is converted,
and 200 MB above idle.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from command_line import answer_of_new_process, parser_of
from demo.get_demo_model import default_cache_dir, get_demo_model
from measured_on import measured_on
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.host.mapped_files import MappedFiles
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.system.host_memory import held_bytes, read_host_memory
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.weights_on_disk import weights_in_files

ALLOWANCE_BYTES = 200 * 10**6


def main() -> int:
    """Measure every model in fp32 and bf16, print one JSON object; exit code 1 if one breaks the promise."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", nargs="+", help="folders or .gguf files; the demo's model if left out")
    parser.add_argument("--offload-folder", type=Path, help="load the weights to memory-mapped files there")
    parser.add_argument("--in-this-process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder = arguments.offload_folder
    if arguments.in_this_process:
        model, dtype = arguments.in_this_process
        row = measure_load(model, dtype) if folder is None else measure_load_to_files(model, dtype, folder)
        print(json.dumps(row))
        return 0
    models = arguments.model or [str(get_demo_model(default_cache_dir()))]
    rows = [in_new_process(model, dtype, folder) for model in models for dtype in ("float32", "bfloat16")]
    print(json.dumps({**measured_on("cpu"), "rows": rows}, indent=2))
    return 0 if all(row["kept"] for row in rows) else 1


def in_new_process(model: str, dtype: str, folder: Path | None) -> dict[str, Any]:
    """Run one measurement in a process where nothing else has raised the peak."""
    options = [] if folder is None else ["--offload-folder", str(folder)]
    return answer_of_new_process(__file__, ["--in-this-process", model, dtype, *options])


def measure_load(model: str, dtype: str) -> dict[str, Any]:
    """Return the peak that loading one model adds to this process, next to the promise."""
    config, hf_config = prepared(model, dtype)
    idle_bytes = read_host_memory().now_bytes
    loaded = load_model(config, hf_config, attn_implementation="sdpa", device=torch.device("cpu"), seed=0)
    peak_bytes = read_host_memory().peak_bytes - idle_bytes
    weights_bytes, largest_bytes = sizes_of(loaded)
    return row_of(
        model, dtype, loaded, idle_bytes, peak_bytes, weights_bytes + largest_bytes + ALLOWANCE_BYTES
    )


def measure_load_to_files(model: str, dtype: str, folder: Path) -> dict[str, Any]:
    """Return the peak that loading one model to files adds to this process (Linux)."""
    config, hf_config = prepared(model, dtype)
    host = HostMemory(torch.device("cpu"), files=MappedFiles(folder))
    idle_bytes = held_bytes()
    with HeldPeak() as peak, weights_in_files(host):
        loaded = load_model(config, hf_config, attn_implementation="sdpa", device=host.device, seed=0)
    _, largest_bytes = sizes_of(loaded)
    return row_of(
        model, dtype, loaded, idle_bytes, peak.num_bytes - idle_bytes, 2 * largest_bytes + ALLOWANCE_BYTES
    )


def prepared(model: str, dtype: str) -> tuple[ModelConfig, PretrainedConfig]:
    """Return the configs of a model, after all imports, with the architecture built once on the meta device."""
    config = ModelConfig(name_or_path=model, dtype=dtype)  # type: ignore[arg-type]
    hf_config = load_model_config(config)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(hf_config)
    return config, hf_config


class HeldPeak:
    """The most that the process holds in a ``with`` block, sampled every two milliseconds."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> HeldPeak:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            self.num_bytes = max(self.num_bytes, held_bytes())
            is_over = self._is_over.wait(0.002)


def sizes_of(model: PreTrainedModel) -> tuple[int, int]:
    """Return bytes of all weights, and of the largest in fp32."""
    weights = list(model.parameters())
    return sum(weight.nbytes for weight in weights), 4 * max(weight.numel() for weight in weights)


def row_of(
    model: str, dtype: str, loaded: PreTrainedModel, idle_bytes: int, peak_bytes: int, promised_bytes: int
) -> dict[str, Any]:
    """Return a measurement for the report."""
    weights_bytes, largest_bytes = sizes_of(loaded)
    return {
        "model": Path(model).name,
        "dtype": dtype,
        "weights": format_bytes(weights_bytes),
        "largest_tensor": format_bytes(largest_bytes),
        "idle": format_bytes(idle_bytes),
        "peak_above_idle": format_bytes(peak_bytes),
        "promised": format_bytes(promised_bytes),
        "kept": peak_bytes <= promised_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
