"""Memory that a recipe frees inside TRL's trainers: losses, kept and peak bytes of scripts/trl, stock and attached.

    python scripts/measure_trl.py dpo --recipe demo model=PATH data=pairs.jsonl training.use_cpu=true ...

runs ``scripts/trl/dpo.py`` twice with these arguments, the first time with ``--stock``. Every tensor on the CPU counts
except the weights, which are read from files. Kept: bytes alive as backward begins; peak: the most in a step; both in
the last step, which has optimizer state.
"""

from __future__ import annotations

import argparse
import gc
import platform
import runpy
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from command_line import parser_of

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.techniques.modules.patching import wrap_method

# isort: split
from transformers import Trainer, TrainerCallback

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate")


class StepMeter(TrainerCallback):
    """Records loss, seconds, kept and peak bytes of each step.

    Args:
        tracker: a running tracker.
    """

    def __init__(self, tracker: StorageTracker) -> None:
        self.tracker = tracker
        self.losses: list[float] = []
        self.kept: list[int] = []
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self._began = 0.0

    def on_step_begin(self, *event: Any, **kwargs: Any) -> None:
        """Restart the peak and the clock."""
        gc.collect()
        self.tracker.reset_peak()
        self._began = time.perf_counter()

    def on_step_end(self, *event: Any, **kwargs: Any) -> None:
        """Record the seconds of the step, and its peak."""
        self.seconds.append(time.perf_counter() - self._began)
        self.peaks.append(self.tracker.peak_bytes)

    def on_log(self, *event: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Record the loss; only the logs of steps have one."""
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))

    def watch(self, trainer: Any) -> None:
        """Record this trainer's steps."""

        def noting(backward: Any) -> Any:
            def noted(loss: torch.Tensor, **kwargs: Any) -> Any:
                gc.collect()
                self.kept.append(self.tracker.live_bytes)
                return backward(loss, **kwargs)

            return noted

        wrap_method(trainer.accelerator, "backward", noting)
        trainer.add_callback(self)


def run(script: Path, arguments: list[str]) -> StepMeter:
    """Train once by a script, watched from the model's loading on."""
    with StorageTracker() as tracker:
        meter = StepMeter(tracker)

        def watched(train: Any) -> Any:
            def trained(trainer: Any, *args: Any, **kwargs: Any) -> Any:
                meter.watch(trainer)
                return train(trainer, *args, **kwargs)

            return trained

        original = Trainer.train
        Trainer.train = watched(original)  # type: ignore[method-assign]
        try:
            runpy.run_path(str(script))["main"](arguments)
        finally:
            Trainer.train = original  # type: ignore[method-assign]
    gc.collect()
    return meter


def main() -> None:
    """Print both runs as rows of a table."""
    parser = parser_of(__doc__)
    scripts = Path(__file__).parent / "trl"
    parser.add_argument("name", choices=sorted(path.stem for path in scripts.glob("*.py")))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of that script")
    parsed = parser.parse_args()
    script, arguments = scripts / f"{parsed.name}.py", parsed.arguments
    meters = {
        label: run(script, [*arguments, *flag]) for label, flag in (("stock", ["--stock"]), ("attached", []))
    }
    print(", ".join(f"{package} {version(package)}" for package in PACKAGES), platform.machine())
    print(f"| {script.name} | kept | peak | losses |\n|---|---|---|---|")
    for label, meter in meters.items():
        losses = ", ".join(f"{loss:.4f}" for loss in meter.losses)
        print(f"| {label} | {format_bytes(meter.kept[-1])} | {format_bytes(meter.peaks[-1])} | {losses} |")


if __name__ == "__main__":
    main()
