"""What hf.attach would save is what the script takes with hf.attach written into it."""

import pytest
from stock_scripts import CHECKPOINTING, trainer_of
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from lowmem_ft import hf, load_recipe
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.hf.trainers.attach_savings import Savings, TrainerSeen
from lowmem_ft.planning.script_runs import estimate_script

TRAINER = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

rows = [{"input_ids": [1] * 48, "labels": [1] * 48}] * 24
trainer = Trainer(
    AutoModelForCausalLM.from_pretrained("model", dtype="bfloat16"),
    TrainingArguments("out", per_device_train_batch_size=4, bf16=True),
    train_dataset=rows, data_collator=default_data_collator,
)
trainer.train()
"""

SFT = """
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

rows = Dataset.from_dict({"text": ["This is a text to learn from. " * 9] * 40})
trainer = SFTTrainer(
    "model", args=SFTConfig("out", max_length=48, per_device_train_batch_size=2, gradient_accumulation_steps=4),
    train_dataset=rows, eval_dataset=rows, peft_config=LoraConfig(r=4, target_modules="all-linear"),
)
trainer.train()
"""

DPO = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

rows = Dataset.from_dict({"prompt": ["What? "] * 24, "chosen": ["This one. " * 4] * 24, "rejected": ["That."] * 24})
trainer = DPOTrainer(
    AutoModelForCausalLM.from_pretrained("model"), args=DPOConfig("out", per_device_train_batch_size=2),
    train_dataset=rows, processing_class=AutoTokenizer.from_pretrained("model"),
)
trainer.train()
"""


def settings_of(trainer):
    seen = TrainerSeen()
    seen(trainer)
    assert not seen.failure
    assert not seen.problems
    return seen.settings


SCRIPTS = [
    TRAINER,
    pytest.param(SFT, marks=pytest.mark.slow),
    pytest.param(DPO, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("text", SCRIPTS, ids=["Trainer", "SFT", "DPO"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_saving_is_that_of_the_same_script_with_attach_written_into_it(script, text):
    seen = TrainerSeen()
    before = estimate_script(script(text), gpu="l4", steps=2, on_trainer=seen)
    assert not seen.problems
    after = estimate_script("train.py", gpu="l4", steps=2, on_trainer=seen.attach_to)
    attached = f"hf.attach(trainer, load_recipe(None, {['model=model', *seen.settings]}))\ntrainer.train()"
    by_hand = "from lowmem_ft import hf, load_recipe\n" + text.replace("trainer.train()", attached)
    by_hand = estimate_script(script(by_hand, "by_hand.py"), gpu="l4", steps=2)
    assert after.estimate.allocated_peak_bytes == by_hand.estimate.allocated_peak_bytes
    assert after.estimate.process_peak_bytes == by_hand.estimate.process_peak_bytes
    assert after.kept_bytes == by_hand.kept_bytes
    seconds = pytest.approx(after.estimate.step.seconds, rel=1e-12)  # in whatever order they are summed
    assert by_hand.estimate.step.seconds == seconds
    assert before.estimate.step.seconds != seconds  # something was attached
    saved = Savings(settings=seen.settings, before=before, after=after).to_json()
    assert saved["process_peak_bytes"] == [each.estimate.process_peak_bytes for each in (before, by_hand)]


@pytest.mark.parametrize(
    "field, problem",
    [
        ({"optim": "rmsprop"}, "has no counterpart in a recipe"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_what_a_recipe_cannot_be_attached_to_is_told_before_a_second_run(tmp_path, field, problem):
    seen = TrainerSeen()
    seen(trainer_of(tmp_path, **field))
    assert not seen.settings
    assert problem in " ".join(seen.problems)


def test_a_script_that_attaches_a_recipe_is_told_so(tmp_path):
    trainer, seen = trainer_of(tmp_path), TrainerSeen()
    assert settings_of(trainer)
    with hf.attach(trainer, load_recipe(None, ["model=mine"])):
        seen(trainer)
    assert seen.problems == ("The script attaches a recipe itself.",)


def test_settings_are_those_that_the_trainer_allows(tmp_path):
    smoothed = trainer_of(tmp_path, label_smoothing_factor=0.1, **{CHECKPOINTING: True})
    settings = settings_of(smoothed)
    assert "loss.chunk_tokens=null" in settings  # smoothing takes the labels away from the model
    assert {"checkpointing.mode=full", "offload.activations=inputs", "offload.optimizer=host"} <= set(
        settings
    )
    assert not any(setting.startswith("tiling.") for setting in settings)


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("model", [BertForMaskedLM, BertForSequenceClassification])
def test_a_loss_that_attach_would_refuse_is_not_promised(model, tmp_path):
    """A masked LM learns the token at each place, not the next one; a classifier has no logits of tokens."""
    trainer = trainer_of(tmp_path, model=model(BertConfig(vocab_size=512, **SIZES)))
    settings = settings_of(trainer)
    assert {"loss.chunk_tokens=null", "checkpointing.mode=full"} <= set(settings)
    hf.attach(trainer, load_recipe(None, ["model=mine", *settings])).remove()
    with pytest.raises(UserError, match=r"loss\.chunk_tokens"):
        hf.attach(trainer, load_recipe(None, ["model=mine", *settings, "loss.chunk_tokens=1024"]))


def test_an_error_of_ours_in_looking_is_no_matter_of_the_scripts(script, monkeypatch):
    def fail(trainer):
        raise AttributeError("a bug")

    monkeypatch.setattr("lowmem_ft.hf.trainers.attach_savings.kind_of", fail)
    seen = TrainerSeen()
    found = estimate_script(script(TRAINER), gpu="l4", steps=2, on_trainer=seen)
    assert found.steps == 2
    assert not seen.settings
    assert not seen.problems
    assert "AttributeError: a bug" in seen.failure
