"""The surroundings of a run: its machine, its ranks, its files, and the values that it computes.

A run reaches everything outside itself through the four parts of a :class:`Runtime`, so that a real run, a rehearsal
and a trace execute the same loop and the same step. The class of each part is the plain case of one process; others
override what differs: ``accelerate_runtime.py`` for several processes, ``deepspeed_runtime.py`` for
DeepSpeed, ``planning/estimator/runtime.py`` for traces, ``planning/rehearsal/runtime.py`` for rehearsals. A part that
needs another gets it in its constructor, and what needs one part takes that part alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.values import Values
from lowmem_ft.training.step.machine import Machine

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Everything outside a run that its loop and its step use.

    Args:
        machine: the device, its precision, and memory of the host.
        ranks: the processes of the run, and how they share the model.
        files: the files and records that the run puts out.
        values: what loads weights and computes with them, or takes their place where tensors have none.
    """

    machine: Machine
    ranks: Ranks
    files: RunFiles
    values: Values

    @classmethod
    def in_one_process(cls, device: torch.device, mixed_precision: str = "no") -> Self:
        """Return the runtime of a single process, in plain torch."""
        machine = Machine(device, mixed_precision)
        ranks = Ranks(machine.device)
        return cls(machine=machine, ranks=ranks, files=RunFiles(ranks), values=Values(machine, ranks))
