"""The data of a run, read once on each machine: the main process tokenizes it, and the others find it in the cache."""

from __future__ import annotations

import socket

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.loading import load_data
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.models.hf_config import max_positions, vocab_size
from lowmem_ft.models.tokenizer import end_token_ids
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.processes.rendezvous import RankInfo, differences
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
    _refuse_other_data(data, ranks)
    return data


def _refuse_other_data(data: PreparedData, ranks: Ranks) -> None:
    """Compare counts and tokens over all processes; a stream is not compared.

    Args:
        data: this process's data.
        ranks: those of the run.

    Raises:
        DataError: in all processes, if one has different data from the first.
    """
    if ranks.num_processes == 1:
        return
    arrivals = ranks.gather([RankInfo(socket.gethostname(), (), _facts_of(data))])
    way_out = "Let data.path and its files be the same on every machine."
    raise_problems(list(differences(arrivals, way_out)), DataError)


def _facts_of(data: PreparedData) -> dict[str, str]:
    """Return facts about the data by name; equal data has equal facts."""
    facts = {}
    for which, summary in (("training", data.summary), ("held-out", data.evaluation_summary)):
        if summary is not None:
            facts[f"number of {which} examples"] = f"{summary.num_examples:,}"
            facts[f"number of {which} tokens"] = f"{summary.num_tokens:,}"
            facts[f"number of {which} label tokens"] = f"{summary.num_label_tokens:,}"
    if data.train.num_rows is not None:
        facts["tokens of the training examples"] = f"digest {data.fingerprint}"
    return facts
