"""A greedy answer of a model, and how far that of an exported one is from it.

Axes: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

PROMPT = "The three primary colours are"
NUM_TOKENS = 24


@dataclass(frozen=True)
class Answer:
    """A greedy continuation of :data:`PROMPT`.

    Args:
        prompt_ids: the prompt's tokens.
        ids: the tokens that follow, at most :data:`NUM_TOKENS`.
        text: the same in words.
        logits_V: float32 logits of the first of them.
    """

    prompt_ids: list[int]
    ids: list[int]
    text: str
    logits_V: Tensor


@torch.no_grad()
def greedy_answer(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt_ids: list[int] | None = None
) -> Answer:
    """Return a model's answer, computed where its weights are.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer.
        prompt_ids: the prompt's tokens, if they were made by another tokenizer.
    """
    prompt_ids = prompt_ids or list(tokenizer(PROMPT)["input_ids"])
    ids_BT = torch.tensor([prompt_ids], device=model.device)
    config = GenerationConfig(
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    was_training = model.training
    made = model.eval().generate(
        input_ids=ids_BT, attention_mask=torch.ones_like(ids_BT), generation_config=config
    )
    model.train(was_training)
    ids = made.sequences[0, len(prompt_ids) :].tolist()
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Answer(prompt_ids, ids, str(text), made.logits[0][0].float().cpu())


@dataclass(frozen=True)
class Comparison:
    """The answers of a source model and of what was exported from it."""

    source: Answer
    exported: Answer

    @property
    def relative_error(self) -> float:
        """Root mean square of the differences of the first token's logits, in standard deviations of the source's."""
        source_V, exported_V = self.source.logits_V, self.exported.logits_V
        size = min(len(source_V), len(exported_V))
        difference_V = exported_V[:size] - source_V[:size]
        return float(difference_V.square().mean().sqrt() / source_V[:size].std())

    @property
    def largest_difference(self) -> float:
        """Largest difference of a logit of the first token."""
        size = min(len(self.source.logits_V), len(self.exported.logits_V))
        return float((self.source.logits_V[:size] - self.exported.logits_V[:size]).abs().max())

    @property
    def num_agreeing(self) -> int:
        """Number of the answer's first tokens that are the same."""
        pairs = list(zip(self.source.ids, self.exported.ids, strict=False))
        return next((index for index, (one, other) in enumerate(pairs) if one != other), len(pairs))

    def rows(self, to_measure: str) -> list[tuple[str, str]]:
        """Return what was compared, and what it means, as labels and texts.

        Args:
            to_measure: the commands that measure both on data.
        """
        same = self.source.ids == self.exported.ids
        return [
            ("prompt", repr(PROMPT)),
            ("source says", repr(self.source.text)),
            ("export says", "the same" if same else repr(self.exported.text)),
            ("same tokens", f"the first {self.num_agreeing} of {len(self.source.ids)}, chosen greedily"),
            (
                "first token",
                f"logits differ by at most {self.largest_difference:.3g}, by {self.relative_error:.2%} of their "
                "standard deviation on average",
            ),
            ("verdict", self._verdict(to_measure)),
        ]

    def _verdict(self, to_measure: str) -> str:
        if self.largest_difference == 0:
            return "the same model: logits are equal to the bit"
        rounded = f"the same model, rounded: {self.relative_error:.2%}, where 0% is equal and 100% is refused"
        if self.source.ids == self.exported.ids:
            return f"{rounded}; the answer is the same"
        return (
            f"{rounded}. A greedy answer changes at its first close choice, which says little about its quality. "
            f"Compare losses: {to_measure}"
        )
