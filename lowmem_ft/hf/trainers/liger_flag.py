"""HF's own switch for Liger's kernels, replaced by ours: ``Trainer`` would patch the model as training begins."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lowmem_ft.recipe.trainers.trainer_kinds import Kind
from lowmem_ft.techniques.kernels.liger_patches import ARGUMENTS

if TYPE_CHECKING:
    from lowmem_ft.hf.trainers.agreement import Agreement

_FLAG, _LOSS = "use_liger_kernel", "fused_linear_cross_entropy"


def liger_asked_by_flag(agreement: Agreement, args: Any, kind: Kind) -> Iterator[str]:
    """Let the recipe take the operators that the trainer's flag asks for; yield what it cannot take over, in words."""
    if not getattr(args, _FLAG, False):
        return
    config = args.liger_kernel_config or {}
    left_out = [name for name, value in config.items() if name in ARGUMENTS and not value]
    if left_out:
        yield (
            f"liger_kernel_config leaves out {', '.join(left_out)}, and model.kernels has no such choice. Leave "
            "liger_kernel_config out, or set use_liger_kernel=False."
        )
    # TRL's trainers have losses of their own, and leave Liger's out.
    if config.get(_LOSS, kind == "Trainer") and agreement.recipe.loss.chunk_tokens is None:
        yield (
            "TrainingArguments.use_liger_kernel=True replaces the loss too, which hf.attach does not take from Liger, "
            f"and loss.chunk_tokens=null leaves the model's. Set loss.chunk_tokens=1024, or liger_kernel_config="
            f"{{'{_LOSS}': False}}."
        )
    if agreement.recipe.model.kernels == "none":
        agreement.set("model.kernels", "liger")


def liger_flag_off(args: Any) -> Iterator[Callable[[], object]]:
    """Turn the trainer's own flag off, and yield the call that restores it.

    Args:
        args: the trainer's arguments.
    """
    if getattr(args, _FLAG, False):
        yield functools.partial(setattr, args, _FLAG, True)
        setattr(args, _FLAG, False)
