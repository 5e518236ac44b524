"""The load-balancing loss of a mixture's routers is transformers', on every rung, and no part of an evaluation."""

from __future__ import annotations

import copy
import dataclasses
import logging

import pytest
import torch
import transformers as hf
from batches import batch_of
from tiny_models import FAMILY_SIZES, TINY, model_of
from transformers import AutoTokenizer

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.techniques.loss.router_loss import log_router_loss, padding_left_out
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session
from lowmem_ft.training.step.step import evaluation_loss, train_step

COEFFICIENT = 0.3
VOCABULARY = len(AutoTokenizer.from_pretrained(TINY))
SIZES = {**FAMILY_SIZES, "vocab_size": VOCABULARY, "num_experts_per_tok": 2, "output_router_logits": True}
MIXTURE = {**SIZES, "router_aux_loss_coef": COEFFICIENT}
FAMILIES = {
    "mixtral": hf.MixtralConfig(**MIXTURE, num_local_experts=4),
    "qwen3_moe": hf.Qwen3MoeConfig(**MIXTURE, num_experts=4, moe_intermediate_size=16),
    "olmoe": hf.OlmoeConfig(**MIXTURE, num_experts=4),
    "gpt_oss": hf.GptOssConfig(**MIXTURE, num_local_experts=4, head_dim=8),
    "phimoe": hf.PhimoeConfig(**MIXTURE, num_local_experts=4),
    "granitemoe": hf.GraniteMoeConfig(**MIXTURE, num_local_experts=4),
    "jetmoe": hf.JetMoeConfig(
        **{k: v for k, v in SIZES.items() if k != "num_attention_heads"},
        num_local_experts=4, kv_channels=8, aux_loss_coef=COEFFICIENT,
    ),
}  # fmt: skip
IN_BACKWARD = (
    "optimizer.in_backward=true",
    "training.max_grad_norm=null",
    "training.gradient_accumulation_steps=1",
)
RUNGS = {
    "plain": ("loss.chunk_tokens=null",),
    "chunked": (),
    "head in tiles": ("tiling.head=3",),
    "checkpointed": ("checkpointing.mode=full",),
    "selective": ("checkpointing.mode=selective", "model.attn_implementation=sdpa"),
    "activations on the host": ("offload.activations=inputs", "checkpointing.mode=full"),
    "in backward": IN_BACKWARD,
    "streamed": (
        *IN_BACKWARD,
        "offload.parameters=stream",
        "offload.optimizer=host",
        "checkpointing.mode=full",
    ),
    "state on the host": ("offload.optimizer=host",),
}


def labelled_half(lengths, seed):
    """Rows of the given lengths, padded on the right, half of whose tokens have a label."""
    generator = torch.Generator().manual_seed(seed)
    input_ids_BT = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    labels_BT = input_ids_BT.clone()
    for row, length in enumerate(lengths):
        labels_BT[row, : length // 2 + 1] = labels_BT[row, length:] = -100
    return dataclasses.replace(batch_of(input_ids_BT, labels_BT, lengths), lengths=tuple(lengths))


WINDOW = [labelled_half((23, 3, 11, 17), seed=1), labelled_half((5, 4, 19, 7), seed=2)]


@pytest.fixture
def session_of(tiny, tmp_path):
    def make(family, *settings):
        folder = tmp_path / family
        if not folder.exists():
            model_of(FAMILIES[family]).save_pretrained(folder)
            AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        recipe = tiny(
            f"model={folder}",
            "model.weights=pretrained",
            "model.attn_implementation=eager",
            "optimizer.name=sgd",
            "optimizer.weight_decay=0",
            "training.learning_rate=0.1",
            "training.lr_scheduler_type=constant",
            "training.gradient_accumulation_steps=2",
            "training.per_device_train_batch_size=4",
            "checkpointing.mode=none",
            "loss.chunk_tokens=8",
            *settings,
            output_dir=tmp_path / "run",
        )
        runtime = launched_runtime(recipe.training, tmp_path)
        plan = plan_session(recipe, runtime, load_model_config(recipe.model))
        return build_session(recipe, runtime, plan, num_training_steps=4)

    return make


def stock(family, window):
    """The loss of a window, that of its routers and the gradient's norm, by transformers with its mask of padding."""
    model = model_of(FAMILIES[family], attn_implementation="eager")
    num_items = sum(batch.num_label_tokens for batch in window)
    losses, of_routers = [], []
    for batch in window:
        mask_BT = torch.arange(batch.input_ids_BT.shape[1]) < torch.tensor(batch.lengths)[:, None]
        inputs = {"input_ids": batch.input_ids_BT, "attention_mask": mask_BT.long(), "use_cache": False}
        outputs = model(**inputs, labels=batch.labels_BT, num_items_in_batch=num_items)
        rest = (1 / len(window) - 1) * COEFFICIENT * outputs.aux_loss
        losses.append(outputs.loss if len(window) == 1 else outputs.loss + rest)
        of_routers.append(outputs.aux_loss.detach())
    loss = torch.stack(losses).sum()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return loss.item(), torch.stack(of_routers).mean().item(), norm.item()


@pytest.mark.parametrize(
    "family, rung",
    [
        *((family, "plain") for family in FAMILIES),
        *(("qwen3_moe", rung) for rung in RUNGS if rung != "plain"),
    ],
)
def test_the_loss_and_its_gradient_are_transformers(session_of, family, rung):
    window = WINDOW[:1] if RUNGS[rung][:3] == IN_BACKWARD else WINDOW
    loss, aux_loss, norm = stock(family, window)
    session = session_of(family, *RUNGS[rung])
    result = train_step(session, window)
    session.close()
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.aux_loss == pytest.approx(aux_loss, rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)


def test_one_micro_batch_without_padding_is_transformers_bit_by_bit(session_of):
    batch = labelled_half((9, 9, 9), seed=3)
    model = model_of(FAMILIES["qwen3_moe"], attn_implementation="eager")
    outputs = model(
        input_ids=batch.input_ids_BT, labels=batch.labels_BT, num_items_in_batch=batch.num_label_tokens
    )
    result = train_step(session_of("qwen3_moe", *RUNGS["plain"]), [batch])
    assert (result.loss, result.aux_loss) == (outputs.loss.item(), outputs.aux_loss.item())


def test_under_lora_the_loss_is_the_same_and_routers_are_frozen(session_of):
    pytest.importorskip("peft")
    loss, aux_loss, _ = stock("qwen3_moe", WINDOW)
    session = session_of("qwen3_moe", "adapter.name=lora")
    router = session.unwrapped_model.get_submodule("model.layers.0.mlp.gate").weight
    before = router.clone()
    result = train_step(session, WINDOW)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.aux_loss == pytest.approx(aux_loss, rel=1e-5)
    assert not router.requires_grad
    assert router.equal(before)


def test_an_evaluation_measures_the_language_loss_alone(session_of):
    session = session_of("qwen3_moe")
    with_loss, _ = evaluation_loss(session, WINDOW)
    config = session.unwrapped_model.config
    assert config.output_router_logits
    config.output_router_logits = False
    without, _ = evaluation_loss(session, WINDOW)
    assert with_loss == without
    assert train_step(session, WINDOW).aux_loss is None


def test_a_run_reports_it_apart(session_of, tiny, metrics, tmp_path, caplog):
    session_of("qwen3_moe").close()
    with caplog.at_level(logging.INFO):
        train(
            tiny(
                f"model={tmp_path / 'qwen3_moe'}",
                "training.max_steps=1",
                "data.max_length=64",
                "training.logging_steps=1",
                output_dir=tmp_path / "out",
            )
        )
    assert "the loss includes 0.3 of their load-balancing loss" in caplog.text
    (aux_loss,), (loss,) = (metrics(tmp_path / "out", key) for key in ("aux_loss", "loss"))
    assert 1 < aux_loss < 4 * 2  # between even and all tokens to the same two experts of four, times two
    assert loss > COEFFICIENT * aux_loss
    assert f"aux_loss {aux_loss:.4f}" in caplog.text


@pytest.mark.parametrize("on, says", [(True, "includes 0.3"), (False, "coefficient of 0.3 has no effect")])
def test_the_log_says_what_the_config_has(caplog, on, says):
    config = copy.deepcopy(FAMILIES["mixtral"])
    config.output_router_logits = on
    with caplog.at_level(logging.INFO):
        log_router_loss(model_of(config))
        log_router_loss(model_of(hf.LlamaConfig(**FAMILY_SIZES)))
    assert [says in message for message in caplog.messages] == [True]


def test_a_model_whose_loss_takes_no_mask_is_refused_with_padding(monkeypatch):
    model = model_of(FAMILIES["mixtral"])
    monkeypatch.delattr("transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func")
    with padding_left_out(model, (5, 5), torch.Size((2, 5))):
        pass
    with (
        pytest.raises(UserError, match="would count padding"),
        padding_left_out(model, (5, 3), torch.Size((2, 5))),
    ):
        pass
