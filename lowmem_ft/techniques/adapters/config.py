"""The keys of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import NO_EFFECT, Effect, knob
from lowmem_ft.foundation.memory.least_memory import PARTS, as_it_is, gone_unless
from lowmem_ft.foundation.packages import require_package

MOST_RANK = 32_768
"""Twice the width of the widest open model (Llama 3.1 405B); once the model is known, its own width is the limit."""


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Small trained matrices next to frozen weights, by PEFT's names (``peft.LoraConfig``)."""

    name: Literal["none", "lora"] = knob(
        "none",
        "lora: the model's own weights are frozen, and low-rank matrices are trained in addition.",
        frees=(
            "gradients and optimizer state of everything except the adapters (less than 1% of the parameters)"
        ),
        costs="other mathematics: the update of each matrix has rank r, and needs a higher learning rate",
        effects={"lora": Effect(fidelity="other mathematics", consent="lora")},
        search_values=("none", "lora"),
        remaining_bytes={
            **dict.fromkeys(("state", "gradients", "sums", "activations", "saved"), gone_unless("none")),
            "outer": as_it_is,
        },
    )
    r: int = knob(16, "Rank of the adapters.")
    lora_alpha: float = knob(32.0, "The adapters' product is scaled by lora_alpha / r (rsLoRA: / sqrt(r)).")
    lora_dropout: float = knob(0.0, "Dropout before the adapters.")
    target_modules: tuple[str, ...] = knob(
        ("all-linear",),
        ("Names of the layers that get adapters; all-linear: every linear layer except for the head."),
    )
    target_parameters: tuple[str, ...] = knob(
        (),
        "Names of parameters that get adapters, for experts that are one tensor: [mlp.experts.gate_up_proj, "
        "mlp.experts.down_proj]; all-linear then means only linear layers.",
    )
    modules_to_save: tuple[str, ...] = knob(
        (),
        "Names of modules that are trained and saved whole with the adapters, in their own type: [embed_tokens, "
        "lm_head]; in a tied model embed_tokens is both.",
    )
    train_new_tokens: bool = knob(
        False,
        "Train the rows of model.add_tokens and model.add_special_tokens in the embedding and head, and no other row "
        "of them (PEFT's trainable_token_indices).",
    )
    use_dora: bool = knob(False, "DoRA: adapters for the direction of each row, and a trained magnitude.")
    use_rslora: bool = knob(False, "rsLoRA: scale by sqrt(r), so that high ranks learn as fast as low ones.")
    kernel: Literal["fused", "peft"] = knob(
        "fused",
        "fused: a linear layer and its adapter are one operation; peft: PEFT's own forward computes them.",
        frees="copies of the layer's output in forward, and of its input with dropout until backward",
        costs="the adapter's first product (rank r) again in backward, and the host's time; where the GPU sets the "
        "pace it saves more time than that",
        effects={"fused": NO_EFFECT, "peft": NO_EFFECT},
        remaining_bytes=dict.fromkeys(PARTS, as_it_is),
        is_kernel=True,
    )

    @property
    def trains_model_weights(self) -> bool:
        """True if weights of the model itself are trained, in their own type: all, some whole modules, or new rows."""
        return self.name == "none" or bool(self.modules_to_save) or self.train_new_tokens

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        if self.name == "none" and self != AdapterConfig():
            yield "adapter settings need adapter.name=lora, got none. Set it, or leave them out."
        if not 1 <= self.r <= MOST_RANK:
            yield f"adapter.r is from 1 to {MOST_RANK}, got {self.r}. Try 16."
        if not self.lora_alpha > 0:
            yield f"adapter.lora_alpha must be above 0, got {self.lora_alpha}. Try 2 * adapter.r."
        if not 0 <= self.lora_dropout < 1:
            yield f"adapter.lora_dropout is from 0 to below 1, got {self.lora_dropout}. Try 0.05."
        is_empty = not (self.target_modules or self.target_parameters)
        if is_empty or ("all-linear" in self.target_modules and len(self.target_modules) > 1):
            yield (
                "adapter.target_modules is [all-linear], or names of layers such as [q_proj, v_proj]; got "
                f"[{', '.join(self.target_modules)}]. Set it to [all-linear]."
            )
        if self.target_parameters and self.lora_dropout:
            yield (
                "adapter.target_parameters takes no dropout, which a sum of weight and adapter cannot have; got "
                f"adapter.lora_dropout={self.lora_dropout}. Set it to 0, or leave adapter.target_parameters out."
            )
        if self.target_parameters and self.use_dora:
            yield (
                "adapter.target_parameters takes no DoRA, which PEFT has for layers alone; got adapter.use_dora=true. "
                "Set it to false, or leave adapter.target_parameters out."
            )

    def refuse_rank(self, hidden_size: int) -> None:
        """Reject a rank above that of any matrix of the model.

        Raises:
            UserError: if it is.
        """
        if self.name == "lora" and self.r > hidden_size:
            raise UserError(
                f"adapter.r is at most the model's hidden_size of {hidden_size}, which is the rank of its largest "
                f"matrix, got {self.r}. Try 16, or train all weights with adapter.name=none."
            )

    def require_packages(self) -> None:
        """Reject adapters if the package that creates them is not installed.

        Raises:
            MissingPackageError: if it is not installed.
        """
        if self.name == "lora":
            require_package("adapter.name=lora", "peft", "lora")
