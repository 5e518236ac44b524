"""What a recipe says about the techniques; apart from their verbs, so that reading a recipe does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowmem_ft.knob import knob


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig:
    """Which decoder layers keep only their input between forward and backward."""

    mode: Literal["none", "full"] = knob(
        "none",
        "full: a checkpointed layer keeps only its input and runs forward again in backward.",
        frees="a layer's activations but its input: about 47 bytes * tokens * hidden in bf16 (Llama 3's shape, sdpa)",
        costs="one more forward of each checkpointed layer: about a third more time with all of them",
    )
    every_n_layers: int = knob(
        1,
        "Checkpoint layers 0, n, 2n, ...; 1 checkpoints every layer.",
        costs="memory: the layers in between keep their activations",
    )
    skip_last_layers: int = knob(
        0,
        "Leave the last n layers alone: backward reaches them first, so their activations live shortest.",
        costs="memory: the activations of n layers",
    )

    def problems(self) -> list[str]:
        """What is wrong with these values whatever the model; how many layers it has is checked when it is there."""
        problems = []
        if self.every_n_layers < 1:
            problems.append(
                f"checkpointing.every_n_layers must be at least 1, got {self.every_n_layers}. "
                "Set it to 1 to checkpoint every layer."
            )
        if self.skip_last_layers < 0:
            problems.append(
                f"checkpointing.skip_last_layers must be at least 0, got {self.skip_last_layers}. "
                "Set it to 0 to leave no layer alone."
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """How the loss is computed from the last hidden states."""

    chunk_tokens: int | None = knob(
        1024,
        "Label tokens whose logits exist at once; null: the model's own loss, over all logits at once.",
        frees="12 bytes * tokens * vocabulary at the peak become 6 bytes * chunk_tokens * vocabulary",
        costs="with half-precision products, 4 bytes * vocabulary * hidden (the head's gradient, summed in fp32)",
    )

    def problems(self) -> list[str]:
        """What is wrong with these values in themselves; empty if nothing is."""
        if self.chunk_tokens is None or self.chunk_tokens >= 1:
            return []
        return [
            f"loss.chunk_tokens must be at least 1, got {self.chunk_tokens}. "
            "Set it to 1024, or to null for the model's own loss."
        ]
