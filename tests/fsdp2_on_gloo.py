"""Accelerate's own FSDP2 on processors: gloo passes for several GPUs, and processes start as it launches them.

Over gloo Accelerate leaves FSDP out in silence, and gives DDP with the same losses: tests assert ``FSDPModule`` or
``DTensor``. From the type of the launch on all is Accelerate's own, with every check that it makes on GPUs. What is
CUDA's cannot be seen: float16 with its scaler, pinned memory of ``cpu_offload``, streams.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType
from processes import Forks

from lowmem_ft.planning.script_runs.accelerate_launch import by_accelerate

FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
"""Fields of ``TrainingArguments`` that ask for FSDP2 on a Llama; nothing of it is then asked for by the launch."""

_LAUNCH: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "num_machines": 1,
    "mixed_precision": "no",
}
_FSDP2_LAUNCH: dict[str, Any] = {
    "fsdp_version": 2,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_cpu_ram_efficient_loading": False,
}


def let_gloo_stand_for_gpus() -> None:
    """From now on a launch on processors is one on GPUs to Accelerate, which then shards as it does there.

    For programs in processes of their own: nothing is put back. They may say ``use_cpu=True`` or not.
    """
    start = PartialState.__init__

    def init(self: PartialState, cpu: bool = False, **kwargs: Any) -> None:
        start(self, True, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = init


def launch_config(num_processes: int, by_launch: bool = True, **fsdp_config: Any) -> dict[str, Any]:
    """Return what a file of ``accelerate config`` says.

    Args:
        num_processes: processes on this machine.
        by_launch: whether it asks for FSDP2; else a script does, by :data:`FSDP2`.
        fsdp_config: keys of FSDP, in addition or in place of those that every case here has.
    """
    if not by_launch:
        return {**_LAUNCH, "num_processes": num_processes, "distributed_type": "MULTI_GPU"}
    return {
        **_LAUNCH,
        "num_processes": num_processes,
        "distributed_type": "FSDP",
        "fsdp_config": {**_FSDP2_LAUNCH, **fsdp_config},
    }


def variables_of(config: dict[str, Any]) -> dict[str, str]:
    """Return what ``accelerate launch`` sets with such a file in addition to torchrun's variables."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps(config), encoding="utf-8")
        return dict(by_accelerate(os.fspath(file)).further)


def launch(
    forks: Forks, num_processes: int, source: str, *arguments: str, by_launch: bool = True, **fsdp_config: Any
) -> list[CompletedProcess[str]]:
    """Run Python code in several processes, as ``accelerate launch`` starts them, on this processor.

    Args:
        forks: the fixture.
        num_processes: their number; one of them is sharded, too.
        source: the program; it runs after :func:`let_gloo_stand_for_gpus`.
        arguments: ``sys.argv[1:]``.
        by_launch: as :func:`launch_config` takes it.
        fsdp_config: the same.
    """
    here = os.path.dirname(os.path.abspath(__file__))
    begin = (
        f"import sys\nsys.path.insert(0, {here!r})\n"
        "from fsdp2_on_gloo import let_gloo_stand_for_gpus\nlet_gloo_stand_for_gpus()\n"
    )
    variables = variables_of(launch_config(num_processes, by_launch, **fsdp_config))
    return forks.run_several(num_processes, begin + source, *arguments, variables=variables)
