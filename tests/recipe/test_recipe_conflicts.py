from __future__ import annotations

import contextlib
import dataclasses
import inspect

import pytest

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.recipe import Recipe, TrainingConfig, check_recipe, load_recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.rules import schedules
from lowmem_ft.recipe.rules.conflicts import CONFLICTS

STREAMED = [
    "offload.parameters=stream",
    "offload.optimizer=host",
    "optimizer.in_backward=true",
    "accumulation.order=vertical",
]

IN_BACKWARD = ["optimizer.in_backward=true", "accumulation.order=vertical"]

# For each rule: settings of `tiny` that break it, and the same with the way out taken.
BROKEN_AND_MENDED = {
    "model_is_named": (["model=null"], ["model=x"]),
    "profiled_steps_are_within_the_run": (
        ["training.max_steps=3", "training.profile_steps=[2,4]"],
        ["training.max_steps=4", "training.profile_steps=[2,4]"],
    ),
    "name_is_that_of_a_folder": (["name=.."], ["name=..", "training.output_dir=x"]),
    "settings_work_with_the_strategy": (
        ["distributed.strategy=fsdp2", "optimizer.name=adafactor"],
        ["distributed.strategy=ddp", "optimizer.name=adafactor"],
    ),
    "context_is_of_several_processes": (
        ["distributed.strategy=zero3", "distributed.context=2"],
        ["distributed.strategy=fsdp2", "distributed.context=2"],
    ),
    "context_needs_one_document_a_row": (
        ["distributed.strategy=ddp", "distributed.context=2", "data.packing=true"],
        ["distributed.strategy=ddp", "distributed.context=2"],
    ),
    "cpu_offload_is_of_a_gpu": (
        ["distributed.strategy=fsdp2", "distributed.cpu_offload=true", "training.use_cpu=true"],
        ["distributed.strategy=fsdp2", "distributed.cpu_offload=true", "training.use_cpu=false"],
    ),
    "fused_sums_are_of_16_bit_weights": (
        ["accumulation.fusion=true", "model.dtype=float32"],
        ["accumulation.fusion=true", "model.dtype=bfloat16"],
    ),
    "budget_is_readable": (["budget.host=12 parsecs"], ["budget.host=12GB"]),
    "what_is_to_be_chosen_is_not_kept": (
        ["checkpointing.mode=auto", "plan.keep=[checkpointing.mode]"],
        ["checkpointing.mode=auto", "plan.keep=[optimizer, checkpointing.every_n_layers]"],
    ),
    "what_is_given_up_is_not_kept": (
        ["plan.keep=[data]", "plan.allow=[shorter_rows, lora]"],
        ["plan.keep=[data]", "plan.allow=[lora]"],
    ),
    "kept_keys_exist": (["plan.keep=[optimizer.stat]"], ["plan.keep=[optimizer.state, loss]"]),
    "steps_have_a_size": (
        ["data.packing=true", "data.max_length=128", "training.per_device_eval_batch_size=16385"],
        ["data.max_length=128", "training.per_device_eval_batch_size=16385"],
    ),
    "fp16_needs_float32_weights": (
        ["training.mixed_precision=fp16", "model.dtype=float16"],
        ["training.mixed_precision=fp16", "model.dtype=float32"],
    ),
    "recomputed_activations_are_on_the_device": (
        ["checkpointing.mlp_activation=recompute", "offload.activations=all"],
        ["checkpointing.mlp_activation=recompute", "offload.activations=none"],
    ),
    "quantization_needs_an_adapter": (
        ["model.quantization=nf4"],
        ["model.quantization=nf4", "adapter.name=lora"],
    ),
    "new_rows_are_trained": (
        ["model.add_special_tokens=[<|tool|>]", "adapter.name=lora"],
        [
            *("model.add_special_tokens=[<|tool|>]", "adapter.name=lora"),
            "adapter.modules_to_save=[embed_tokens, lm_head]",
        ],
    ),
    "rows_alone_are_of_new_tokens_on_the_device": (
        ["adapter.name=lora", "adapter.train_new_tokens=true"],
        ["adapter.name=lora", "adapter.train_new_tokens=true", "model.add_tokens=[drizzle]"],
    ),
    "quantization_needs_safetensors": (
        ["model=weights.gguf", "model.quantization=nf4", "adapter.name=lora"],
        ["model=weights.gguf", "model.quantization=none", "adapter.name=lora"],
    ),
    "packed_base_is_frozen_and_whole": (
        ["model=openai/gpt-oss-20b", "model.weights=pretrained"],
        ["model=openai/gpt-oss-20b", "model.weights=pretrained", "adapter.name=lora"],
    ),
    "master_needs_bfloat16_weights": (
        ["optimizer.master=split16"],
        ["optimizer.master=split16", "model.dtype=bfloat16"],
    ),
    "host_state_needs_chunks": (
        ["offload.optimizer=host", "optimizer.name=lion_8bit"],
        ["offload.optimizer=host", "optimizer.name=lion", "optimizer.state=8bit"],
    ),
    "streamed_weights_need_their_updates": (["offload.parameters=stream"], STREAMED),
    "loss_scale_reaches_every_gradient": (
        [*STREAMED, "training.mixed_precision=fp16"],
        [*STREAMED, "training.mixed_precision=no"],
    ),
    "in_backward_needs_finished_gradients": (
        ["optimizer.in_backward=true"],
        ["optimizer.in_backward=true", "accumulation.order=vertical"],
    ),
    "loss_scaling_needs_two_phases": (
        [*IN_BACKWARD, "training.mixed_precision=fp16", "training.max_grad_norm=null"],
        [*IN_BACKWARD, "training.mixed_precision=fp16", "training.max_grad_norm=1.0"],
    ),
    "offload_needs_checkpointing": (
        ["accumulation.order=vertical", "checkpointing.mode=none"],
        ["accumulation.order=vertical", "checkpointing.mode=full"],
    ),
    "selective_needs_fused_attention": (
        ["checkpointing.mode=selective", "model.attn_implementation=eager"],
        ["checkpointing.mode=selective", "model.attn_implementation=auto"],
    ),
    "head_tiles_need_chunked_loss": (
        ["tiling.head=4", "loss.chunk_tokens=null"],
        ["tiling.head=4", "loss.chunk_tokens=1024"],
    ),
    "tiled_mlp_treats_tokens_alone": (
        ["tiling.mlp=4", "model.quantization=int8", "adapter.name=lora"],
        ["tiling.mlp=4", "model.quantization=nf4", "adapter.name=lora"],
    ),
    "streaming_needs_max_steps": (
        ["data.streaming=true", "data.eval_size=null", "data.eval_path=x"],
        ["data.streaming=true", "data.eval_size=null", "data.eval_path=x", "training.max_steps=4"],
    ),
    "evaluation_needs_data": (["data.eval_size=null"], ["data.eval_size=null", "training.eval_steps=null"]),
    "best_model_needs_evaluations": (
        ["training.load_best_model_at_end=true", "training.eval_steps=null"],
        ["training.load_best_model_at_end=true", "training.eval_steps=5"],
    ),
    "metric_of_best_model_is_used": (
        ["training.greater_is_better=true"],
        ["training.greater_is_better=true", "training.early_stopping_patience=3"],
    ),
    "threshold_needs_patience": (
        ["training.early_stopping_threshold=0.1"],
        ["training.early_stopping_threshold=0.1", "training.early_stopping_patience=3"],
    ),
    "length_of_answers_needs_prompts": (
        ["training.max_new_tokens=9"],
        ["training.max_new_tokens=9", "training.eval_generations=1"],
    ),
    "hub_settings_need_push": (
        ["training.hub_model_id=me/it"],
        ["training.hub_model_id=me/it", "training.push_to_hub=true"],
    ),
    "resume_needs_the_old_run": (
        ["training.resume_from_checkpoint=auto", "training.overwrite_output_dir=true"],
        ["training.resume_from_checkpoint=auto", "training.overwrite_output_dir=false"],
    ),
    "layer_choice_needs_checkpointing": (
        ["checkpointing.mode=none", "checkpointing.every_n_layers=2"],
        ["checkpointing.mode=full", "checkpointing.every_n_layers=2"],
    ),
    "constant_schedule_has_no_warmup": (
        ["training.lr_scheduler_type=constant", "training.warmup_steps=3"],
        ["training.lr_scheduler_type=constant_with_warmup", "training.warmup_steps=3"],
    ),
    "schedule_takes_its_arguments": (
        ["training.lr_scheduler_kwargs={min_lr: 1e-6}"],
        ["training.lr_scheduler_kwargs={min_lr: 1e-6}", "training.lr_scheduler_type=cosine_with_min_lr"],
    ),
    "warmup_ends_within_the_run": (
        ["training.max_steps=4", "training.warmup_steps=5"],
        ["training.max_steps=4", "training.warmup_steps=4"],
    ),
    "columns_differ": (
        ["data.prompt_column=text", "data.completion_column=text"],
        ["data.prompt_column=text", "data.completion_column=answer"],
    ),
    "tiles_hold_tokens": (
        ["tiling.mlp=129", "data.max_length=64", "training.per_device_train_batch_size=2"],
        ["tiling.mlp=128", "data.max_length=64", "training.per_device_train_batch_size=2"],
    ),
}


def test_every_rule_has_an_example_here():
    assert {conflict.problems.__name__ for conflict in CONFLICTS} == set(BROKEN_AND_MENDED)


@pytest.mark.parametrize("rule", BROKEN_AND_MENDED)
def test_a_rule_refuses_what_breaks_it_and_its_way_out_works(rule):
    broken, mended = BROKEN_AND_MENDED[rule]
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", broken)
    (problem,) = caught.value.problems
    keys = next(conflict.keys for conflict in CONFLICTS if conflict.problems.__name__ == rule)
    assert any(key in problem for key in keys)
    load_recipe("tiny", mended)


def test_all_that_needs_checkpointed_layers_is_told_at_once():
    settings = ["checkpointing.mode=none", "offload.activations=inputs", "accumulation.order=vertical"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("tiny", settings)
    assert caught.value.problems == (
        "offload.activations=inputs needs checkpointing.mode=full or selective, got none. "
        "Set checkpointing.mode=full or offload.activations=none.",
        "accumulation.order=vertical needs every layer checkpointed: checkpointing.mode=full or selective with "
        "every_n_layers=1 and skip_last_layers=0, got none with every_n_layers=1 and skip_last_layers=0. "
        "Set checkpointing.mode=full or accumulation.order=horizontal.",
    )
    load_recipe("tiny", [*settings, "checkpointing.mode=selective"])
    with pytest.raises(RecipeError, match=r"every layer checkpointed.*got full with every_n_layers=2"):
        load_recipe("tiny", [*settings, "checkpointing.mode=full", "checkpointing.every_n_layers=2"])


def test_rules_read_keys_that_exist():
    read = {key for conflict in CONFLICTS for key in conflict.keys}
    assert read <= set(recipe_keys())


def test_a_recipe_put_together_in_python_is_checked_by_the_same_rules():
    recipe = Recipe(model=ModelConfig(name_or_path="m", dtype="bfloat16"))
    check_recipe(recipe)
    wrong = dataclasses.replace(recipe, training=TrainingConfig(mixed_precision="fp16", learning_rate=-1))
    with pytest.raises(RecipeError) as caught:
        check_recipe(wrong)
    assert len(caught.value.problems) == 2


def test_schedules_take_what_transformers_gives_them():
    """With every argument that has a default left out, and with each that is listed given."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    names = recipe_keys()["training.lr_scheduler_type"].choices
    assert list(schedules.ARGUMENTS) == list(names)
    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    for name in names:
        signature = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)])
        assert {*schedules.ARGUMENTS[name]} == signature.parameters.keys() - ours


def test_only_the_schedules_said_to_need_arguments_need_them():
    import torch
    from transformers import get_scheduler

    for name in schedules.ARGUMENTS:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        needs = schedules.ONE_OF.get(name, ())
        for given in ([], *([argument] for argument in needs), *([list(needs)] if len(needs) > 1 else [])):
            arguments = dict.fromkeys(given, 1)
            problems = list(schedules.schedule_problems(name, arguments, 1.0))
            if problems:
                with pytest.raises((TypeError, ValueError)):
                    get_scheduler(name, optimizer, 0, 2, arguments)
            else:
                get_scheduler(name, optimizer, 0, 2, arguments)
            assert bool(problems) == (len(given) != min(len(needs), 1))


@pytest.mark.parametrize("name", [name for name, takes in schedules.ARGUMENTS.items() if takes])
def test_arguments_in_range_make_learning_rates_that_are_finite_and_not_negative(name):
    import torch
    from transformers import get_scheduler

    for value in (1e-3, 0.9, 3):
        for argument in schedules.ARGUMENTS[name]:
            needed = {
                needs[0]: 1 for needs in [schedules.ONE_OF.get(name, ())] if needs and argument not in needs
            }
            arguments = {**needed, argument: schedules.SHAPES[0] if argument.endswith("_type") else value}
            if list(schedules.schedule_problems(name, arguments, 1.0)):
                assert (argument, value) == ("lr_end", 3)
                continue
            optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
            schedule = get_scheduler(name, optimizer, 2, 9, arguments)
            assert all(0 <= factor(step) < 10 for factor in schedule.lr_lambdas for step in range(12))


@pytest.mark.parametrize("shape", [*schedules.SHAPES, "square"])
def test_the_shapes_of_a_warmup_are_those_of_transformers(shape):
    import torch
    from transformers import get_scheduler

    arguments = {"num_decay_steps": 1, "warmup_type": shape}
    problems = list(schedules.schedule_problems("warmup_stable_decay", arguments, 1.0))
    refused = pytest.raises(ValueError, match="warmup type") if problems else contextlib.nullcontext()
    with refused:
        get_scheduler("warmup_stable_decay", torch.optim.SGD([torch.zeros(1)], lr=1.0), 1, 4, arguments)
    assert bool(problems) == (shape == "square")


def test_an_argument_of_a_schedule_is_a_number():
    settings = ["training.lr_scheduler_type=cosine_with_min_lr", "training.lr_scheduler_kwargs={min_lr: low}"]
    with pytest.raises(RecipeError, match="`min_lr` must be a number, got 'low'"):
        load_recipe("tiny", settings)


def test_a_generous_max_length_is_no_reason_to_refuse_a_batch_of_short_rows():
    settings = ["data.max_length=131072", "training.per_device_train_batch_size=32"]
    assert load_recipe("tiny", settings).data.max_length == 131072


def test_rows_of_an_impossible_length_are_no_reason_for_a_smaller_batch():
    settings = ["data.packing=true", "data.max_length=-5", "training.per_device_train_batch_size=4"]
    with pytest.raises(RecipeError) as refused:
        load_recipe(None, ["model=x", *settings])
    (problem,) = refused.value.problems
    assert "data.max_length" in problem
