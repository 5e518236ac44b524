"""``checkpointing.mode=auto``: the fastest layers to checkpoint that fit, found in few estimates."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import transformers
from tiny_models import tiny_llama

from lowmem_ft.cli import main
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.uncertainty import with_headroom
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.planner import plan, plan_checkpointing
from lowmem_ft.planning.planner.automatic_checkpointing import chosen_in_words
from lowmem_ft.planning.planner.search.estimated_needs import need_from
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.training.run.loop import train

NO_LAYER = CheckpointingConfig(mode="none")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "intermediate_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "alike": transformers.LlamaConfig(**SIZES, num_hidden_layers=3),
    "local and global": transformers.Gemma3TextConfig(
        **SIZES,
        head_dim=64,
        sliding_window=64,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "dense first": transformers.Glm4MoeConfig(
        **SIZES,
        head_dim=64,
        num_hidden_layers=4,
        first_k_dense_replace=2,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
    ),
    "deep": transformers.LlamaConfig(**SIZES, num_hidden_layers=40),
}
CHOICES = [
    NO_LAYER,
    *(
        CheckpointingConfig(mode=mode, skip_last_layers=skipped)
        for mode in ("full", "selective")
        for skipped in range(3)
    ),
]


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in MODELS.items():
        config.save_pretrained(folder / name)

    def recipe(name, *settings):
        always = ("model.weights=random", "data.max_length=512", "training.per_device_train_batch_size=8")
        how = ("training.mixed_precision=bf16", "checkpointing.mode=auto")
        return load_recipe(None, [f"model={folder / name}", *always, *how, *settings])

    return recipe


@pytest.fixture(scope="module", autouse=True)
def traced_once(tmp_path_factory):
    """Estimates are real ones; what is traced for one budget serves the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWMEM_FT_TRACE_CACHE", str(tmp_path_factory.mktemp("traces")))
        yield


def real_need(recipe, config, budget=None):
    chosen = dataclasses.replace(recipe, checkpointing=config)
    kept = KeptTraces.of_user()
    return need_from(estimate_memory(chosen, "l4", budget=budget, kept=kept))


def leaving(layers, mode="full"):
    return CheckpointingConfig(mode=mode, skip_last_layers=layers)


@pytest.fixture(scope="module")
def needs(recipe_of):
    """Of each choice, without a budget."""
    return {config: real_need(recipe_of("alike"), config) for config in CHOICES}


@pytest.fixture
def budget_of(needs):
    """What is just enough for a choice, or for less."""

    def budget(config, share=1.0):
        return f"{round(share * needs[config].device_bytes) + 1}B"

    return budget


def test_with_much_memory_nothing_is_computed_again(recipe_of, budget_of):
    found = plan_checkpointing(recipe_of("alike"), Budget(device=budget_of(NO_LAYER)), "l4")
    assert found.fits
    assert found.overrides == {"checkpointing.mode": "none"}
    assert found.recipe.budget.device is None, "whose budget it was is no word of the recipe's"


@pytest.mark.parametrize("enough_for", [leaving(0), leaving(1), leaving(2, "selective")], ids=str)
def test_with_less_it_is_the_fastest_that_fits(recipe_of, budget_of, enough_for):
    budget = Budget(device=budget_of(enough_for))
    found = plan_checkpointing(recipe_of("alike"), budget, "l4")
    real = [real_need(recipe_of("alike"), config, budget) for config in CHOICES]
    assert found.estimate.step.seconds == min(need.seconds for need in real if need.fits)
    assert found.recipe.checkpointing.mode != "none"
    assert real_need(found.recipe, found.recipe.checkpointing, budget).fits
    assert any(not need.fits for need in real)


@pytest.mark.parametrize(
    "name,mode,layers",
    [
        ("local and global", "full", (0, 2)),
        ("dense first", "full", (0, 2)),
        pytest.param("local and global", "selective", range(4), marks=pytest.mark.slow),
        pytest.param("dense first", "selective", range(4), marks=pytest.mark.slow),
        pytest.param("local and global", "full", range(4), marks=pytest.mark.slow),
        pytest.param("dense first", "full", range(4), marks=pytest.mark.slow),
    ],
)
def test_more_layers_left_alone_take_no_less_memory_and_no_more_time(recipe_of, name, mode, layers):
    """What the search takes for granted between two estimates."""
    choices = [*(leaving(skipped, mode) for skipped in layers), NO_LAYER]
    for less, more in itertools.pairwise(real_need(recipe_of(name), config) for config in choices):
        assert less.device_bytes <= more.device_bytes
        assert less.host_bytes <= more.host_bytes
        assert less.seconds >= more.seconds


def kept_layers(recipe) -> int:
    config = recipe.checkpointing
    return 40 if config.mode == "none" else config.skip_last_layers


def made_up_gib(recipe) -> float:
    """The peak of other parts hides what the first of the layers left alone keep."""
    base = 2.0 + 0.3 * (recipe.checkpointing.mode == "selective")
    return max(base + 0.25 * kept_layers(recipe), 4.0)


def made_up_seconds(recipe) -> float:
    again = {"none": 0.0, "selective": 0.9, "full": 1.0}[recipe.checkpointing.mode]
    return 30.0 + 10.0 * again * (1 - kept_layers(recipe) / 40)


@pytest.mark.parametrize("gib", [4.5, 6.0, 8.0, 11.0, 12.8, 20.0])
def test_a_deep_model_is_settled_in_few_estimates(recipe_of, at_once, gib):
    asked = at_once(made_up_gib, seconds=made_up_seconds)
    recipe = recipe_of("deep")
    found = plan_checkpointing(recipe, Budget(device=f"{gib}GiB"), "l4")
    every = [NO_LAYER, *(leaving(layers, mode) for mode in ("full", "selective") for layers in range(40))]
    recipes = [dataclasses.replace(recipe, checkpointing=config) for config in every]
    fitting = [made_up_seconds(one) for one in recipes if with_headroom(made_up_gib(one)) <= gib]
    assert found.estimate.step.seconds == min(fitting)
    assert len(asked) <= 20


def test_where_no_clock_tells_the_fewest_layers_are_recomputed(recipe_of, at_once):
    at_once(lambda recipe: 1.0, host_gib=made_up_gib)
    found = plan_checkpointing(recipe_of("deep"), Budget(host="8GiB"), "cpu")
    assert found.recipe.checkpointing == leaving(22)


def test_what_other_knobs_need_is_kept_to(recipe_of, at_once):
    """Vertical order has every layer checkpointed: the mode alone is left to choose."""
    asked = at_once(lambda recipe: 1.0, seconds=made_up_seconds)
    recipe = recipe_of("deep", "accumulation.order=vertical", "training.gradient_accumulation_steps=2")
    found = plan_checkpointing(recipe, Budget(device="20GiB"), "l4")
    assert found.recipe.checkpointing == leaving(0, "selective")
    assert len(asked) == 2


def test_where_copies_of_activations_take_the_time_checkpointing_saves_it(recipe_of, at_once):
    """offload.activations=all without checkpointing sends all of them over the link."""
    at_once(lambda recipe: 1.0, seconds=lambda recipe: 10.0 + kept_layers(recipe))
    found = plan_checkpointing(recipe_of("deep", "offload.activations=all"), Budget(device="20GiB"), "l4")
    assert found.recipe.checkpointing == leaving(0)


def test_a_device_that_refuses_is_quoted(recipe_of):
    with pytest.raises(UserError, match=r"got training\.mixed_precision=bf16 on Tesla T4"):
        plan_checkpointing(recipe_of("alike"), None, "t4")


def test_a_plan_of_all_knobs_chooses_the_layers_too(recipe_of, at_once):
    at_once(made_up_gib, seconds=made_up_seconds)
    keep = "plan.keep=[model,training,optimizer,offload,tiling,loss,accumulation,adapter]"
    found = plan(recipe_of("deep", keep), Budget(device="8GiB"), "l4")
    assert found.overrides == {"checkpointing.mode": "full", "checkpointing.skip_last_layers": 22}
    assert found.recipe.checkpointing == leaving(22)


def test_of_equally_fast_numbers_of_resident_layers_the_most_stay(recipe_of, at_once):
    at_once(lambda recipe: 2.0, seconds=lambda recipe: 10.0 if recipe.offload.resident_layers else 12.0)
    others = "offload.activations,offload.optimizer,offload.parameters,offload.folder"
    keep = f"plan.keep=[model,training,optimizer,{others},tiling,loss,accumulation,adapter,checkpointing]"
    streamed = ("optimizer.in_backward=true", "offload.optimizer=host", "offload.parameters=stream")
    recipe = recipe_of("deep", keep, "checkpointing.mode=full", *streamed)
    assert plan(recipe, Budget(device="8GiB"), "l4").overrides == {"offload.resident_layers": 39}


def test_a_plan_tries_every_layer_where_a_recipe_checkpoints_every_other(recipe_of, at_once):
    at_once(lambda recipe: 5.0 * recipe.checkpointing.every_n_layers, seconds=made_up_seconds)
    others = "checkpointing.mode,checkpointing.skip_last_layers"
    keep = f"plan.keep=[model,training,optimizer,offload,tiling,loss,accumulation,adapter,{others}]"
    recipe = recipe_of("deep", keep, "checkpointing.mode=full", "checkpointing.every_n_layers=2")
    assert plan(recipe, Budget(device="8GiB"), "l4").overrides == {"checkpointing.every_n_layers": 1}


def test_what_was_chosen_is_said_in_a_line(recipe_of, at_once):
    at_once(made_up_gib, seconds=made_up_seconds)
    said = [
        chosen_in_words(plan_checkpointing(recipe_of("deep"), Budget(device=device), "l4"))
        for device in ("20GiB", "8GiB", "4GiB")
    ]
    assert said == [
        "checkpointing.mode=auto: none (fits with 8.00 GiB to spare, 25.0% faster than every layer checkpointed)",
        "checkpointing.mode=auto: full, skip_last_layers=22 (fits with 512 MiB to spare, 13.7% faster than every "
        "layer checkpointed)",
        "checkpointing.mode=auto: full (the smallest that it can choose, which lacks 261 MiB with 6% to spare, "
        "rtx-4060 would do)",
    ]


def test_an_estimate_says_what_it_chose_and_whether_it_fits(recipe_of, budget_of, capsys, tmp_path):
    (recipe := tmp_path / "one.yaml").write_text(
        f"model: {{name_or_path: {recipe_of('alike').model.name_or_path}}}\n"
    )
    command = [
        "estimate",
        f"recipe={recipe}",
        "model.weights=random",
        "data.max_length=512",
        "checkpointing.mode=auto",
    ]
    command += ["training.per_device_train_batch_size=8", "training.mixed_precision=bf16", "--gpu", "l4"]
    for budget, code, words in (
        (budget_of(NO_LAYER), 0, "checkpointing.mode=auto: none (fits"),
        (budget_of(leaving(2)), 0, ", skip_last_layers=2 (fits"),
        (budget_of(leaving(1)), 0, "faster than every layer checkpointed)"),
        (budget_of(leaving(0), 0.8), 3, "checkpointing.mode=auto: full (the smallest that it can choose"),
    ):
        assert main([*command, f"budget={budget}", "--json", "-"]) == code, words
        assert words in (told := capsys.readouterr().out), told[-2000:]


def test_nothing_below_ever_sees_it(recipe_of):
    recipe = recipe_of("alike")
    for use in (
        lambda: estimate_memory(recipe, "l4"),
        lambda: train(recipe),
        lambda: enable_checkpointing(tiny_llama(), recipe.checkpointing),
    ):
        with pytest.raises(UserError, match=r"checkpointing.mode=auto must be resolved for a budget before"):
            use()


def test_several_processes_choose_beforehand(recipe_of):
    (problem,) = problems_with_processes(recipe_of("alike"), 2)
    assert "checkpointing.mode=auto makes a plan for one process, got 2" in problem
