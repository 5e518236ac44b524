"""fp16's loss scale, by torch's own GradScaler on a CPU: found, skipped, lowered, raised again, resumed."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from batches import batch_of
from transformers import AutoModelForCausalLM, LlamaConfig

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques import precision_check
from lowmem_ft.techniques.loss.chunked_loss import LossConfig, enable_chunked_loss
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.training.checkpoints import checkpoint
from lowmem_ft.training.folder.checkpoint_folders import Progress
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes import process_group
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import train_step

VOCAB = 61


def use_scaler(runtime, **options):
    """A recipe may have fp16 on a GPU alone; a step has it on a CPU, too."""
    runtime.machine.mixed_precision = "fp16"
    runtime.machine.loss_scale.scaler = torch.amp.GradScaler("cpu", **options)
    return runtime.machine.loss_scale.scaler


@pytest.fixture
def make_session(tmp_path):
    def make(**options):
        runtime = launched_runtime(load_recipe("tiny", ["training.use_cpu=true"]).training, tmp_path)
        scaler = use_scaler(runtime, **options)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCAB
        )
        model = AutoModelForCausalLM.from_config(config)
        loss = enable_chunked_loss(model, LossConfig(chunk_tokens=16))
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        prepared_model, prepared_optimizer = runtime.ranks.prepare(model, optimizer)
        session = Session(
            model=prepared_model,
            unwrapped_model=model,
            optimizer=prepared_optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            runtime=runtime,
            max_grad_norm=1.0,
            techniques=Techniques(loss),
            host_memory=HostMemory(runtime.machine.device),
        )
        return session, scaler

    return make


@pytest.fixture
def batch():
    tokens = torch.randint(1, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[:, 0] = -100  # nothing comes before the first token
    return batch_of(tokens, labels)


def weights(session):
    return {name: weight.clone() for name, weight in session.unwrapped_model.state_dict().items()}


def test_the_scale_changes_no_number(make_session, batch):
    results = []
    for scale in (2.0**12, 2.0**14):  # less would be too small for float16
        session, _ = make_session(init_scale=scale)
        result = train_step(session, [batch])
        results.append((result.loss, result.grad_norm, weights(session)))
    torch.testing.assert_close(
        results[1], results[0], rtol=1e-6, atol=1e-7
    )  # powers of two: exact up to clipping


def test_an_overflow_skips_the_step_and_lowers_the_scale(make_session, batch):
    session, scaler = make_session(init_scale=2.0**127)
    before = weights(session)
    result = train_step(session, [batch, batch])
    assert not result.applied
    assert result.overflow
    assert math.isfinite(result.loss)
    assert scaler.get_scale() == 2.0**126
    torch.testing.assert_close(weights(session), before, rtol=0, atol=0)
    assert not session.optimizer.state
    assert session.scheduler.last_epoch == 0
    while not train_step(session, [batch]).applied:
        assert scaler.get_scale() > 1
    assert session.scheduler.last_epoch == 1


def test_the_scale_grows_again(make_session, batch):
    session, scaler = make_session(init_scale=8.0, growth_interval=2)
    for _ in range(2):
        assert train_step(session, [batch]).applied
    assert scaler.get_scale() == 16


def test_below_a_scale_of_one_it_is_not_the_scales_fault(make_session, batch):
    session, scaler = make_session(init_scale=0.5)
    session.unwrapped_model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    result = train_step(session, [batch])
    assert not result.applied
    assert not result.overflow
    assert scaler.get_scale() == 0.25


def test_a_loss_that_is_not_finite_is_skipped_though_every_gradient_is(make_session, batch, monkeypatch):
    """The scaler looks at gradients alone and would take the step."""
    session, scaler = make_session(init_scale=8.0)
    monkeypatch.setattr(session.runtime.ranks, "sum", lambda value: value * math.inf)
    before = weights(session)
    result = train_step(session, [batch])
    assert not result.applied
    assert not result.overflow
    assert scaler.get_scale() == 8
    torch.testing.assert_close(weights(session), before, rtol=0, atol=0)
    monkeypatch.undo()


def test_the_scale_goes_on_from_a_checkpoint(make_session, batch, tmp_path, monkeypatch):
    monkeypatch.setattr(RunFiles, "save_trained", lambda *args: None)
    session, scaler = make_session(init_scale=8.0, growth_interval=3)
    train_step(session, [batch])
    progress = Progress(position=DataPosition(seed=1), step=1)
    folder = checkpoint.save_checkpoint(tmp_path, session, session.runtime, None, progress)
    state = scaler.state_dict()
    resumed, fresh = make_session(init_scale=65536.0)
    checkpoint.load_checkpoint(folder, resumed, resumed.runtime)
    assert fresh.state_dict() == state
    assert resumed.scheduler.get_last_lr() == session.scheduler.get_last_lr()


@pytest.fixture
def fp16_on_cpu(monkeypatch):
    """Runs in float16 on a CPU, whose autocast has it; the loss scalers of those made."""
    rules = precision_check.precision_problems
    monkeypatch.setattr(
        precision_check,
        "precision_problems",
        lambda *types, **device: rules(*types, **device | {"is_cpu": False}),
    )
    create, scalers = process_group.launched_runtime, []

    def with_scaler(*args, **kwargs):
        runtime = create(*args, **kwargs)
        scalers.append(runtime.machine.loss_scale.scaler)
        return runtime

    monkeypatch.setattr(process_group, "launched_runtime", with_scaler)
    return scalers


@pytest.mark.parametrize("name", ["1b-fp16-t4", "7b-qlora-t4"])
def test_recipes_for_cards_without_bfloat16_train_in_float16(
    name, tiny, metrics, tmp_path, monkeypatch, fp16_on_cpu
):
    shipped = load_recipe(name)
    keys = (
        "model.dtype",
        "model.quantization",
        "adapter.name",
        "training.mixed_precision",
        "training.max_grad_norm",
        "optimizer.name",
        "optimizer.master",
        "optimizer.state",
        "offload.optimizer",
        "checkpointing.mode",
        "tiling.head",
    )
    settings = [f"{key}={operator.attrgetter(key)(shipped)}" for key in keys]
    dtypes = set()
    linear = torch.nn.functional.linear

    def watched(*arguments, **keywords):
        output = linear(*arguments, **keywords)
        dtypes.add(output.dtype)
        return output

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    train(tiny(*settings, "training.max_steps=12", "training.save_steps=null", output_dir=tmp_path / "run"))
    losses = metrics(tmp_path / "run")
    assert losses[-1] < losses[0] - 0.2
    assert metrics(tmp_path / "run", "skipped_steps")[-1] == 0
    assert torch.float16 in dtypes
    (scaler,) = fp16_on_cpu
    assert scaler.get_scale() == 65536.0


def test_a_run_skips_overflows_without_giving_up(tiny, metrics, tmp_path, monkeypatch, caplog):
    create = process_group.launched_runtime

    def with_scaler(*args, **kwargs):
        runtime = create(*args, **kwargs)
        use_scaler(runtime, init_scale=2.0**24)
        return runtime

    monkeypatch.setattr(process_group, "launched_runtime", with_scaler)
    with caplog.at_level("INFO"):
        train(
            tiny(
                "training.max_steps=12",
                "training.max_skipped_steps=1",
                "training.eval_steps=null",
                "training.save_steps=null",
                output_dir=tmp_path / "run",
            )
        )
    skipped = metrics(tmp_path / "run", "skipped_steps")
    assert skipped[:3] == [1, 2, 3]
    assert skipped[-1] < 12
    rates = metrics(tmp_path / "run", "learning_rate")
    assert rates[3] == rates[0] > rates[-1]  # the schedule waited for the first applied step
    assert "loss scale was too high" in caplog.text
