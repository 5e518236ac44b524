"""Length of a planned run: its data is read, tokenized and counted as in the run, and multiplied by the step time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lowmem_ft.data.loading import load_data
from lowmem_ft.foundation.memory.memory_estimate import StepTime
from lowmem_ft.models.hf_config import load_model_config, max_positions, vocab_size
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.run.data_inspection import tokenizer_or_none


@dataclass(frozen=True, kw_only=True)
class RunLength:
    """Steps, tokens and seconds of a whole run.

    Args:
        steps: optimizer steps of the whole run.
        tokens: tokens of all steps, without padding.
        seconds: seconds of all steps, by the estimate for a step of the longest rows, without loading and saving.
    """

    steps: int
    tokens: int
    seconds: float


def run_length(recipe: Recipe, step: StepTime) -> RunLength:
    """Return the length of the run that a recipe asks for.

    Args:
        recipe: the recipe, with data that is not streamed.
        step: estimate of a step of one of its processes.

    Returns:
        The length. Rows shorter than the longest count by their tokens.

    Raises:
        UserError: if the data cannot be read, or the tokenizer, unless rows are tokens already.
    """
    hf_config = load_model_config(recipe.model, architecture_only=True)
    data = load_data(
        recipe.data,
        tokenizer_or_none(recipe.model),
        max_positions=max_positions(hf_config),
        seed=recipe.training.seed,
        attn_implementation="varlen_attn" if recipe.data.packing else "sdpa",
        vocab_size=vocab_size(hf_config),
    )
    training, plan = recipe.training, recipe.distributed.plan()
    num_rows = data.train.num_rows
    assert num_rows is not None, "data that is streamed has no known length"
    assert data.summary is not None, "what is read whole is summed up"
    rows_of_step = (
        plan.rows_at_once(training.per_device_train_batch_size) * training.gradient_accumulation_steps
    )
    per_epoch = -(-num_rows // rows_of_step)
    steps = training.max_steps if training.max_steps > 0 else math.ceil(training.num_train_epochs * per_epoch)
    tokens = round(data.summary.num_tokens * steps / per_epoch)
    seconds = min(steps * step.seconds, plan.per_process(tokens) / step.tokens_per_second)
    return RunLength(steps=steps, tokens=tokens, seconds=seconds)
