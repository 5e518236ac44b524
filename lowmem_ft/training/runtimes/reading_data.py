"""The data of a run, read once on each machine: the main process tokenizes it, and the others find it in the cache."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.loading import load_data
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.models.hf_config import max_positions, vocab_size
from lowmem_ft.models.tokenizer import end_token_ids
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.processes.data_agreement import refuse_other_data
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.build import Plan


def read_data(recipe: Recipe, ranks: Ranks, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> PreparedData:
    """Tokenize the recipe's data for the planned model, in the main process first; the others find it in the cache.

    Raises:
        UserError: if a process cannot read the data, or reads different data.
    """
    data: PreparedData | None = None
    num_rows = vocab_size(plan.hf_config)
    if num_rows is not None and recipe.model.new_tokens:
        num_rows = max(num_rows, len(tokenizer))
    for is_turn in (ranks.is_main, not ranks.is_main):
        with ranks.failing_together():
            if is_turn:
                data = load_data(
                    recipe.data,
                    tokenizer,
                    max_positions=max_positions(plan.hf_config),
                    vocab_size=num_rows,
                    seed=recipe.training.seed,
                    attn_implementation=plan.attention.implementation,
                    end_token_ids=end_token_ids(recipe.model),
                )
    assert data is not None, "each process has run"
    refuse_other_data(data, ranks)
    return data
