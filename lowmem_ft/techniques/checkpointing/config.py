"""The keys that choose the decoder layers which keep only their input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import Checkpointed, Effect, knob
from lowmem_ft.foundation.memory.least_memory import Held, StepFacts, as_it_is


def _inputs_of_checkpointed(held: Held, mode: str, step: StepFacts) -> Held:
    """Leave out what selective checkpointing keeps: nothing with dropout or without a fused attention kernel."""
    return held.scaled(step.share_checkpointed)


def _activations_of_others(held: Held, mode: str, step: StepFacts) -> Held:
    return held.scaled(1.0 - step.share_checkpointed)


def _without_products(held: Held, activation: str, step: StepFacts) -> Held:
    """Leave out the product of a gated activation: at most a third of what the bound counts of a layer."""
    return held if activation == "keep" else held.scaled(2 / 3)


@dataclass(frozen=True, kw_only=True)
class CheckpointingConfig:
    """The decoder layers that keep only their input between forward and backward."""

    mlp_activation: Literal["keep", "recompute"] = knob(
        "keep",
        "recompute: the MLPs of layers that are not checkpointed compute the input of their last linear layer again in "
        "backward, from the outputs of the linear layers before it.",
        frees="2 bytes * tokens * intermediate in 16 bits, of each layer that is not checkpointed",
        costs="one more activation function and product of each MLP, without a matrix product",
        effects={"recompute": Effect(cost="time")},
        search_values=("keep", "recompute"),
        remaining_bytes={"activations": _without_products},
    )
    mode: Literal["none", "full", "selective", "auto"] = knob(
        "none",
        "full: a checkpointed layer keeps only its input and runs forward again in backward; selective: it also "
        "keeps the attention's output instead of computing it again; auto: before a run, choose the fastest of these "
        "modes, and of the numbers of layers to exclude, that fits the budget.",
        frees=(
            "a layer's activations except for its input: about 47 bytes * tokens * hidden in bf16 (Llama 3's shape, "
            "sdpa)"
        ),
        costs="one more forward of each checkpointed layer: about a third more time with all of them; selective: less, "
        "for 2 bytes * tokens * hidden a layer in bf16",
        effects={mode: Effect(cost="time") for mode in ("full", "selective", "auto")},
        search_values=("none", "selective", "full"),
        remaining_bytes={"inputs": _inputs_of_checkpointed, "activations": _activations_of_others},
    )
    every_n_layers: int = knob(
        1,
        "Checkpoint layers 0, n, 2n, ...; 1 checkpoints every layer.",
        frees="1: the activations of the layers in between",
        costs="1: one more forward of these layers",
        effects={1: Effect(cost="time")},
        counts_layers="period",
        remaining_bytes={"inputs": as_it_is, "activations": as_it_is},
        search_values=(1,),
    )
    skip_last_layers: int = knob(
        0,
        "Exclude the last n layers: backward reaches them first, so their activations live shortest.",
        frees="0: the activations of n layers",
        costs="0: one more forward of these layers",
        effects={0: Effect(cost="time")},
        counts_layers="last",
        search_values=(48, 32, 24, 16, 8, 4, 0),
        remaining_bytes={"inputs": as_it_is, "activations": as_it_is},
    )

    @property
    def checkpointed(self) -> Checkpointed:
        """The layers that are checkpointed; with ``auto`` as many as have to be."""
        if self.mode == "none":
            return "no layer"
        return "every layer" if self.takes_every_layer else "some layers"

    def layers_of(self, num_layers: int) -> range:
        """Return which of so many layers are checkpointed; with ``auto`` all that may be."""
        if self.mode == "none":
            return range(0)
        return range(0, num_layers - self.skip_last_layers, self.every_n_layers)

    def share_of(self, num_layers: int) -> float:
        """Return the share of so many layers that are checkpointed."""
        return len(self.layers_of(num_layers)) / num_layers if num_layers else 0.0

    @property
    def takes_every_layer(self) -> bool:
        """True if no layer is left out, provided that any is checkpointed at all."""
        return (self.every_n_layers, self.skip_last_layers) == (1, 0)

    def refuse_unchosen(self) -> None:
        """Reject ``mode="auto"``, which only a planner can resolve.

        Raises:
            UserError: if ``mode`` is auto.
        """
        if self.mode == "auto":
            raise UserError(
                "checkpointing.mode=auto must be resolved for a budget before a model is built or estimated, got a "
                "recipe that still has it. Use lowmem_ft.plan_checkpointing(recipe, budget, gpu).recipe, or set "
                "checkpointing.mode=full."
            )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break for any model; layer numbers are checked once a model is there."""
        if self.every_n_layers < 1:
            yield (
                f"checkpointing.every_n_layers must be at least 1, got {self.every_n_layers}. "
                "Set it to 1 to checkpoint every layer."
            )
        if self.skip_last_layers < 0:
            yield (
                f"checkpointing.skip_last_layers must be at least 0, got {self.skip_last_layers}. Set it to 0 to "
                "exclude no layer."
            )
        if self.mode == "auto" and not self.takes_every_layer:
            yield (
                "checkpointing.mode=auto chooses the layers itself, got "
                f"every_n_layers={self.every_n_layers} and skip_last_layers={self.skip_last_layers}. "
                "Leave these out, or set checkpointing.mode=full."
            )

    def problems_with(self, num_layers: int) -> Iterator[str]:
        """Yield the rules that these values break for a model with ``num_layers`` layers."""
        if self.mode != "none" and self.skip_last_layers >= num_layers:
            yield (
                f"checkpointing.skip_last_layers must be from 0 to {num_layers - 1} with a model of {num_layers} "
                f"layers, got {self.skip_last_layers}. To checkpoint no layer set checkpointing.mode=none."
            )
