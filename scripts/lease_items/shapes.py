"""Sizes of Qwen3-8B, at which products, kernels and a layer are measured; and of a model that a CPU runs at once."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.foundation.catalog.model_architectures import find_architecture

MODEL = "qwen3-8b"


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """Sizes of a model, as its config names them, and a row's tokens."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    row_tokens: int

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Return inputs and outputs of each product of a layer; the two of a pair that are alike stand for both."""
        queries, keys = (n * self.head_dim for n in (self.num_attention_heads, self.num_key_value_heads))
        return {
            "q": (self.hidden_size, queries),
            "k": (self.hidden_size, keys),
            "v": (self.hidden_size, keys),
            "o": (queries, self.hidden_size),
            "gate": (self.hidden_size, self.intermediate_size),
            "up": (self.hidden_size, self.intermediate_size),
            "down": (self.intermediate_size, self.hidden_size),
        }


TINY = Shapes(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    row_tokens=64,
)


def shapes(*, tiny: bool) -> Shapes:
    """Return the sizes of ``MODEL``, or of ``TINY``."""
    if tiny:
        return TINY
    architecture = find_architecture(MODEL)
    assert architecture is not None
    sizes = {name: architecture.config[name] for name in Shapes.__dataclass_fields__ if name != "row_tokens"}
    return Shapes(**sizes, row_tokens=2048)
