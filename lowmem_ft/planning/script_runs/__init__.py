"""Estimates of any training script, run unchanged for a few steps on a virtual GPU."""

from lowmem_ft.planning.script_runs.running import PASSED_OVER, ScriptError
from lowmem_ft.planning.script_runs.script_estimate import (
    ScriptEstimate,
    estimate_script,
    estimate_script_on_gpus,
)

__all__ = ["PASSED_OVER", "ScriptError", "ScriptEstimate", "estimate_script", "estimate_script_on_gpus"]
