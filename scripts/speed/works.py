"""The works that are compared: one model on one GPU, a peer's program and our recipes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from measuring.measured_rows import Documents
from speed.peer_settings import Setting
from speed.peers import PAGED, QLORA, SFT, TRAINER, Peer


@dataclass(frozen=True, kw_only=True)
class Work:
    """A row of the table.

    Args:
        gpu: name in the catalogue.
        recipe: our recipe.
        overrides: its settings that differ.
        variants: other settings in addition, with each of which ours runs once more.
        peer: what it is compared with.
        goal: least ratio of tokens a second, and largest of memory, that the project wants.
    """

    gpu: str
    recipe: str
    overrides: tuple[str, ...]
    variants: tuple[tuple[str, ...], ...] = ()
    peer: Peer
    goal: tuple[float, float]

    def ours(self) -> dict[str, Work]:
        """Return this work and its variants, by their names on a command line."""
        more = (dataclasses.replace(self, overrides=(*self.overrides, *some)) for some in self.variants)
        return {f"ours:{index}": work for index, work in enumerate((self, *more))}

    def settings(self, documents: Documents) -> tuple[str, ...]:
        """Return the recipe's settings on rows of these documents: rows of one document are not packed."""
        return (*self.overrides, f"data.packing={str(len(documents) > 1).lower()}")


def title_of(work: Work, setting: Setting | None, documents: Documents) -> str:
    """Describe a run of the peer, or ours, which has no setting."""
    if setting is None:
        return f"ours, `{' '.join((work.recipe, *work.settings(documents)))}`"
    return f"{work.peer.title}; {setting.in_words()}"


WITHOUT_CHECKPOINTS = (
    "training.per_device_train_batch_size=1",
    "training.gradient_accumulation_steps=16",
    "checkpointing.mode=none",
    "optimizer.in_backward=false",
    "accumulation.dtype=weights",
)
"""Settings of 8b-bf16 that sum gradients in bfloat16, as the peer does, in place of computing activations again."""

TWO_ROWS = (
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=8",
    "checkpointing.mode=full",
    "checkpointing.mlp_activation=recompute",
    "optimizer.in_backward=false",
    "accumulation.dtype=weights",
    "accumulation.fusion=true",
)
"""Likewise, with half the launches, and sums inside products, which are rounded once where the peer's are twice."""

WORKS = {
    "8b-full": Work(
        gpu="h100-80gb",
        recipe="8b-bf16",
        overrides=("model.kernels=liger",),
        variants=(
            (
                "training.per_device_train_batch_size=2",
                "training.gradient_accumulation_steps=8",
                "checkpointing.mode=none",
                "optimizer.in_backward=false",
                "optimizer.master=split24",
                "offload.optimizer=host",
                "accumulation.fusion=true",
            ),
            (*TWO_ROWS, "checkpointing.skip_last_layers=32", "optimizer.master=split24"),
            WITHOUT_CHECKPOINTS,
            (*TWO_ROWS, "checkpointing.skip_last_layers=15", "offload.activations=inputs"),
        ),
        peer=TRAINER,
        goal=(1.15, 1.0),
    ),
    "7b-lora": Work(
        gpu="rtx-4090",
        recipe="7b-lora",
        overrides=("model.kernels=liger",),
        variants=(("checkpointing.skip_last_layers=0",),),
        peer=SFT,
        goal=(1.1, 0.9),
    ),
    "7b-lora-80gb": Work(
        gpu="h100-80gb",
        recipe="7b-lora",
        overrides=(
            "model.kernels=liger",
            "training.per_device_train_batch_size=4",
            "training.gradient_accumulation_steps=4",
            "checkpointing.mode=none",
            "checkpointing.skip_last_layers=0",
        ),
        peer=SFT,
        goal=(1.1, 0.9),
    ),
    "7b-qlora": Work(
        gpu="rtx-4090",
        recipe="7b-qlora",
        overrides=("model.kernels=liger",),
        variants=(
            ("checkpointing.mlp_activation=recompute",),
            ("checkpointing.mode=full",),
        ),
        peer=QLORA,
        goal=(1.1, 0.9),
    ),
    "8b-offload": Work(
        gpu="rtx-4090", recipe="8b-24gb", overrides=("model.kernels=liger",), peer=PAGED, goal=(1.0, 1.0)
    ),
}
