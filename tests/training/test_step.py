"""The optimizer step: one normaliser for the whole window, clipping, and steps that are not finite."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from batches import batch_of
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.optimizers.updates.sgd import SGD
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.gradients.norm import clip_grad_norm
from lowmem_ft.techniques.loss.chunked_loss import LossConfig, enable_chunked_loss
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import WindowPass, evaluation_loss, train_step

VOCAB = 61


def make_batch(lengths, *, seed, labelled=1.0):
    """Rows of the given lengths, right-padded; the first ``labelled`` part of each carries no label."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.randint(1, VOCAB, (len(lengths), width), generator=generator)
    labels = input_ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
        labels[row, : max(1, int((1 - labelled) * length))] = -100
    return batch_of(input_ids, labels, lengths)


def rows(batch, start, end):
    """Some rows of a batch as a micro-batch."""
    labels = batch.labels_BT[start:end]
    return dataclasses.replace(
        batch,
        input_ids_BT=batch.input_ids_BT[start:end],
        labels_BT=labels,
        sample_ids=batch.sample_ids[start:end],
        num_label_tokens=int((labels != -100).sum()),
    )


@pytest.fixture
def runtime(tmp_path):
    return launched_runtime(load_recipe("tiny", ["training.use_cpu=true"]).training, tmp_path)


@pytest.fixture
def make_session(runtime):
    def make(config=None, *, chunk_tokens=16, max_grad_norm=None, learning_rate=0.1):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config
            or LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                vocab_size=VOCAB,
            )
        )
        techniques = [enable_chunked_loss(model, LossConfig(chunk_tokens=chunk_tokens))]
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        prepared_model, prepared_optimizer = runtime.ranks.prepare(model, optimizer)
        return Session(
            model=prepared_model,
            unwrapped_model=model,
            optimizer=prepared_optimizer,
            scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0),
            runtime=runtime,
            max_grad_norm=max_grad_norm,
            techniques=Techniques(*techniques),
            host_memory=HostMemory(runtime.machine.device),
        )

    return make


def weights(session):
    return {name: weight.clone() for name, weight in session.unwrapped_model.state_dict().items()}


RAGGED = make_batch([23, 3, 11, 17, 5, 2, 19, 7], seed=1, labelled=0.6)


@pytest.mark.parametrize("chunk_tokens", [16, None])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_equals_one_large_batch(make_session, chunk_tokens, parts):
    """A mean of the micro-batches' means would weigh a token by how short its micro-batch is (transformers #34191)."""
    whole, split = make_session(chunk_tokens=chunk_tokens), make_session(chunk_tokens=chunk_tokens)
    size = len(RAGGED.sample_ids) // parts
    once = train_step(whole, [RAGGED])
    many = train_step(split, [rows(RAGGED, i * size, (i + 1) * size) for i in range(parts)])
    torch.testing.assert_close(many.loss, once.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(many.grad_norm, once.grad_norm, rtol=1e-5, atol=0)
    # fp32 sums in another order: a few ulp of weights of size 1
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-6, atol=1e-7)


GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=VOCAB, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)


@pytest.mark.parametrize("config", [None, GPT2])
def test_the_loss_is_that_of_transformers(make_session, config):
    session = make_session(config)
    model = AutoModelForCausalLM.from_config(session.unwrapped_model.config)
    model.load_state_dict(session.unwrapped_model.state_dict())
    batch = make_batch([12, 12, 12], seed=3)
    expected = model(input_ids=batch.input_ids_BT, labels=batch.labels_BT).loss
    assert train_step(session, [batch]).loss == pytest.approx(expected.item(), rel=1e-6)


def test_padding_changes_no_number_though_there_is_no_attention_mask(make_session):
    short = make_batch([5, 5], seed=4)
    padded = dataclasses.replace(
        short,
        input_ids_BT=torch.nn.functional.pad(short.input_ids_BT, (0, 11), value=7),
        labels_BT=torch.nn.functional.pad(short.labels_BT, (0, 11), value=-100),
    )
    bare, wide = make_session(), make_session()
    torch.testing.assert_close(
        train_step(wide, [padded]).loss, train_step(bare, [short]).loss, rtol=1e-6, atol=0
    )
    torch.testing.assert_close(weights(wide), weights(bare), rtol=1e-5, atol=1e-7)


def test_a_micro_batch_without_labels_adds_nothing(make_session):
    batch = make_batch([9, 4], seed=5)
    empty = dataclasses.replace(batch, labels_BT=torch.full_like(batch.labels_BT, -100), num_label_tokens=0)
    alone, beside = make_session(), make_session()
    assert train_step(alone, [batch]).loss == train_step(beside, [batch, empty]).loss
    torch.testing.assert_close(weights(beside), weights(alone), rtol=0, atol=0)


def test_gradients_are_clipped_to_the_global_norm(make_session):
    free, clipped = make_session(), make_session(max_grad_norm=0.01)
    before = weights(free)
    norm = train_step(free, [RAGGED]).grad_norm
    result = train_step(clipped, [RAGGED])
    assert float(norm) > 0.01
    assert result.grad_norm == norm
    moved = math.sqrt(
        sum(float((after - before[name]).square().sum()) for name, after in weights(clipped).items())
    )
    assert moved == pytest.approx(0.1 * 0.01, rel=1e-3)  # learning rate * norm


def with_our_optimizer(session, dtype):
    model = session.unwrapped_model.to(dtype)
    defaults = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0}
    optimizer = ChunkedOptimizer(model.parameters(), SGD(), defaults)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return dataclasses.replace(session, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_our_optimizer_clips_as_it_reads_gradients(dtype, make_session, runtime, monkeypatch):
    """As gradients multiplied before the step, except that those of 16 bits are not rounded once more."""
    clipped, multiplied = (with_our_optimizer(make_session(max_grad_norm=0.01), dtype) for _ in range(2))
    found = [train_step(clipped, [RAGGED]) for _ in range(3)]
    monkeypatch.setattr(
        runtime.machine,
        "clip_grad_norm",
        lambda optimizer, max_norm, loss: clip_grad_norm(multiplied.trainable_parameters(), max_norm),
    )
    expected = [train_step(multiplied, [RAGGED]) for _ in range(3)]
    assert found[0] == expected[0]
    assert found[0].grad_norm > 0.01
    if dtype == torch.float32:
        assert found == expected
        torch.testing.assert_close(weights(clipped), weights(multiplied), rtol=0, atol=0)
    else:
        torch.testing.assert_close(weights(clipped), weights(multiplied), rtol=2**-7, atol=1e-4)


def test_a_skipped_step_leaves_no_factor(make_session, runtime):
    session = with_our_optimizer(make_session(max_grad_norm=0.01), torch.bfloat16)
    WindowPass(session, [RAGGED]).gradients()
    assert session.optimizer.gradient_factor is not None
    runtime.machine.update_weights(session.optimizer, lambda: False)
    assert session.optimizer.gradient_factor is None


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_step_that_is_not_finite_leaves_everything_as_it_was(make_session, poison):
    session = make_session()
    session.unwrapped_model.model.norm.weight.register_hook(lambda gradient: gradient * poison)
    before, schedule = weights(session), session.scheduler.state_dict()
    result = train_step(session, [RAGGED])
    assert not result.applied
    assert not result.overflow
    torch.testing.assert_close(weights(session), before, rtol=0, atol=0)
    assert session.scheduler.state_dict() == schedule
    assert all(parameter.grad is None for parameter in session.trainable_parameters())


def test_evaluation_sums_over_label_tokens_and_keeps_the_mode(make_session):
    session = make_session()
    loss_sum, count = evaluation_loss(session, [rows(RAGGED, i, i + 1) for i in range(8)])
    assert int(count) == RAGGED.num_label_tokens
    expected = train_step(session, [RAGGED]).loss
    assert (loss_sum / count).item() == pytest.approx(expected, rel=1e-6)


def test_autocast_reaches_the_forward_but_not_the_outputs(tmp_path, monkeypatch):
    """Accelerate's own would copy the logits to fp32; whoever launches the run, it is left off."""
    # as `accelerate launch --mixed_precision bf16` does
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    training = load_recipe("tiny", ["training.use_cpu=true", "training.mixed_precision=bf16"]).training
    runtime = launched_runtime(training, tmp_path)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
        )
    )
    prepared, _ = runtime.ranks.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert "forward" not in vars(model)
    assert prepared(input_ids=RAGGED.input_ids_BT).logits.dtype == torch.float32
    with runtime.machine.autocast():
        assert prepared(input_ids=RAGGED.input_ids_BT).logits.dtype == torch.bfloat16


def test_autocast_keeps_no_copy_of_the_weights_and_changes_no_number(tmp_path):
    """torch's cache would hold a bf16 copy of every layer until the forward ends; checkpointing needs one at a time."""
    training = load_recipe("tiny", ["training.use_cpu=true", "training.mixed_precision=bf16"]).training
    runtime = launched_runtime(training, tmp_path)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=256, num_hidden_layers=6, num_attention_heads=2, vocab_size=VOCAB
    )

    def forward_and_backward(autocast):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        enable_checkpointing(model, CheckpointingConfig(mode="full"))
        model.train()
        with StorageTracker() as tracker, autocast:
            loss = model(input_ids=RAGGED.input_ids_BT[:1], use_cache=False).logits.float().square().mean()
        loss.backward()
        return tracker.peak_bytes, loss, [parameter.grad for parameter in model.parameters()]

    ours, loss, gradients = forward_and_backward(runtime.machine.autocast())
    cached, cached_loss, cached_gradients = forward_and_backward(torch.autocast("cpu", torch.bfloat16))
    layer_bytes = 2 * (4 * 64 * 64 + 3 * 64 * 256)
    assert cached - ours > 5 * layer_bytes
    torch.testing.assert_close(loss, cached_loss, rtol=0, atol=0)
    torch.testing.assert_close(gradients, cached_gradients, rtol=0, atol=0)
