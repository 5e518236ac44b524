"""Any two choices of the memory ladder that go together train as the plain run of the same mathematics does."""

import random

import pytest
import torch
from ground_truth.families import FAMILIES, VOCABULARY
from ground_truth.ladder_matrix import (
    CHANGES_THE_ORDER_OF_SUMS,
    FACTORS,
    KEEPS_EVERY_BIT,
    NOT_WITH_FAMILY,
    covering,
    is_allowed,
    overrides_of,
    plain,
    random_levels,
)
from transformers import AutoConfig

from lowmem_ft.data import Batch
from lowmem_ft.errors import RecipeError, UserError
from lowmem_ft.models import load_model_config
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.build import build_session, plan_session
from lowmem_ft.training.runtime import AccelerateRuntime
from lowmem_ft.training.step import evaluation_loss, train_step

RUNS, EXCLUDED = covering()
NUM_STEPS = 3
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


def batch_of(recipe, generator):
    """Rows of unlike lengths: some padded or, packed, of several documents."""
    rows, length = recipe.training.per_device_train_batch_size, recipe.data.max_length
    input_ids_BT = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    labels_BT = input_ids_BT.clone()
    labels_BT[:, : int(torch.randint(1, length // 2, (1,), generator=generator))] = -100
    position_ids_BT = None
    if recipe.data.packing:
        cut = int(torch.randint(1, length, (1,), generator=generator))
        position_ids_BT = torch.cat([torch.arange(cut), torch.arange(length - cut)]).repeat(rows, 1)
        labels_BT[:, cut] = -100
    return Batch(
        input_ids_BT=input_ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=position_ids_BT,
        sample_ids=tuple(range(rows)),
        num_label_tokens=int((labels_BT != -100).sum()),
        num_tokens=rows * length,
    )


def losses_of(recipe, folder):
    """Training losses, and then the loss of the trained model on other rows."""
    runtime = AccelerateRuntime.create(recipe.training, folder)
    plan = plan_session(recipe, runtime, load_model_config(recipe.model))
    torch.manual_seed(0)
    session = build_session(recipe, runtime, plan, num_training_steps=NUM_STEPS)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(NUM_STEPS):
        window = [batch_of(recipe, generator) for _ in range(recipe.training.gradient_accumulation_steps)]
        result = train_step(session, window)
        assert result.applied
        losses.append(float(result.loss))
    session.flush()
    session.model.eval()
    loss_sum, num_label_tokens = evaluation_loss(session, [batch_of(recipe, generator)])
    session.close()
    return [*losses, float(loss_sum / num_label_tokens)]


_PLAIN_LOSSES = {}


def plain_losses(levels, families, folder):
    key = name_of(plain(levels))
    if key not in _PLAIN_LOSSES:
        _PLAIN_LOSSES[key] = losses_of(recipe_of(plain(levels), families), folder)
    return _PLAIN_LOSSES[key]


def tolerance(levels):
    """Relative, of a loss: none where no number changes, else some roundings of what is computed with."""
    changed = {factor for factor in FACTORS if levels[factor] != plain(levels)[factor]}
    # Squares of gradients are summed in another order, and so the clip's coefficient may differ in its last bit.
    clips_in_backward = levels["update"] == "in_backward" and levels["clipping"] == "clipped"
    if changed.isdisjoint(CHANGES_THE_ORDER_OF_SUMS) and not clips_in_backward:
        return 0.0
    return 2e-5 if levels["weights"] == "fp32" and levels["state"] == "fp32" else 5e-3


@pytest.mark.parametrize("levels", RUNS, ids=name_of)
def test_a_run_has_the_losses_of_the_plain_run(levels, families, tmp_path):
    losses = losses_of(recipe_of(levels, families), tmp_path)
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
    {**STREAMED, "parameters": "stream"},
    {**STREAMED, "parameters": "stream-1", "activations": "inputs"},
]
UNCLIPPED = {**plain(RUNS[0]), "window": "one", "clipping": "unclipped", "adapter": "none", "rows": "2x64"}


@pytest.mark.parametrize("changes", MOVES_BYTES_ONLY, ids=name_of)
@pytest.mark.parametrize(
    "kind",
    [
        {"family": "llama", "optimizer": "adamw", "weights": "fp32", "state": "fp32"},
        {"family": "qwen2", "optimizer": "adamw", "weights": "bf16-split24", "state": "8bit"},
        {"family": "qwen3_moe", "optimizer": "lion", "weights": "bf16-split16", "state": "bf16"},
    ],
    ids=name_of,
)
def test_what_only_moves_bytes_changes_no_bit(kind, changes, families, tmp_path):
    levels = {**UNCLIPPED, **kind, **changes}
    assert tolerance(levels) == 0
    losses = losses_of(recipe_of(levels, families), tmp_path)
    assert losses == plain_losses(levels, families, tmp_path)


def test_all_that_moves_bytes_is_among_them():
    changed = {item for changes in MOVES_BYTES_ONLY for item in changes.items()}
    first = {(factor, next(iter(FACTORS[factor]))) for factor in KEEPS_EVERY_BIT}
    assert {(f, choice) for f in KEEPS_EVERY_BIT for choice in FACTORS[f]} - first == changed


def test_what_is_not_run_is_refused_with_a_way_out(families):
    """For every pair that no run holds, the recipe's rules say why: no completion of it is accepted."""
    refused = [pair for pair in EXCLUDED if not is_allowed(pair)]
    assert refused
    generator = random.Random(0)
    for pair in refused:
        for _ in range(20):
            levels = {**random_levels(generator), **pair}
            with pytest.raises(RecipeError, match=r"Set|Remove|leave|needs"):
                recipe_of(levels, families)


@pytest.mark.parametrize("factor,choice,family", sorted(NOT_WITH_FAMILY))
def test_what_only_the_model_refuses_is_explained(factor, choice, family, families, tmp_path):
    levels = {**plain(RUNS[0]), "weights": "fp32", "optimizer": "adamw", "adapter": "none"}
    with pytest.raises(UserError, match="Set "):
        losses_of(recipe_of({**levels, "family": family, factor: choice}, families), tmp_path)


def test_the_rules_refuse_what_the_search_leaves_out_and_nothing_else(families):
    generator = random.Random(1)
    accepted = 0
    for _ in range(400):
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
