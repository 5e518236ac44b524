"""Runs with Liger's operators: transformers' own losses in every technique, and resumed with the same kernels."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")

from ground_truth.ladder_run import outcome_of
from measuring.families import FAMILIES
from sweeps import few_quick
from transcribed_liger import LAUNCHES, transcribed_kernels
from transformers import AutoConfig

from lowmem_ft.foundation.errors import CheckpointError, MissingPackageError
from lowmem_ft.models import config as model_config
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.folder.changed_recipe import refuse_other_kernels
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

LIGER = "model.kernels=liger"
AUTO = "training.resume_from_checkpoint=auto"
CONSENT = "training.resume_with_other_kernels=true"
SHORT = ("training.max_steps=4", "training.save_steps=2", "training.eval_steps=null")

STREAMED = (
    "checkpointing.mode=full",
    "accumulation.order=vertical",
    "offload.optimizer=host",
    "optimizer.in_backward=true",
    "offload.parameters=stream",
)
RUNS = {
    "alone": (),
    "selective": ("checkpointing.mode=selective",),
    "activations offloaded": (
        "checkpointing.mode=full",
        "checkpointing.every_n_layers=2",
        "offload.activations=all",
    ),
    "vertical": ("checkpointing.mode=full", "accumulation.order=vertical"),
    "streamed, in tiles": (*STREAMED, "offload.activations=inputs", "tiling.mlp=2", "tiling.head=3"),
    "lora": ("adapter.name=lora", "adapter.r=4", "checkpointing.mode=full"),
}
QUICK = ("alone", "activations offloaded", "streamed, in tiles", "lora")


@pytest.fixture(autouse=True)
def _transcribed():
    with transcribed_kernels():
        yield


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    AutoConfig.for_model("qwen3", **FAMILIES["qwen3"]).save_pretrained(folder)
    always = [
        f"model={folder}",
        "model.weights=random",
        "data=any",
        "data.max_length=32",
        "training.use_cpu=true",
        "training.gradient_accumulation_steps=3",
        "training.learning_rate=1e-2",
    ]
    return lambda *settings: outcome_of(load_recipe(None, [*always, *settings]), folder).losses


@pytest.mark.parametrize("name", few_quick(RUNS, QUICK))
def test_losses_are_those_of_transformers_own_operators_up_to_rounding(name, losses_of):
    LAUNCHES.clear()
    stock = losses_of(*RUNS[name])
    assert not LAUNCHES
    fused = losses_of(*RUNS[name], LIGER)
    assert fused == pytest.approx(stock, rel=1e-4)  # steps of 0.01 of AdamW move roundings apart
    trial, layers, steps, micro_batches = 2, 2, 3, 3
    assert LAUNCHES["_swiglu_backward_kernel"] >= trial // 2 + layers * steps * micro_batches
    assert LAUNCHES["_triton_rope"] >= trial + 2 * layers * steps * micro_batches


def test_a_resumed_run_has_the_same_losses_and_the_kernels_are_in_its_checkpoints(tiny, metrics, tmp_path):
    run = tmp_path / "run"
    train(tiny(*SHORT, LIGER, output_dir=run))
    losses = metrics(run)
    manifest = json.loads((run / "checkpoint-2" / "checkpoint.json").read_text())
    assert manifest["kernels"]["model.kernels"].endswith(": rms_norm, rotary, swiglu")
    for later in ("checkpoint-4", "model"):
        shutil.rmtree(run / later)
    train(tiny(*SHORT, LIGER, AUTO, output_dir=run))
    assert metrics(run) == losses


@pytest.mark.parametrize(
    "before,after,said",
    [
        ((), (LIGER,), "model.kernels was 'none', is 'liger'"),
        ((LIGER,), (), "model.kernels was 'liger', is 'none'"),
        (
            ("adapter.name=lora", "adapter.kernel=peft"),
            ("adapter.name=lora",),
            "adapter.kernel was 'peft', is 'fused'",
        ),
        (
            ("model.dtype=bfloat16", "accumulation.fusion=true"),
            ("model.dtype=bfloat16",),
            "accumulation.fusion was True, is False",
        ),
    ],
)
def test_other_kernels_are_refused_unless_the_recipe_consents(before, after, said, tiny, tmp_path, caplog):
    run = tmp_path / "run"
    train(tiny(*SHORT, *before, "training.max_steps=2", output_dir=run))
    with pytest.raises(CheckpointError, match=r"other kernels \(" + said.replace(".", r"\.")) as refused:
        RunFolder.open(tiny(*SHORT, *after, AUTO, output_dir=run))
    assert CONSENT in str(refused.value)
    RunFolder.open(tiny(*SHORT, *after, AUTO, CONSENT, output_dir=run))
    assert "Resuming with other settings: " in caplog.text
    assert said in caplog.text


def test_what_auto_chose_and_the_version_are_compared_with_the_checkpoints(tiny, tmp_path, caplog):
    run = tmp_path / "run"
    train(tiny(*SHORT, "model.kernels=auto", "training.max_steps=2", output_dir=run))
    checkpoint = run / "checkpoint-2"
    saved = json.loads((checkpoint / "checkpoint.json").read_text())["kernels"]
    refuse_other_kernels(tiny(), checkpoint, saved)
    for chosen in ({}, {"model.kernels": "liger-kernel 0.9.0: rms_norm, rotary, swiglu"}):
        with pytest.raises(
            CheckpointError, match=r"model\.kernels was liger-kernel 0\.8.*, is (transf|liger-kernel 0\.9)"
        ):
            refuse_other_kernels(tiny(), checkpoint, chosen)
        refuse_other_kernels(tiny(CONSENT), checkpoint, chosen)
        assert "Resuming with other kernels: model.kernels was liger-kernel 0.8" in caplog.text


def test_a_checkpoint_of_an_earlier_version_had_transformers_own(tiny, tmp_path):
    run = tmp_path / "run"
    train(tiny(*SHORT, "training.max_steps=2", output_dir=run))
    manifest = run / "checkpoint-2" / "checkpoint.json"
    kept = json.loads(manifest.read_text())
    assert kept.pop("kernels") == {}
    manifest.write_text(json.dumps(kept))
    refuse_other_kernels(tiny(), run / "checkpoint-2", {})
    with pytest.raises(CheckpointError, match=r"was transformers' own, is liger-kernel 0\.8"):
        refuse_other_kernels(tiny(), run / "checkpoint-2", {"model.kernels": "liger-kernel 0.8.5: rms_norm"})


def test_a_missing_package_is_told_before_anything_is_read(tiny, monkeypatch):
    from lowmem_ft.foundation import packages

    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    assert model_config.require_package is packages.require_package
    with pytest.raises(
        MissingPackageError, match=r"model\.kernels=liger needs .*pip install 'lowmem-ft\[liger\]'"
    ):
        tiny(LIGER).model.require_packages()


def test_the_operators_leave_nothing_of_a_run_behind(tiny, tmp_path):
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    train(tiny("training.max_steps=1", "training.save_steps=null", "training.eval_steps=null", LIGER))
    assert dict(vars(modeling_llama)) == before
    assert torch.nn.LayerNorm.__module__ == "torch.nn.modules.normalization"
