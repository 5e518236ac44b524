from __future__ import annotations

import json
import logging
import math
import re
import signal

import pytest
from transformers import LlamaConfig

import lowmem_ft
from lowmem_ft.foundation import packages
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.foundation.system.signals import raise_at_signals
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.planning.planner import plan
from lowmem_ft.planning.planner.search.estimated_search import MAX_EFFORT
from lowmem_ft.recipe import load_recipe, recipe_to_yaml
from lowmem_ft.recipe.reading.keys import recipe_groups
from lowmem_ft.recipe.request.plan_defaults import with_defaults_of_plan
from lowmem_ft.recipe.space.search_space import space_of
from lowmem_ft.training.run.loop import train

KEEP = (
    "plan.keep=[model,training.mixed_precision,optimizer,offload,tiling,loss,accumulation.dtype,"
    "checkpointing.mlp_activation,checkpointing.skip_last_layers]"
)
"""Leaves micro-batches, checkpointing and their order to choose."""


def rows(recipe) -> int:
    return recipe.training.per_device_train_batch_size


def made_up_bytes(recipe) -> float:
    """More rows, more bytes, but where their halving makes float32 sums of a second micro-batch."""
    sums = recipe.training.gradient_accumulation_steps > 1 and recipe.accumulation.order == "horizontal"
    activations = {"none": 2.0, "selective": 0.6, "full": 0.5}[recipe.checkpointing.mode]
    return 1.0 + rows(recipe) * activations + 4.0 * sums


def made_up_seconds(recipe) -> float:
    again = {"none": 1.0, "selective": 1.3, "full": 1.33}[recipe.checkpointing.mode]
    return (
        10.0
        * again
        / (1 - 0.5 / (1 + rows(recipe)))
        * (0.9 if recipe.accumulation.order == "vertical" else 1.0)
    )


def budget(gib: float, host_gib: float = 32) -> Budget:
    return Budget(device=f"{gib}GiB", host=f"{host_gib}GiB")


def by_looking_at_everything(recipe, limit_gib: float) -> float:
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    recipes = [space.recipe_of(combination) for combination in space.combinations]
    return min(made_up_seconds(one) for one in recipes if made_up_bytes(one) <= limit_gib * 0.94)


@pytest.mark.parametrize("gib", [2.0, 3.5, 5.0, 8.0, 11.0, 20.0])
def test_it_is_the_fastest_that_fits(make_recipe, at_once, gib):
    """Counter-examples to what seems plain stand in these numbers: smaller micro-batches that take more memory, and an
    order that takes less memory and less time."""
    at_once(made_up_bytes, seconds=made_up_seconds)
    recipe = make_recipe(KEEP)
    result = plan(recipe, budget(gib), "l4")
    assert result.fits
    assert result.is_proven
    assert result.estimate.step is not None
    assert result.estimate.step.seconds == by_looking_at_everything(recipe, gib)
    changed = load_recipe(None, [*settings_of(recipe), *result.settings])
    assert made_up_seconds(changed) == result.estimate.step.seconds


def test_where_nothing_can_be_trained_the_device_says_why(make_recipe):
    recipe = make_recipe("training.mixed_precision=bf16", "plan.keep=[training.mixed_precision]")
    with pytest.raises(UserError) as refused:
        plan(recipe, budget(8), "t4")
    first, *reasons = refused.value.problems
    assert first == "No combination of the memory settings can be trained there."
    assert len(reasons) == 2
    assert "got training.mixed_precision=bf16 on Tesla T4" in reasons[0]
    assert reasons[1] == (
        "plan.keep holds training.mixed_precision, which a plan must not change: without it there are more choices."
    )


def settings_of(recipe) -> list[str]:
    return [
        f"model={recipe.model.name_or_path}",
        "model.weights=random",
        "data.max_length=512",
        "training.gradient_accumulation_steps=4",
    ]


def test_it_says_why(make_recipe, at_once):
    at_once(made_up_bytes, seconds=made_up_seconds)
    result = plan(make_recipe(KEEP), budget(5), "l4")
    assert result.binds == ("device",)
    assert {knob.setting for knob in result.knobs} >= {"checkpointing.mode=selective"}
    for knob in result.knobs:
        assert knob.reason
    (purchase,) = result.purchases
    assert purchase.of == "device"
    assert purchase.step_seconds < result.estimate.step.seconds
    bigger = plan(make_recipe(KEEP), budget(5 + purchase.extra_bytes / 2**30 + 0.01), "l4")
    assert bigger.estimate.step.seconds <= purchase.step_seconds
    assert all(re.match(r"[\d.]+ [GM]iB too much for the device", one.reason) for one in result.rejected)
    total = result.counts.considered + result.counts.left
    sizes = [
        len(dimension.choices)
        for dimension in space_of(make_recipe(KEEP), num_layers=2, has_bfloat16=True).dimensions
    ]
    assert total == math.prod(sizes)


def test_what_fits_tightly_is_no_plan(make_recipe, at_once):
    """Estimates have been off by as much as the headroom."""
    at_once(lambda recipe: 9.5 if rows(recipe) == 4 else 9.3, seconds=lambda recipe: 9.0 - rows(recipe))
    result = plan(make_recipe(KEEP), budget(10), "l4")
    assert result.estimate.process_peak_bytes == round(9.3 * 2**30)


def test_host_memory_binds_as_well(make_recipe, at_once):
    at_once(
        lambda recipe: 1.0,
        host_gib=lambda recipe: 2.5 * rows(recipe),
        seconds=lambda recipe: 9 - rows(recipe),
    )
    result = plan(make_recipe(KEEP), budget(10, host_gib=6), "l4")
    assert rows(result.recipe) == 2
    assert result.binds == ("host",)
    assert [purchase.of for purchase in result.purchases] == ["host"]


def test_where_nothing_fits_the_nearest_and_a_card_are_named(make_recipe, at_once):
    at_once(lambda recipe: 30.0 + rows(recipe))
    result = plan(make_recipe(KEEP), budget(20), "l4")
    assert not result.fits
    assert rows(result.recipe) == 1
    assert result.missing_device_bytes == math.ceil(31 * 2**30 / 0.94 - 20 * 2**30)
    gpu = lowmem_ft.foundation.catalog.gpu_catalog.find_gpu(result.smallest_gpu)
    assert gpu.memory_bytes * 0.94 >= 31 * 2**30
    smaller = [
        card
        for card in lowmem_ft.foundation.catalog.gpu_catalog.load_gpus().values()
        if card.has_bfloat16 and 31 * 2**30 / 0.94 <= card.memory_bytes < gpu.memory_bytes
    ]
    assert not smaller


def test_whoever_adds_what_is_missing_of_the_headroom_has_a_plan(make_recipe, at_once):
    """Which is no whole number of bytes: less than half of one counts as well."""
    at_once(lambda recipe: 2.0)
    enough = 2 * 2**30 / 0.94
    assert 0 < enough % 1 < 0.5
    for limit in (math.floor(enough), math.floor(enough) - 1000):
        result = plan(make_recipe(KEEP), Budget(device=f"{limit}B", host="32GiB"), "l4")
        assert not result.fits
        more = Budget(device=f"{limit + result.missing_device_bytes}B", host="32GiB")
        assert plan(make_recipe(KEEP), more, "l4").fits
        assert limit + result.missing_device_bytes == math.ceil(enough)


def test_of_a_processor_the_upper_end_counts_for_the_host_too(make_recipe):
    everything = f"plan.keep=[{','.join(recipe_groups())}]"
    estimate = estimate_memory(make_recipe(), "cpu")
    limit = estimate.process_high_bytes - 1000
    assert estimate.host_peak_bytes / 0.94 < limit
    result = plan(make_recipe(everything), Budget(host=f"{limit}B"), "cpu")
    assert not result.fits
    assert result.missing_host_bytes == 1000


@pytest.mark.parametrize(
    "gpu,needs_gib,smallest",
    [
        ("t4", 7.0, "rtx-4060"),  # the smallest without bfloat16 has 11 GiB
        ("l4", 10.5, "rtx-3060"),  # of 12 GiB as others are, some of which have a little less, but rented
        ("l4", 20.0, "l4"),
    ],
)
def test_the_smallest_card_goes_by_memory_and_then_by_price(make_recipe, at_once, gpu, needs_gib, smallest):
    at_once(lambda recipe: needs_gib)
    assert plan(make_recipe(KEEP), budget(2), gpu).smallest_gpu == smallest


def test_of_all_that_is_logged_a_search_lets_pass_that_a_trace_is_long(make_recipe, at_once, caplog):
    def logs(recipe) -> float:
        tracing._say_that_it_takes_long("some/rwkv", "rwkv", len(caplog.records))
        logging.getLogger("lowmem_ft.recipe").warning("of a setting that nobody has chosen yet")
        return 1.0

    at_once(logs)
    plan(make_recipe(KEEP), budget(20), "l4")
    assert "Tracing some/rwkv (rwkv) takes long" in caplog.text
    assert "nobody has chosen" not in caplog.text
    logs(None)
    assert "nobody has chosen" in caplog.text


def test_mathematics_goes_where_nothing_else_fits_and_the_least_missed_first(make_recipe, at_once):
    keep = "plan.keep=[training,checkpointing,offload,tiling,loss,accumulation,optimizer]"

    def device(recipe) -> float:
        lora = recipe.adapter.name == "lora"
        return {(False, "none"): 9.0, (True, "none"): 5.0, (True, "nf4"): 3.0}[
            lora, recipe.model.quantization
        ]

    at_once(device, seconds=lambda recipe: 1.0 if recipe.adapter.name == "lora" else 9.0)
    recipe = make_recipe(keep, "plan.allow=[lora,qlora]", "training.mixed_precision=bf16")
    whole, lora, qlora = (plan(recipe, budget(gib), "l4") for gib in (12, 6, 4))
    assert whole.given_up == ()
    assert whole.recipe.adapter.name == "none"
    assert lora.given_up == ("lora",)
    assert qlora.given_up == ("qlora",)
    assert qlora.recipe.model.quantization == "nf4"
    refused = plan(make_recipe(keep), budget(6), "l4")
    assert not refused.fits


def lora_takes(gib_of_whole: float, gib_of_lora: float):
    return lambda recipe: gib_of_lora if recipe.adapter.name == "lora" else gib_of_whole


def test_what_was_searched_before_something_was_given_up_counts(make_recipe, at_once):
    """Those left there need no mathematics given up, and might fit: the plan is no proof."""
    keep = "plan.keep=[training.mixed_precision,model,offload,tiling,loss,checkpointing.skip_last_layers]"
    asked = at_once(lora_takes(9.0, 5.0))
    result = plan(make_recipe(keep, "plan.allow=[lora]"), budget(6), "l4")
    assert result.given_up == ("lora",)
    assert result.counts.estimated == len([one for one in asked if not one.data.packing]) > MAX_EFFORT
    assert result.counts.left > 0
    assert not result.is_proven
    last_tier = space_of(make_recipe(keep, "plan.allow=[lora]"), num_layers=2, has_bfloat16=True)
    everything = len(last_tier.combinations) + sum(last_tier.refused.values())
    assert result.counts.considered + result.counts.left == everything
    assert result.counts.refused == sum(last_tier.refused.values())


def test_ctrl_c_keeps_the_nearest_of_what_was_searched_before(make_recipe, at_once):
    keep = "plan.keep=[training,checkpointing,offload,tiling,loss,accumulation,optimizer,model]"
    asked = at_once(lora_takes(9.0, 5.0))

    def on_progress(progress) -> None:
        if asked:
            raise KeyboardInterrupt

    result = plan(make_recipe(keep, "plan.allow=[lora]"), budget(6), "l4", on_progress=on_progress)
    assert result.interrupted
    assert not result.fits
    assert result.recipe.adapter.name == "none"
    assert len(asked) == result.counts.estimated == 1


def test_a_small_model_in_much_memory_has_an_answer_soon(folder):
    """Hundreds of combinations fit there, of which many trace all micro-batches."""
    estimated = []

    def on_progress(progress) -> None:
        estimated.append(progress.estimated)
        if progress.best is not None:
            raise KeyboardInterrupt

    recipe = load_recipe(None, with_defaults_of_plan([f"model={folder}", "model.weights=random"]))
    result = plan(recipe, budget(4, host_gib=64), "l4", on_progress=on_progress)
    assert result.fits
    assert result.interrupted
    assert estimated[-1] <= 3


def test_a_large_space_is_considered_in_few_estimates(make_recipe, at_once):
    asked = at_once(made_up_bytes, seconds=made_up_seconds)
    result = plan(make_recipe(), budget(3), "l4")
    assert result.counts.estimated <= len(asked) <= 60, (
        "some take as many layers as fit: one or two in this model"
    )
    assert result.searched > 200
    assert result.counts.left == 0 or not result.is_proven
    everything = result.counts.considered + result.counts.left
    space = space_of(make_recipe(), num_layers=2, has_bfloat16=True)
    assert everything == len(space.combinations) + sum(space.refused.values())


def test_ctrl_c_before_anything_is_known_ends_the_search(make_recipe, at_once):
    at_once(lambda recipe: 1.0, seconds=made_up_seconds)
    with pytest.raises(KeyboardInterrupt):
        plan(
            make_recipe(KEEP),
            budget(8),
            "l4",
            on_progress=lambda progress: (_ for _ in ()).throw(KeyboardInterrupt),
        )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_finalizer_is_not_lost(number, make_recipe, at_once):
    """Python prints an exception there and goes on; a trace runs thousands of them."""
    asked = at_once(lambda recipe: 1.0, seconds=made_up_seconds)

    class Pressed:
        def __del__(self) -> None:
            signal.raise_signal(number)

    def on_progress(progress) -> None:
        if progress.estimated == 3:
            Pressed()

    before = signal.getsignal(number)
    with raise_at_signals():
        result = plan(make_recipe(KEEP), budget(8), "l4", on_progress=on_progress)
    assert result.interrupted
    assert result.fits
    assert len(asked) == 4
    assert signal.getsignal(number) is before


GROUPS = "model.dtype,model.quantization,training,optimizer,offload,tiling,loss,accumulation,checkpointing"
KEEP_ALL_BUT_KERNELS = f"plan.keep=[{GROUPS}]"


@pytest.mark.parametrize("share, is_told", [(0.8, True), (0.995, False), (1.2, False)])
def test_what_fused_kernels_would_gain_is_told_and_not_taken(make_recipe, at_once, share, is_told):
    at_once(made_up_bytes, seconds=lambda recipe: 10.0 * (share if recipe.model.kernels == "liger" else 1.0))
    result = plan(make_recipe(KEEP_ALL_BUT_KERNELS), budget(20), "l4")
    assert result.recipe.model.kernels == "none"
    assert (result.fused_kernels is not None) == is_told
    if result.fused_kernels is not None:
        assert result.fused_kernels.overrides == {**result.overrides, "model.kernels": "liger"}
        assert result.fused_kernels.step_seconds == 8.0


@pytest.mark.parametrize("kept", ["model", "model.kernels"])
def test_nothing_is_told_of_kernels_that_are_kept(make_recipe, at_once, kept):
    at_once(made_up_bytes, seconds=lambda recipe: 10.0 * (0.5 if recipe.model.kernels == "liger" else 1.0))
    result = plan(make_recipe(KEEP_ALL_BUT_KERNELS), budget(20), "l4", keep=[kept])
    assert result.fused_kernels is None


def test_nothing_is_told_of_kernels_without_their_package_or_where_they_do_not_fit(
    make_recipe, at_once, monkeypatch
):
    at_once(
        lambda recipe: 19.5 if recipe.model.kernels == "liger" else 4.0,
        seconds=lambda recipe: 10.0 * (0.5 if recipe.model.kernels == "liger" else 1.0),
    )
    assert plan(make_recipe(KEEP_ALL_BUT_KERNELS), budget(8), "l4").fused_kernels is None
    assert plan(make_recipe(KEEP_ALL_BUT_KERNELS), budget(22), "l4").fused_kernels is not None
    monkeypatch.setattr(packages, "is_installed", lambda package: package != "liger-kernel")
    assert plan(make_recipe(KEEP_ALL_BUT_KERNELS), budget(22), "l4").fused_kernels is None


@pytest.mark.parametrize("share, is_told", [(0.9, True), (0.995, False)])
def test_what_packed_rows_would_gain_is_told_and_not_taken(make_recipe, at_once, share, is_told):
    """They are as many tokens, but a step sees other documents together."""
    at_once(made_up_bytes, seconds=lambda recipe: 10.0 * (share if recipe.data.packing else 1.0))
    result = plan(make_recipe(KEEP), budget(20), "l4")
    assert not result.recipe.data.packing
    assert (result.packing is not None) == is_told
    if result.packing is not None:
        assert result.packing.overrides == {**result.overrides, "data.packing": True}
    assert plan(make_recipe(KEEP), budget(20), "l4", keep=["data"]).packing is None
    assert plan(make_recipe(KEEP, "data.packing=true"), budget(20), "l4").packing is None


def test_as_many_layers_as_fit_are_left_out_and_it_says_what_one_more_lacks(folder, tmp_path, at_once):
    deep = LlamaConfig.from_pretrained(folder)
    deep.num_hidden_layers = 30
    deep.save_pretrained(tmp_path)
    keep = (
        "plan.keep=[model,training,optimizer,offload,tiling,loss,accumulation,checkpointing.mlp_activation]"
    )
    recipe = load_recipe(
        None,
        [f"model={tmp_path}", "model.weights=random", keep, "checkpointing.mode=full", "data.max_length=512"],
    )

    def left_out(recipe) -> int:
        config = recipe.checkpointing
        return 30 if config.mode == "none" else config.skip_last_layers - 2 * (config.mode == "selective")

    at_once(lambda recipe: 4.0 + 0.3 * left_out(recipe), seconds=lambda recipe: 10.0 - 0.1 * left_out(recipe))
    result = plan(recipe, budget(10), "l4")
    most = math.floor((10 * 0.94 - 4) / 0.3)
    assert result.overrides == {"checkpointing.skip_last_layers": most}
    one_more = f"checkpointing.skip_last_layers={most + 1}"
    (knob,) = [knob for knob in result.knobs if knob.cheaper == one_more]
    assert knob.setting == f"checkpointing.skip_last_layers={most}"
    assert "too much for the device" in knob.reason


@pytest.mark.parametrize("own", [None, 64])
def test_chunks_of_a_whole_micro_batch_are_not_tried(make_recipe, at_once, own):
    asked = at_once(made_up_bytes, seconds=made_up_seconds)
    keep = f"{KEEP[:-1]}]".replace("loss,", "")
    chunk = "loss.chunk_tokens=4096" if own is None else f"loss.chunk_tokens={own}"
    plan(make_recipe(keep, chunk), budget(20), "l4")
    for recipe in asked:
        number = recipe.loss.chunk_tokens
        assert number in (None, own or 4096) or number < 512 * rows(recipe)


def test_json_has_the_published_names(make_recipe, at_once):
    at_once(made_up_bytes, seconds=made_up_seconds)
    result = plan(make_recipe(KEEP), budget(5), "l4")
    values = json.loads(json.dumps(result.to_json()))
    assert values["schema"] == 1
    assert values.keys() >= {
        "fits",
        "chosen",
        "alternatives",
        "rejected",
        "searched",
        "seconds",
        "counts",
        "proven",
    }
    assert values["chosen"].keys() == {"overrides", "estimate"}
    assert values["chosen"]["overrides"] == dict(result.overrides)
    assert values["rejected"]
    assert all(entry.keys() == {"overrides", "reason"} for entry in values["rejected"])
    assert values["searched"] == sum(
        values["counts"][name] for name in ("estimated", "refused", "beyond_bytes", "beyond_seconds")
    )


def test_a_plan_is_a_recipe_that_is_not_planned_again(make_recipe, at_once, tmp_path):
    at_once(made_up_bytes, seconds=made_up_seconds)
    result = plan(make_recipe(KEEP, "plan=auto", "budget=5GiB", "budget.host=32GiB"))
    assert result.recipe.plan.mode == "none"
    file = tmp_path / "planned.yaml"
    file.write_text(recipe_to_yaml(result.recipe))
    assert load_recipe(file) == result.recipe


def test_training_refuses_what_nobody_has_planned(make_recipe):
    with pytest.raises(RecipeError, match=r"plan\.mode=auto must be resolved before training"):
        train(make_recipe("plan=auto"))


def test_a_budget_below_what_the_process_takes_is_refused(make_recipe, at_once):
    at_once(lambda recipe: 1.0)
    with pytest.raises(UserError, match=r"budget\.device=100MiB is less than the process takes on l4"):
        plan(make_recipe(), Budget(device="100MiB"), "l4")


def test_a_host_budget_beyond_this_machine(make_recipe, at_once):
    at_once(lambda recipe: 1.0)
    with pytest.raises(UserError, match=r"budget\.host=900TiB is more than this machine has"):
        plan(make_recipe(), Budget(host="900TiB"), None)


def test_a_recipe_with_conflicts_is_not_planned(make_recipe, at_once):
    at_once(lambda recipe: 1.0)
    from lowmem_ft.recipe.space.search_space import with_settings

    broken = with_settings(make_recipe(), {"tiling.mlp": 0})
    with pytest.raises(RecipeError, match=r"tiling\.mlp must be at least 1"):
        plan(broken, budget(8), "l4")


def test_what_is_kept_may_make_it_impossible(make_recipe, at_once):
    at_once(made_up_bytes)
    result = plan(make_recipe(KEEP), budget(1.3), "l4", keep=["checkpointing", "accumulation"])
    assert not result.fits
    assert result.recipe.checkpointing.mode == "none"


def test_a_real_plan_is_the_fastest_that_really_fits(make_recipe):
    """By the real estimator, over a space small enough to look at everything."""
    kept = (
        "model,training,optimizer,offload,tiling,loss,accumulation,checkpointing.mlp_activation,"
        "checkpointing.skip_last_layers"
    )
    recipe = make_recipe(
        f"plan.keep=[{kept}]", "training.per_device_train_batch_size=16", "loss.chunk_tokens=128"
    )
    space = space_of(recipe, num_layers=2, has_bfloat16=True)
    everything = [estimate_memory(space.recipe_of(one), "l4") for one in space.combinations]
    assert len(everything) == 3
    fastest, middle, _ = sorted(everything, key=lambda estimate: estimate.step.seconds)
    limit = Budget(device=f"{(middle.process_high_bytes + fastest.process_high_bytes) / 2 / 0.94:.0f}B")
    result = plan(recipe, limit, "l4")
    assert result.fits
    assert result.is_proven
    assert result.estimate.step.seconds == middle.step.seconds
    assert result.estimate.process_peak_bytes == middle.process_peak_bytes
    # The cheaper value next to it is the fastest, which does not fit, or the slowest: the host decides which.
    assert re.search("too much for the device|fits too, and is slower", result.knobs[0].reason)
