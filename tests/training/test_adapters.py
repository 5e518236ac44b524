"""Runs that train adapters, beside whole and quantised weights: what they leave behind, and how they go on."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import peft

from lowmem_ft.foundation.errors import CheckpointError, Interrupted, UserError
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.export.merging import merge_into_base
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run import run_parts
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import plan_session, refuse_unknown_names

SHORT = (
    "training.max_steps=6",
    "training.save_steps=3",
    "training.eval_steps=null",
    "training.logging_steps=1",
)
LORA = ("adapter.name=lora", "adapter.r=4", "adapter.lora_dropout=0.1")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A small model that has learnt a little, as a checkpoint."""
    run = tmp_path_factory.mktemp("base") / "run"
    settings = ("training.num_train_epochs=1", "training.save_steps=null", "training.eval_steps=null")
    recipe = load_recipe("tiny", [f"training.output_dir={run}", "training.use_cpu=true", *settings])
    return train(recipe).model_folder


@pytest.fixture
def adapted(tiny, base):
    """A recipe that trains adapters beside that model."""

    def load(*overrides, output_dir):
        return tiny(
            f"model={base}", "model.weights=pretrained", *SHORT, *LORA, *overrides, output_dir=output_dir
        )

    return load


def assert_same_adapter(one: Path, other: Path):
    first, second = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


KINDS = [
    (),
    ("adapter.use_dora=true",),
    ("model.quantization=nf4",),
    ("model.quantization=nf4", "model.dtype=bfloat16", "training.mixed_precision=bf16"),
    ("model.quantization=int8",),
    (
        "adapter.modules_to_save=[embed_tokens]",
        *("model.quantization=nf4", "model.dtype=bfloat16", "training.mixed_precision=bf16"),
    ),
]
DIFFER_MOST = [KINDS[1], KINDS[3], KINDS[5]]
"""DoRA has a weight more than LoRA; autocast over 4 bits does all that they do without it; a bfloat16 module has a
master in the optimizer's state."""


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in DIFFER_MOST else pytest.mark.slow) for kind in KINDS],
    ids=" ".join,
)
def test_a_run_stopped_by_a_signal_goes_on_bit_for_bit(adapted, metrics, tmp_path, monkeypatch, kind):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(adapted(*kind, output_dir=whole))
    write = RunFolder.write_metrics

    def write_and_stop(self, record):
        write(self, record)
        if record["step"] == 4 and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_metrics", write_and_stop)
        with pytest.raises(Interrupted):
            train(adapted(*kind, output_dir=stopped))
    train(adapted(*kind, "training.resume_from_checkpoint=auto", output_dir=stopped))
    assert metrics(stopped) == metrics(whole)
    assert metrics(stopped, "grad_norm") == metrics(whole, "grad_norm")
    assert_same_adapter(whole / "model", stopped / "model")


def test_the_finished_model_is_an_adapter_that_vanilla_peft_loads(adapted, base, tmp_path):
    recipe = adapted("training.eval_steps=6", output_dir=tmp_path / "run")
    result = train(recipe)
    assert not (result.model_folder / "model.safetensors").exists()
    config = json.loads((result.model_folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    model = peft.AutoPeftModelForCausalLM.from_pretrained(result.model_folder)
    assert _held_out_loss(model, recipe, tmp_path) == pytest.approx(result.evaluation.loss, rel=1e-5)
    card = (result.model_folder / "README.md").read_text()
    assert "library_name: peft" in card
    assert "LoRA adapters fine-tuned from" in card


@pytest.mark.parametrize("kind", [(), ("adapter.modules_to_save=[embed_tokens, model.norm]",)], ids=" ".join)
def test_the_merged_model_is_the_one_that_was_evaluated(adapted, tmp_path, kind):
    recipe = adapted("training.eval_steps=6", *kind, output_dir=tmp_path / "run")
    result = train(recipe)
    merge_into_base(result.model_folder, tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert _held_out_loss(model, recipe, tmp_path) == pytest.approx(result.evaluation.loss, rel=1e-5)


def _held_out_loss(model, recipe, tmp_path):
    from lowmem_ft.data.loading import load_data
    from lowmem_ft.models.tokenizer import load_tokenizer

    data = load_data(
        recipe.data,
        load_tokenizer(recipe.model),
        max_positions=None,
        vocab_size=None,
        seed=recipe.training.seed,
        attn_implementation="sdpa",
    )
    loss_sum, count = 0.0, 0
    for index in range(data.evaluation.num_rows):
        batch = data.collate([data.evaluation.read(index)])
        with torch.no_grad():
            loss = model(input_ids=batch.input_ids_BT, labels=batch.labels_BT).loss
        loss_sum, count = loss_sum + float(loss) * batch.num_label_tokens, count + batch.num_label_tokens
    return loss_sum / count


def test_it_learns_beside_4_bit_weights(adapted, metrics, tmp_path):
    kind = (
        "model.quantization=nf4",
        "training.max_steps=21",
        "training.learning_rate=0.05",
        "adapter.lora_dropout=0.0",
    )
    train(adapted(*kind, output_dir=tmp_path / "run"))
    losses = metrics(tmp_path / "run")
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5


@pytest.mark.parametrize("change", ["adapter.r=8", "model.quantization=nf4", "model.weights=random"])
def test_a_run_of_adapters_goes_on_with_its_own_base_and_rank_alone(adapted, tmp_path, change):
    run = tmp_path / "run"
    train(adapted(output_dir=run))
    with pytest.raises(CheckpointError, match=change.split("=")[0].replace(".", r"\.")):
        RunFolder.open(adapted(change, "training.resume_from_checkpoint=auto", output_dir=run))


def test_two_processes_train_the_same_adapters_with_every_parameter_used(
    adapted, metrics, base, forks, tmp_path
):
    """Through DDP, which would wait for gradients of frozen or unused parameters."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = ("adapter.lora_dropout=0.0", "training.max_steps=3", "training.save_steps=null")
    train(adapted(*settings, output_dir=one))
    overrides = [*SHORT, *LORA, *settings, f"model={base}", "model.weights=pretrained"]
    overrides += [
        f"training.output_dir={two}",
        "training.gradient_accumulation_steps=1",
        "training.use_cpu=true",
    ]
    source = "import sys; from lowmem_ft.cli.commands.train import main; sys.exit(main())"
    for process in forks.run_two(source, "recipe=tiny", "budget.preflight=false", *overrides):
        assert process.returncode == 0, process.stderr
    assert metrics(two) == pytest.approx(metrics(one), rel=1e-4)


def test_a_run_whose_adapters_nobody_can_use_says_so(tiny, caplog):
    train(tiny(*LORA, "model.weights=random", "training.max_steps=1", "training.eval_steps=null"))
    assert "random ones (model.weights=random) are not kept" in caplog.text


@pytest.mark.parametrize(
    "setting",
    [
        "target_modules=[q_prj]",
        "target_parameters=[mlp.experts.gate_up_prj]",
        "modules_to_save=[embed_tokenz]",
    ],
)
def test_misspelt_names_are_told_before_data_and_weights_are_read(tiny, monkeypatch, setting):
    def too_late(*_, **__):
        raise AssertionError("data was read")

    monkeypatch.setattr(run_parts, "read_data", too_late)
    key, _, name = setting.partition("=")
    with pytest.raises(UserError, match=rf"adapter\.{key} names .*{name.strip('[]')}"):
        train(tiny("adapter.name=lora", f"adapter.{setting}"))


def test_a_look_at_names_draws_no_random_numbers(tiny, tmp_path):
    recipe = tiny("adapter.name=lora", "adapter.modules_to_save=[embed_tokens]")
    plan = plan_session(recipe, launched_runtime(recipe.training, tmp_path))
    state, config = torch.get_rng_state(), plan.hf_config.to_dict()
    refuse_unknown_names(recipe, plan)
    assert torch.equal(torch.get_rng_state(), state)
    assert plan.hf_config.to_dict() == config
