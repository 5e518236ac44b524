"""Any training script, estimated: run unchanged for a few steps on a virtual GPU."""

from lowmem_ft.estimator.script.estimate import ScriptEstimate, estimate_script, estimate_script_on_gpus
from lowmem_ft.estimator.script.running import ScriptError

__all__ = ["ScriptError", "ScriptEstimate", "estimate_script", "estimate_script_on_gpus"]
