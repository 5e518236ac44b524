"""Estimates of any training script, run unchanged for a few steps on a virtual GPU."""

from lowmem_ft.planning.script_runs.running import ScriptError
from lowmem_ft.planning.script_runs.script_estimate import (
    ScriptEstimate,
    estimate_script,
    estimate_script_on_gpus,
)

__all__ = ["ScriptError", "ScriptEstimate", "estimate_script", "estimate_script_on_gpus"]
