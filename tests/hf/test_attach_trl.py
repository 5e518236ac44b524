"""A recipe inside TRL's trainers: the same losses, and by name what each does not allow."""

from __future__ import annotations

import pytest
import torch
import trl
from attached_trainers import (
    IN_ONE_BATCH,
    SAME_LOSSES,
    SAME_NORMS,
    TINY,
    VERTICAL,
    Meter,
    arguments,
    chats,
    recipe_of,
)
from datasets import Dataset
from ladder_rungs import RUNGS, settings_of
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_models import model_of
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PrinterCallback

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.recipe.trainers.trainer_kinds import ROWS, Refused

STATE = ("offload.optimizer=host", "checkpointing.mode=full", "tiling.mlp=2", "offload.activations=inputs")
STREAMED = (
    *VERTICAL,
    "offload.parameters=stream",
    "offload.optimizer=host",
    "optimizer.in_backward=true",
)


NO_IDEA = [{"role": "assistant", "content": "No idea at all."}]
KINDS = {
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "kto": "KTOTrainer",
    "grpo": "GRPOTrainer",
    "rloo": "RLOOTrainer",
    "distillation": "DistillationTrainer",
    "reward": "RewardTrainer",
}
OTHERS = [kind for kind in KINDS if kind != "sft"]
GENERATING = ("grpo", "rloo", "distillation")


def length_of(completions, **kwargs):
    return [float(len(str(completion)) % 7) for completion in completions]


def rows_of(kind):
    for number, chat in enumerate(chats()[:16]):
        prompt, answer = chat["messages"][:1], chat["messages"][1:2]
        if kind == "sft":
            yield {"messages": chat["messages"]}
        elif kind in GENERATING:
            yield {"prompt": prompt}
        elif kind == "kto":
            is_good = number % 2 == 0
            yield {"prompt": prompt, "completion": answer if is_good else NO_IDEA, "label": is_good}
        else:
            yield {"prompt": prompt, "chosen": answer, "rejected": NO_IDEA}


def of_kind(kind, *, lora):
    """What a trainer's constructor takes besides the model, and what its arguments have besides those of others."""
    generated = {"max_completion_length": 8}
    return {
        "sft": ({}, {"max_length": 64}),
        "dpo": ({"ref_model": None if lora else model_of()}, {"max_length": 64}),
        "kto": ({"ref_model": None if lora else model_of()}, {"max_length": 64}),
        "grpo": ({"reward_funcs": length_of}, {"num_generations": 4, **generated}),
        "rloo": ({"reward_funcs": length_of}, {"num_generations": 4, **generated}),
        "distillation": ({"teacher_model": model_of(seed=7)}, generated),
        "reward": ({}, {"max_length": 64}),
    }[kind]


def tiny(kind):
    if kind != "reward":
        return model_of()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TINY, num_labels=1)
    return AutoModelForSequenceClassification.from_config(config).train()


@pytest.fixture(scope="module")
def data():
    return {kind: Dataset.from_list(list(rows_of(kind))) for kind in KINDS}


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Trainers by kind, as they are or with a recipe attached, and what they log in two steps."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    folder = str(tmp_path_factory.mktemp("trl"))
    start = str(tmp_path_factory.mktemp("start"))
    model_of().save_pretrained(start)

    def make(kind, settings=None, *, fields=None, lora=False, prepare=False, folder=folder):
        wanted = recipe_of(*settings) if settings is not None else None
        model = hf.prepare_model(tiny(kind), wanted) if prepare and wanted else tiny(kind)
        model.config._name_or_path = start  # where RLOO reads its reference model from
        given, own = of_kind(kind, lora=lora)
        shared = arguments(**{"max_steps": 2, "learning_rate": 1e-3, "bf16": False, **own, **(fields or {})})
        meter = Meter()
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        trainer = getattr(trl, KINDS[kind])(
            model,
            args=getattr(trl, KINDS[kind].replace("Trainer", "Config"))(folder, **shared),
            train_dataset=data[kind],
            eval_dataset=data[kind].select(range(4)),
            processing_class=tokenizer,
            callbacks=[meter],
            peft_config=LoraConfig(r=4, target_modules="all-linear", task_type=task) if lora else None,
            **given,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer, meter, hf.attach(trainer, wanted) if wanted is not None else None

    def train(*args, **kwargs):
        trainer, meter, handle = make(*args, **kwargs)
        trainer.train()
        return meter, handle

    train.make = make
    return train


@pytest.fixture(scope="module")
def stock(trained):
    return {kind: trained(kind)[0] for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_state_on_the_host_and_recomputation_have_trls_losses(kind, trained, stock):
    meter, _ = trained(kind, STATE)
    assert meter.losses == pytest.approx(stock[kind].losses, abs=SAME_LOSSES)
    assert meter.norms == pytest.approx(stock[kind].norms, rel=SAME_NORMS)


@pytest.mark.parametrize(
    "settings, how",
    [(("loss.chunk_tokens=null",), {}), (STREAMED, {"fields": IN_ONE_BATCH, "prepare": True})],
)
def test_sft_has_trls_losses_by_its_head_and_by_ours(settings, how, trained, stock):
    meter, _ = trained("sft", settings, **how)
    assert meter.losses == pytest.approx(stock["sft"].losses, abs=SAME_LOSSES)
    assert ("entropy" in meter.logs[0]) == ("loss.chunk_tokens=null" in settings)


def test_an_evaluation_of_sft_that_wants_logits_has_them(trained):
    trainer, _, _ = trained.make("sft", ("loss.chunk_tokens=32",))
    trainer.compute_metrics = lambda prediction: {"shape": prediction.predictions.shape[-1]}
    vocabulary = trainer.model.config.vocab_size
    assert trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_shape"] == vocabulary


OF_ONE_BATCH = tuple(one for one in STREAMED if one not in VERTICAL or "checkpointing" in one)
RESUMED = {
    "sft": (STREAMED, {**IN_ONE_BATCH}),
    "dpo": ((*STATE, "optimizer.state=8bit"), {}),
    "kto": (STATE, {}),
    "grpo": (STATE, {}),
    "rloo": ((*STATE, "optimizer.state=8bit"), {}),
    "distillation": (STATE, {}),
    "reward": (OF_ONE_BATCH, {**IN_ONE_BATCH}),
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_run_goes_on_bit_for_bit_and_ends_with_the_best_model(kind, trained, tmp_path):
    """From half of it; best is by a metric by which it is not the last."""
    settings, fields = RESUMED[kind]
    every_step = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    how = {
        "fields": {**fields, **every_step, **best, "max_steps": 3},
        "prepare": True,
        "folder": str(tmp_path),
    }

    def run(**resumed):
        trainer, meter, handle = trained.make(kind, settings, **how)
        trainer.train(**resumed)
        handle.remove()
        number = trainer.state.best_global_step
        saved = load_file(tmp_path / f"checkpoint-{number}" / "model.safetensors")
        now = trainer.model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in saved.items()), "the best is loaded"
        last = type(trainer.model).from_pretrained(tmp_path / "checkpoint-3").state_dict()
        return meter, number, last

    whole, best_of_whole, weights = run()
    rest, best_of_rest, again = run(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert rest.losses == whole.losses[1:]
    assert rest.norms == whole.norms[1:]
    scores = [logs["eval_loss"] for logs in whole.evaluations]
    assert [logs["eval_loss"] for logs in rest.evaluations] == scores[1:]
    assert best_of_rest == best_of_whole
    if kind not in ("grpo", "rloo"):  # whose loss is 0 before the first of several updates
        assert best_of_whole != 3
    assert all(torch.equal(weights[name], again[name]) for name in weights)


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "reward"])
def test_passes_without_gradients_leave_our_choice_of_layers(kind, trained):
    """TRL turns HF's switch off and on around them; the layers that are recomputed stay those of the recipe."""
    trainer, _, _ = trained.make(
        kind, ("checkpointing.mode=full", "checkpointing.skip_last_layers=1"), lora=True
    )
    trainer.train()
    layers = trainer.model.get_base_model().model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]
    trainer.model.gradient_checkpointing_disable()
    assert not any(layer.gradient_checkpointing for layer in layers)
    trainer.model.gradient_checkpointing_enable({"use_reentrant": True})
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]


ASKED = {
    "loss.chunk_tokens": ("loss.chunk_tokens=64",),
    "tiling.head": ("tiling.head=2",),
    "accumulation.order": ("accumulation.order=vertical", "checkpointing.mode=full"),
    "accumulation.fusion": ("accumulation.fusion=true", "model.dtype=bfloat16"),
    "offload.parameters": STREAMED,
    "distributed.context": ("distributed.context=2",),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_it_does_not_allow_is_refused_by_name(kind, trained):
    named = KINDS[kind]
    refused = [row.key for row in ROWS if isinstance(row.verdict(named), Refused)]
    assert refused == [key for key in ASKED if kind != "reward" or key != "offload.parameters"]
    trainer, _, _ = trained.make(kind, fields=IN_ONE_BATCH)
    for key in refused:
        settings = ASKED[key]
        with pytest.raises(UserError) as caught:
            hf.attach(trainer, recipe_of(*settings))
        assert any(f"{key}=" in problem and f"under {named}" in problem for problem in caught.value.problems)
    handle = hf.attach(trainer, recipe_of())  # which has loss.chunk_tokens by default
    assert handle.recipe.loss.chunk_tokens is None
    assert any(words.startswith("loss.chunk_tokens off") for words in handle.applied)


@pytest.mark.parametrize(
    "fields, settings, words",
    [
        ({"loss_type": "dft"}, (), "SFTConfig.loss_type=dft"),
        ({**IN_ONE_BATCH, "packing": True}, VERTICAL, "padding-free batches are one row"),
        (IN_ONE_BATCH, (*STREAMED, "loss.chunk_tokens=null"), "TRL's own head reads the weights of lm_head"),
        ({"activation_checkpointing_kwargs": {"offload": True}}, (), "offload.activations=inputs does it"),
        (
            {"activation_checkpointing_kwargs": {"every_n_layers": 2}},
            STATE,
            "checkpointing.every_n_layers=1 differs from",
        ),
    ],
)
def test_what_sft_was_told_that_cannot_go_with_it(fields, settings, words, trained):
    names = {"activation_checkpointing_kwargs": "gradient_checkpointing_kwargs"}
    if not hasattr(trl.SFTConfig, "activation_checkpointing"):
        fields = {names.get(name, name): value for name, value in fields.items()}
    trainer, _, _ = trained.make("sft", fields=fields, prepare=False)
    with pytest.raises(UserError) as caught:
        hf.attach(trainer, recipe_of(*settings))
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_trains_as_trl_does_or_is_refused_by_name(kind, rung, trained, stock):
    named = KINDS[kind]
    formats = ("training", "model.dtype", "optimizer.master", "tiling")
    settings = [one for one in settings_of(rung) if not one.startswith(formats)]
    refused = [
        row.key
        for row in ROWS
        if isinstance(row.verdict(named), Refused) and any(one.startswith(f"{row.key}=") for one in settings)
    ]
    asked = [key for key in refused if f"{key}=null" not in settings]
    if asked:
        with pytest.raises(UserError) as caught:
            trained(kind, settings, fields=IN_ONE_BATCH)
        assert all(any(f"{key}=" in problem for problem in caught.value.problems) for key in asked)
        return
    if "accumulation.order=vertical" in settings:
        how = {"fields": IN_ONE_BATCH, "prepare": True}
        settings.append("training.per_device_train_batch_size=4")
    else:
        how = {}
    meter, _ = trained(kind, settings, **how)
    rounded = "optimizer.state=8bit" in settings
    assert meter.losses == pytest.approx(stock[kind].losses, abs=1e-4 if rounded else SAME_LOSSES)


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "reward"])
def test_only_one_of_the_two_copies_activations_to_the_host(kind, trained):
    """TRL's own way there asks for a GPU as the trainer is made."""
    trainer, _, _ = trained.make(kind)
    trainer.args.activation_offloading = True
    with pytest.raises(UserError, match=r"Config\.activation_offloading both copy"):
        hf.attach(trainer, recipe_of(*STATE))
    hf.attach(trainer, recipe_of("checkpointing.mode=full"))


def test_all_activations_leave_by_the_models_forward_which_distillation_goes_past(trained):
    trainer, _, _ = trained.make("distillation")
    with pytest.raises(
        UserError, match=r"calls the layers past that forward\. Set offload.activations=inputs"
    ):
        hf.attach(trainer, recipe_of("checkpointing.mode=full", "offload.activations=all"))


@pytest.mark.parametrize("kind", KINDS)
def test_how_the_models_own_loss_counts_tokens_is_nothing_to_a_loss_of_trls(kind, trained):
    trainer, _, _ = trained.make(kind)
    trainer.model.accepts_loss_kwargs = False
    handle = hf.attach(trainer, recipe_of("loss.chunk_tokens=null"))
    assert handle.recipe.loss.chunk_tokens is None


def test_trls_flag_becomes_the_recipes_checkpointing(trained):
    """It is on by default, and would be HF's own mechanism over ours."""
    _, _, handle = trained.make("sft", ())
    assert handle.recipe.checkpointing.mode == "full"


def test_trainers_that_are_not_known_are_refused():
    """One of TRL's experimental ones that derives from a stable one is not that one."""
    derived = type("GKDTrainer", (trl.SFTTrainer,), {"__module__": "trl.experimental.gkd.gkd_trainer"})
    trainer = derived.__new__(derived)
    with pytest.raises(UserError, match=r"takes Trainer, .* or RewardTrainer, got GKDTrainer"):
        hf.attach(trainer, recipe_of())
