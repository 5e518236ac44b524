"""The recipe: everything that decides a run, as one frozen tree of the parts' own configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowmem_ft.data.config import DataConfig
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.knob import knob
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.recipe.plan_config import PlanConfig
from lowmem_ft.recipe.training_config import TrainingConfig
from lowmem_ft.techniques.accumulation.config import AccumulationConfig
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.distributed.config import DistributedConfig
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.techniques.tiling.config import TilingConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. Each part receives its own config and never the whole.

    ``written``, which is no key: the keys that files and settings wrote, some with the value that is their default.
    Nor is ``fitted``: settings that were made right for the model, with a sentence on each, see
    ``reading/another_model.py``.
    """

    name: str = knob("recipe", "Name of the recipe; in a file, null means the file's name.")
    description: str = knob("", "One line for `lowmem-ft recipes`.")
    model: ModelConfig = field(default_factory=ModelConfig)
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    accumulation: AccumulationConfig = field(default_factory=AccumulationConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    tiling: TilingConfig = field(default_factory=TilingConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    budget: Budget = field(default_factory=Budget)
    plan: PlanConfig = field(default_factory=PlanConfig)
    written: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    fitted: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def undecided_keys(self) -> tuple[str, ...]:
        """The settings that leave a choice for a budget open; code above training makes it, before a model is built."""
        settings = {"plan.mode": self.plan.mode, "checkpointing.mode": self.checkpointing.mode}
        return tuple(f"{key}={value}" for key, value in settings.items() if value == "auto")

    @property
    def uses_bitsandbytes(self) -> bool:
        """True if kernels of bitsandbytes are called, whose code the device then holds."""
        return self.model.quantizes or self.optimizer.row.bitsandbytes is not None
