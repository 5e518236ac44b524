"""Random runs of the memory ladder, on models of random sizes, each compared with its plain run.

Pairs of choices meet in ``tests/invariants/test_every_pair.py``. Errors that need three of them, an odd size or a batch
without labels are found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ground_truth.ladder_matrix import FACTORS, is_possible, overrides_of, plain
from ground_truth.ladder_run import Outcome, Rows, outcome_of, tolerance
from hypothesis.strategies import DrawFn, booleans, composite, integers, sampled_from
from measuring.cpu_matrix import Choice, Levels
from measuring.families import FAMILIES
from transformers import AutoConfig

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.optimizers.table import OPTIMIZERS, OptimizerRow
from lowmem_ft.recipe import Recipe, load_recipe

_NAMES = {"gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}}
_NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}
_ROWS: dict[str, OptimizerRow] = {**OPTIMIZERS}
_HYPERPARAMETERS = {"betas": ("[0.9,0.999]", "[0.8,0.95]"), "momentum": ("0", "0.9")}
_HAS_BIASES = {"llama": ("attention_bias", "mlp_bias"), "qwen3": ("attention_bias",), "falcon": ("bias",)}
_LOWEST_RUNGS: dict[str, tuple[str, ...]] = {
    "update": ("in_backward",),
    "optimizer_home": ("host",),
    "parameters": ("stream", "stream-1"),
    "checkpointing": ("full", "selective"),
    "window": ("one", "three-vertical"),
}


@dataclass(frozen=True, kw_only=True)
class RandomRun:
    """One run and its model.

    Args:
        fields: fields of the model's config.
        levels: a choice of each of the ladder's factors except the family.
        shared: settings that the plain run has too.
        own: settings that change where bytes are stored or the order of sums.
        rows: the rows it trains on.
    """

    fields: dict[str, Any]
    levels: Levels
    shared: Choice
    own: Choice
    rows: Rows


@composite
def random_runs(draw: DrawFn) -> RandomRun:
    """Draw a run that the rules allow; every second one is on a rung far down."""
    levels = _levels(draw)
    family = levels.pop("family")
    fields = {"model_type": family, **FAMILIES[family], **_random_sizes(family, draw)}
    return RandomRun(
        fields=fields,
        levels=levels,
        shared=(*_shared_settings(levels, draw), *_hyperparameters(levels, draw)),
        own=tuple(_own_settings(levels, _num_layers(fields), draw)),
        rows=Rows(
            seed=draw(integers(0, 999)),
            vocabulary=fields["vocab_size"],
            any_length=draw(booleans()),
            labels=draw(sampled_from(("most", "none in one micro-batch", "one", "none"))),
        ),
    )


def difference_from_plain(run: RandomRun, folder: Path) -> str | None:
    """Return the difference of a run from the plain run of the same mathematics; None if there is no difference.

    Args:
        run: the run.
        folder: an empty one, for the model's config.

    Raises:
        UserError: if the model does not allow the run.
    """
    AutoConfig.for_model(**run.fields).save_pretrained(folder)
    ours = outcome_of(_recipe(run.levels, (*run.shared, *run.own), folder), folder, run.rows)
    theirs = outcome_of(_recipe(plain(run.levels), run.shared, folder), folder, run.rows)
    return _difference(ours, theirs, tolerance(run.levels))


def has_way_out(error: UserError) -> bool:
    """Return whether each sentence of an error says what to do about it."""
    return all("Set " in problem or "name in " in problem for problem in error.problems)


def _levels(draw: DrawFn) -> dict[str, str]:
    """Draw a choice of each factor, among those that go together with the ones before."""
    lowest = _LOWEST_RUNGS if draw(booleans()) else {}
    choices = {**FACTORS, **lowest, "family": FAMILIES}
    levels: dict[str, str] = {}
    for factor in dict.fromkeys(("family", "weights", "adapter", *lowest, *FACTORS)):
        allowed = [choice for choice in choices[factor] if is_possible({**levels, factor: choice})]
        levels[factor] = draw(sampled_from(allowed))
    return levels


def _random_sizes(family: str, draw: DrawFn) -> dict[str, Any]:
    """Draw sizes that are no powers of two; multiples of 8, as the grouped product of experts requires in bfloat16."""
    heads = draw(sampled_from((2, 4)))
    sizes: dict[str, Any] = {
        "vocab_size": draw(sampled_from((257, 300, 503, 611))),
        "num_hidden_layers": draw(integers(1, 4)),
        "num_attention_heads": heads,
        "hidden_size": heads * draw(sampled_from((8, 16, 24))),
        "num_key_value_heads": draw(sampled_from((1, 2, heads))),
        "intermediate_size": draw(sampled_from((72, 104, 176))),
        "head_dim": draw(sampled_from((8, 16, 24))),
        "layer_types": None,
    }
    known = FAMILIES[family].keys() | _NAMES.get(family, {}).keys()
    sizes = {_NAMES.get(family, {}).get(key, key): value for key, value in sizes.items() if key in known}
    biases = {name: draw(booleans()) for name in _HAS_BIASES.get(family, ())}
    return {**sizes, **biases, **_NO_DROPOUT.get(family, {}), "tie_word_embeddings": draw(booleans())}


def _num_layers(fields: dict[str, Any]) -> int:
    return fields["n_layer" if "n_layer" in fields else "num_hidden_layers"]


def _shared_settings(levels: Levels, draw: DrawFn) -> Iterator[str]:
    yield f"training.per_device_train_batch_size={draw(sampled_from((1, 2, 3)))}"
    yield f"training.learning_rate={draw(sampled_from((1e-4, 5e-4, 1e-3)))}"
    yield f"training.lr_scheduler_type={draw(sampled_from(('constant', 'linear')))}"
    yield f"training.seed={draw(integers(0, 999))}"
    yield f"optimizer.weight_decay={draw(sampled_from((0.0, 0.1)))}"
    yield f"accumulation.dtype={draw(sampled_from(('float32', 'weights')))}"
    if levels["window"] != "one":
        yield f"training.gradient_accumulation_steps={draw(sampled_from((2, 3)))}"


def _hyperparameters(levels: Levels, draw: DrawFn) -> Iterator[str]:
    """Draw values for the optimizer's hyperparameters, not 0 if there would be no state to have a format."""
    row = _ROWS[levels["optimizer"]]
    for name, values in _HYPERPARAMETERS.items():
        if name in row.hyperparameters:
            value = draw(sampled_from(values))
            is_refused = value == "0" and levels["state"] != "fp32" and row.stateless_at_zero == name
            yield f"optimizer.{name}={row.hyperparameters[name] if is_refused else value}"


def _own_settings(levels: Levels, num_layers: int, draw: DrawFn) -> Iterator[str]:
    if levels["loss"] != "plain":
        yield f"loss.chunk_tokens={draw(sampled_from((1, 7, 33, 200)))}"
    if levels["loss"] == "tiled":
        yield f"tiling.head={draw(sampled_from((2, 5, 9)))}"
    if levels["mlp"] == "tiled":
        yield f"tiling.mlp={draw(sampled_from((2, 3, 7, 50)))}"
    if levels["parameters"] == "stream-1":
        yield f"offload.resident_layers={draw(sampled_from((1, max(1, num_layers - 1), num_layers)))}"
    if levels["checkpointing"] == "half":
        yield f"checkpointing.every_n_layers={draw(sampled_from((2, 3)))}"


def _recipe(levels: Levels, settings: Choice, folder: Path) -> Recipe:
    return load_recipe(None, [*overrides_of(levels), *settings, f"model={folder}"])


def _difference(ours: Outcome, theirs: Outcome, rel: float) -> str | None:
    for step, (our_loss, their_loss) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        if not abs(our_loss - their_loss) <= rel * their_loss:
            return f"loss {step} is {our_loss}, not {their_loss}"
    if ours.weights.keys() != theirs.weights.keys():
        return f"other weights: {sorted(ours.weights.keys() ^ theirs.weights.keys())}"
    unequal = [name for name, weight in theirs.weights.items() if not torch.equal(ours.weights[name], weight)]
    return f"weights differ: {unequal}" if unequal and rel == 0 else None
