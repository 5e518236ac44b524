"""Host memory while a model is loaded: the weights, the largest tensor on its way, and little else.

    python scripts/measure_load.py [--model FOLDER_OR_GGUF ...]

Each load runs in a process of its own. Idle is that process with everything imported and the architecture built once on
the meta device. The promise: a peak of at most the weights, the largest tensor (in fp32, which files hold or unpack to)
and 200 MB above idle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from demo.get_demo_model import default_cache_dir, get_demo_model
from measured_on import measured_on
from transformers import AutoModelForCausalLM

from lowmem_ft.memory.meter import read_host_memory
from lowmem_ft.models import ModelConfig, load_model, load_model_config
from lowmem_ft.units import format_bytes

ALLOWANCE_BYTES = 200 * 10**6


def main() -> int:
    """Measure every model in fp32 and bf16, print one JSON object; exit code 1 if one breaks the promise."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", help="folders or .gguf files; the demo's model if left out")
    parser.add_argument("--in-this-process", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        print(json.dumps(measure_load(*arguments.in_this_process)))
        return 0
    models = arguments.model or [str(get_demo_model(default_cache_dir()))]
    rows = [in_new_process(model, dtype) for model in models for dtype in ("float32", "bfloat16")]
    print(json.dumps({**measured_on(torch.device("cpu")), "rows": rows}, indent=2))
    return 0 if all(row["kept"] for row in rows) else 1


def in_new_process(model: str, dtype: str) -> dict[str, Any]:
    """:func:`measure_load` where nothing else has touched the peak."""
    command = [sys.executable, __file__, "--in-this-process", model, dtype]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure_load(model: str, dtype: str) -> dict[str, Any]:
    """What loading one model adds to this process's resident memory at its peak, beside what is promised."""
    config = ModelConfig(name_or_path=model, dtype=dtype)  # type: ignore[arg-type]
    hf_config = load_model_config(config)
    with torch.device("meta"):
        AutoModelForCausalLM.from_config(hf_config)
    idle_bytes = read_host_memory().now_bytes
    loaded = load_model(config, hf_config, attn_implementation="sdpa", device=torch.device("cpu"), seed=0)
    peak_bytes = read_host_memory().peak_bytes - idle_bytes
    weights_bytes = sum(parameter.nbytes for parameter in loaded.parameters())
    largest_bytes = 4 * max(parameter.numel() for parameter in loaded.parameters())
    promised_bytes = weights_bytes + largest_bytes + ALLOWANCE_BYTES
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
