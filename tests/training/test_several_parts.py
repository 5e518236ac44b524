"""Of a checkpoint with a tower for images the language model is trained, and nothing else of it is lost."""

from __future__ import annotations

import functools
import json

import peft
import pytest
import torch
from ladder_rungs import RUNGS, settings_of
from several_parts import CONFIGS, PROCESSOR, class_of, several_parts, tensors_in
from transformers import AutoModelForImageTextToText

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.upstream import tested
from lowmem_ft.hf import prepare_model
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.training.export.merging import merge_into_base
from lowmem_ft.training.run.loop import train

LORA = ("adapter.name=lora", "adapter.r=4")
IDS = torch.arange(3, 40)[None]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Checkpoints by family, each made once."""
    return functools.cache(lambda family: several_parts(family, tmp_path_factory.mktemp(family)))


@pytest.fixture
def trained(tiny, tmp_path):
    """Trains a checkpoint for some steps, and returns the run's folder."""

    def run(model, *settings, steps=2, name="run"):
        recipe = tiny(
            f"model={model}",
            "model.weights=pretrained",
            "data.eval_size=null",
            "training.eval_steps=null",
            "training.save_steps=1",
            "training.save_total_limit=1",
            f"training.max_steps={steps}",
            *settings,
            output_dir=tmp_path / name,
        )
        train(recipe)
        return tmp_path / name

    return run


def is_of_language(name):
    return "language_model" in name or name.startswith("lm_head")


def assert_whole(folder, original, family):
    """The class that the config names loads a folder whose towers are the original's, and whose text is not."""
    before, after = tensors_in(original), tensors_in(folder)
    assert before.keys() == after.keys()
    others = {name for name in before if not is_of_language(name)}
    assert others
    assert all(torch.equal(before[name], after[name]) for name in others)
    assert not all(torch.equal(before[name], after[name]) for name in before.keys() - others)
    for file, content in PROCESSOR.items():
        assert (folder / file).read_text() == content
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [class_of(family).__name__]
    loaded, report = class_of(family).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return loaded.eval()


def logits_of(model):
    """Of text; the forward of the whole Llama 4 in transformers 5.24.0 asks the text's output for that of images."""
    if model.config.model_type == "llama4" and tested.installed_version("transformers") == "5.24.0":
        model = model.language_model
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_the_language_model_is_trained_and_the_whole_is_saved(family, checkpoint, trained, tiny):
    run = trained(checkpoint(family))
    whole = assert_whole(run / "model", checkpoint(family), family)
    assert type(AutoModelForImageTextToText.from_pretrained(run / "model")) is class_of(family)
    assert_whole(run / "checkpoint-2", checkpoint(family), family)
    config = tiny(f"model={run / 'model'}", "model.weights=pretrained").model
    own = load_model(
        config, load_model_config(config), attn_implementation="eager", device=torch.device("cpu"), seed=0
    )
    assert own.num_parameters() < whole.num_parameters()
    torch.testing.assert_close(logits_of(own.eval()), logits_of(whole), atol=1e-5, rtol=0)


def test_files_of_a_part_each_are_read_and_written(checkpoint, trained, tmp_path):
    source = several_parts("qwen3_5", tmp_path / "model", max_shard_size="100KB")
    assert len(list(source.glob("*.safetensors"))) > 2
    assert_whole(trained(source) / "model", source, "qwen3_5")


@pytest.mark.parametrize("rung", [RUNGS[0], RUNGS[-1]], ids=["plain", "lowest rung"])
def test_a_resumed_run_ends_with_the_same_bits_without_its_source(rung, trained, tmp_path):
    source = several_parts("gemma3", tmp_path / "model")
    settings = (*settings_of(rung), "training.lr_scheduler_type=constant")
    whole = tensors_in(trained(source, *settings, steps=3, name="whole") / "model")
    trained(source, *settings, steps=2, name="resumed")
    (tmp_path / "model").rename(tmp_path / "moved")
    again = trained(source, *settings, "training.resume_from_checkpoint=auto", steps=3, name="resumed")
    resumed = tensors_in(again / "model")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "llama4", "qwen3_5_moe"])
def test_adapters_fit_the_original_class_and_are_merged_into_it(family, checkpoint, trained, tmp_path):
    trained(checkpoint(family), *LORA, steps=1)
    run = trained(checkpoint(family), *LORA, "training.resume_from_checkpoint=auto", steps=2)
    base = class_of(family).from_pretrained(checkpoint(family))
    adapted = peft.PeftModel.from_pretrained(base, str(run / "model")).eval()
    adapters = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    assert adapters
    assert all("language_model" in name for name in adapters)
    merge_into_base(run / "model", tmp_path / "merged")
    merged = assert_whole(tmp_path / "merged", checkpoint(family), family)
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), atol=1e-5, rtol=0)
    assert not torch.allclose(
        logits_of(class_of(family).from_pretrained(checkpoint(family))), logits_of(merged)
    )


def test_short_names_that_a_tower_has_too_adapt_the_language_model_alone(checkpoint, trained):
    run = trained(checkpoint("gemma3"), *LORA, "adapter.target_modules=[q_proj]", steps=1)
    base = class_of("gemma3").from_pretrained(checkpoint("gemma3"))
    adapted = peft.PeftModel.from_pretrained(base, str(run / "model"))
    names = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert len(names) == 2
    assert all("language_model" in name and "q_proj" in name for name in names)


def test_a_layer_of_the_tower_gets_no_adapter(checkpoint, trained):
    with pytest.raises(
        UserError, match=r"language model, the only part trained, but 'fc1'.*vision_tower"
    ) as raised:
        trained(checkpoint("gemma3"), *LORA, "adapter.target_modules=[fc1]")
    assert "It has down_proj" in str(raised.value)


def test_an_estimate_counts_the_tower_on_the_disk_alone(checkpoint, tiny):
    settings = ("model.weights=pretrained", "data.eval_size=null", "training.eval_steps=null")
    estimate = estimate_memory(tiny(f"model={checkpoint('gemma3')}", *settings))
    whole = class_of("gemma3").from_pretrained(checkpoint("gemma3"))
    others = sum(weight.numel() for name, weight in whole.named_parameters() if "language_model" not in name)
    assert estimate.model.other_parameters == others > 0
    assert estimate.model.parameters == estimate.model.trainable_parameters == whole.num_parameters() - others
    buffers = estimate.by_category_at_peak["parameter"] - 4 * estimate.model.parameters
    assert 0 <= buffers < 1000


def test_a_checkpoint_without_a_known_embedding_is_refused(tmp_path, trained):
    from safetensors.torch import save_file

    source = several_parts("gemma3", tmp_path / "model")
    renamed = {name.replace("embed_tokens", "wte"): tensor for name, tensor in tensors_in(source).items()}
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"found by its embed_tokens\.weight, and .* has no such weight"):
        trained(source)


def test_a_trainer_would_lose_the_tower(checkpoint, tiny):
    with pytest.raises(UserError, match=r"has other parts, which a trainer's checkpoints would lose"):
        prepare_model(str(checkpoint("gemma3")), tiny("model.weights=pretrained"))
