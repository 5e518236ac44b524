"""Any two choices of the memory ladder that go together train as the plain run of the same mathematics does."""

import itertools
import random

import pytest
from ground_truth.covering import covering
from ground_truth.ladder_matrix import (
    CHANGES_THE_ORDER_OF_SUMS,
    FACTORS,
    KEEPS_EVERY_BIT,
    NOT_WITH_FAMILY,
    effects_of,
    is_allowed,
    is_possible,
    overrides_of,
    plain,
    random_levels,
)
from ground_truth.ladder_run import outcome_of, tolerance
from measuring.families import FAMILIES
from transformers import AutoConfig

from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.recipe import load_recipe

RUNS, EXCLUDED = covering(FACTORS, is_possible)
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Folders with each family's config, without dropout: vertical order draws its random numbers otherwise."""
    folder = tmp_path_factory.mktemp("families")
    for name in FACTORS["family"]:
        fields = {"model_type": name, **FAMILIES[name], **NO_DROPOUT.get(name, {})}
        AutoConfig.for_model(**fields).save_pretrained(folder / name)
    return folder


def recipe_of(levels, families):
    family = f"model={families / levels['family']}"
    return load_recipe(
        None,
        [*overrides_of(levels), family, "training.learning_rate=1e-3", "training.lr_scheduler_type=constant"],
    )


def name_of(levels):
    return " ".join(levels.values())


def losses_of(levels, families, folder):
    """Of two steps, the second with state, and of the rows that the trained model is evaluated on."""
    return outcome_of(recipe_of(levels, families), folder, num_steps=2).losses


_PLAIN_LOSSES = {}


def plain_losses(levels, families, folder):
    key = name_of(plain(levels))
    if key not in _PLAIN_LOSSES:
        _PLAIN_LOSSES[key] = losses_of(plain(levels), families, folder)
    return _PLAIN_LOSSES[key]


@pytest.mark.parametrize("levels", RUNS, ids=name_of)
def test_a_run_has_the_losses_of_the_plain_run(levels, families, tmp_path):
    losses = losses_of(levels, families, tmp_path)
    assert losses == pytest.approx(plain_losses(levels, families, tmp_path), rel=tolerance(levels), abs=0)


STREAMED = {"checkpointing": "full", "update": "in_backward", "optimizer_home": "host"}
MOVES_BYTES_ONLY = [
    {"update": "in_backward"},
    {"optimizer_home": "host"},
    {"checkpointing": "full"},
    {"checkpointing": "half"},
    {"checkpointing": "selective"},
    {"checkpointing": "full", "activations": "inputs"},
    {"activations": "all"},
    {"mlp_activation": "recomputed"},
    {**STREAMED, "parameters": "stream"},
    {**STREAMED, "parameters": "stream-1", "activations": "inputs"},
]
UNCLIPPED = {**plain(RUNS[0]), "window": "one", "clipping": "unclipped", "adapter": "none", "rows": "2x64"}


KINDS = [
    {"family": "llama", "optimizer": "adamw", "weights": "fp32", "state": "fp32"},
    {"family": "qwen2", "optimizer": "adamw", "weights": "bf16-split24", "state": "8bit"},
    {"family": "qwen3_moe", "optimizer": "lion", "weights": "bf16-split16", "state": "bf16"},
]
POSSIBLE = [
    pair for pair in itertools.product(KINDS, MOVES_BYTES_ONLY) if is_possible({**pair[0], **pair[1]})
]


@pytest.mark.parametrize("kind,changes", POSSIBLE, ids=name_of)
def test_what_only_moves_bytes_changes_no_bit(kind, changes, families, tmp_path):
    levels = {**UNCLIPPED, **kind, **changes}
    assert tolerance(levels) == 0
    losses = losses_of(levels, families, tmp_path)
    assert losses == plain_losses(levels, families, tmp_path)


def test_all_that_moves_bytes_is_among_them():
    changed = {item for changes in MOVES_BYTES_ONLY for item in changes.items()}
    first = {(factor, next(iter(FACTORS[factor]))) for factor in KEEPS_EVERY_BIT}
    assert {(f, choice) for f in KEEPS_EVERY_BIT for choice in FACTORS[f]} - first == changed


@pytest.mark.parametrize("factor", [*KEEPS_EVERY_BIT, *CHANGES_THE_ORDER_OF_SUMS])
def test_knobs_whose_runs_are_held_to_the_plain_numbers_say_that_they_are_exact(factor):
    effects = [effect for settings in FACTORS[factor].values() for effect in effects_of(settings)]
    assert effects
    assert {effect.fidelity for effect in effects} == {"exact"}


def test_what_is_not_run_is_refused_with_a_way_out(families):
    """For every pair that no run holds, the recipe's rules say why: no completion of it is accepted."""
    refused = [pair for pair in EXCLUDED if not is_allowed(pair)]
    assert refused
    generator = random.Random(0)
    for pair in refused:
        for _ in range(6):
            levels = {**random_levels(generator), **pair}
            with pytest.raises(RecipeError, match=r"Set|Remove|leave|needs"):
                recipe_of(levels, families)


@pytest.mark.parametrize("factor,choice,family", sorted(NOT_WITH_FAMILY))
def test_what_only_the_model_refuses_is_explained(factor, choice, family, families, tmp_path):
    levels = {**plain(RUNS[0]), "weights": "fp32", "optimizer": "adamw", "adapter": "none"}
    with pytest.raises(UserError, match="Set "):
        outcome_of(recipe_of({**levels, "family": family, factor: choice}, families), tmp_path)


def test_the_rules_refuse_what_the_search_leaves_out_and_nothing_else(families):
    generator = random.Random(1)
    accepted = 0
    for _ in range(200):
        levels = random_levels(generator)
        try:
            recipe_of(levels, families)
        except RecipeError as error:
            if is_allowed(levels):
                pytest.fail(f"{name_of(levels)}: {error}")
        else:
            accepted += 1
            assert is_allowed(levels), name_of(levels)
    assert accepted > 0
