"""Whatever our step asks of a technique, somebody else's loop can ask: the whole ladder, driven by another one."""

from __future__ import annotations

import contextlib
import functools
import math
from pathlib import Path

import pytest
import torch
from batches import batch_of_two
from ladder_rungs import RUNGS, settings_of
from safetensors.torch import load_file
from sweeps import few_quick

from lowmem_ft.data.batches.batch import merged
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.gradients.norm import clip_grad_norm
from lowmem_ft.techniques.technique import Technique, Techniques
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session
from lowmem_ft.training.step.step import evaluation_loss, train_step

MODEL = Path(__file__).parents[1] / "data" / "kept_runs" / "model"
LORA = ("adapter.name=lora", "adapter.r=4", "adapter.target_modules=[q_proj]", "offload.parameters=stream")
RUNS = {rung.name: settings_of(rung) for rung in RUNGS}
RUNS["adapters beside a streamed base"] = (*settings_of(RUNGS[1]), *LORA)
RUNS["bf16 weights alone"] = (*settings_of(RUNGS[2]), "optimizer.master=none", "optimizer.state=bf16")
QUICK = (*(rung.name for rung in RUNGS[1::2]), "adapters beside a streamed base", "bf16 weights alone")
"""A rung has what those below it add; `make test` takes every other."""


batch = functools.partial(batch_of_two, vocabulary=128)


class OtherLoop:
    """A training loop of plain torch, such as others have."""

    def __init__(self, model, optimizer, scheduler, techniques, *, bf16):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.techniques, self.bf16 = techniques, bf16

    def forward(self, micro_batch, num_items):
        ids_BT, num_label_tokens = micro_batch.input_ids_BT, micro_batch.num_label_tokens
        further_inputs = self.techniques.before_forward(ids_BT, num_label_tokens)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False, enabled=self.bf16):
            return self.model(
                input_ids=ids_BT,
                labels=micro_batch.labels_BT,
                use_cache=False,
                num_items_in_batch=num_items,
                **further_inputs,
            ).loss.float()

    def step(self, window):
        if self.techniques.takes_whole_window:
            window = [merged(window)]
        num_items = sum(micro_batch.num_label_tokens for micro_batch in window)
        loss = torch.zeros(())
        for micro_batch in window:
            micro_loss = self.forward(micro_batch, num_items)
            micro_loss.backward()
            loss += micro_loss.detach()
        grad_norm = self.techniques.clip_grad_norm(unscale=lambda values: None)
        are_taken = grad_norm is not None
        if grad_norm is None:
            trained = [p for group in self.optimizer.param_groups for p in group["params"]]
            grad_norm = clip_grad_norm(trained, 0.5)
        finite = bool(torch.isfinite(loss + grad_norm))
        assert self.techniques.update_weights(lambda: finite) == are_taken, "who takes gradients applies them"
        if finite and not are_taken:
            self.optimizer.step()
        if finite:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return float(loss), float(grad_norm), self.techniques.metrics()

    def evaluate(self):
        self.techniques.flush()
        self.model.eval()
        with torch.no_grad():
            loss = self.forward(batch(100, 12), 1)
        self.model.train()
        return float(loss)


class OurLoop:
    """The same by ``training/step/step.py``."""

    def __init__(self, session):
        self.session = session

    def step(self, window):
        result = train_step(self.session, window)
        return result.loss, result.grad_norm, self.session.techniques.metrics()

    def evaluate(self):
        self.session.techniques.flush()
        self.session.model.eval()
        loss_sum, _ = evaluation_loss(self.session, [batch(100, 12)])
        self.session.model.train()
        return float(loss_sum)


def read_all(session):
    """Return every weight and all of the optimizer's state, as a checkpoint reads them."""
    tensors = {}
    with session.techniques.at_rest():
        for name, parameter in session.unwrapped_model.named_parameters():
            tensors[name] = parameter.detach().clone()
            for key, value in session.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{name}.{key}"] = value.clone()
    return tensors


def make_session(settings, folder):
    recipe = load_recipe(
        None,
        [
            *settings,
            f"model={MODEL}",
            "model.weights=random",
            "data=any",
            "training.use_cpu=true",
            "training.max_grad_norm=0.5",
            "training.warmup_steps=0",
            "training.learning_rate=0.01",
            "training.gradient_accumulation_steps=2",
        ],
    )
    runtime = launched_runtime(recipe.training, folder)
    torch.manual_seed(0)  # adapters are drawn at random
    session = build_session(recipe, runtime, plan_session(recipe, runtime), num_training_steps=3)
    return session, recipe.training.mixed_precision == "bf16"


def train(loop, session):
    """Three steps; before the last a look at held-out data, and a step that is not finite and changes nothing."""
    steps = [loop.step([batch(2 * step, 21), batch(2 * step + 1, 17)]) for step in range(2)]
    held_out, before = loop.evaluate(), read_all(session)
    with not_finite(session.unwrapped_model):
        skipped = loop.step([batch(4, 19), batch(5, 21)])
    assert not math.isfinite(skipped[0])
    torch.testing.assert_close(read_all(session), before, rtol=0, atol=0)
    return [*steps, held_out, skipped, loop.step([batch(4, 19), batch(5, 21)])]


@contextlib.contextmanager
def not_finite(model):
    """The loss, though every gradient is finite: what applies them all the same changes weights."""

    def overflow(module, inputs, outputs):
        outputs.loss = outputs.loss + torch.inf
        return outputs

    hook = model.register_forward_hook(overflow)
    yield
    hook.remove()


def what_is_left(session, folder):
    """Weights, state and files after a run, then the model once every technique is off."""
    techniques, model = session.techniques, session.unwrapped_model
    folder.mkdir()
    weights_and_state = read_all(session)
    with techniques.at_rest():
        files = load_file(folder / "adapter_model.safetensors") if techniques.save(folder) else {}
    techniques.remove()
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert all(torch.equal(plain[name], weights_and_state[name]) for name in plain.keys() & weights_and_state)
    return weights_and_state, files, plain


@pytest.mark.parametrize("run", few_quick(RUNS, QUICK))
def test_another_loop_drives_the_techniques_of_a_run_bit_for_bit(run, tmp_path):
    session, _ = make_session(RUNS[run], tmp_path)
    other, bf16 = make_session(RUNS[run], tmp_path)
    other_loop = OtherLoop(
        other.unwrapped_model, other.optimizer, other.scheduler, other.techniques, bf16=bf16
    )
    ours, theirs = train(OurLoop(session), session), train(other_loop, other)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0, equal_nan=True)
    assert len({float(step[0]) for step in (ours[0], ours[1], ours[4])}) == 3
    ours, theirs = what_is_left(session, tmp_path / "ours"), what_is_left(other, tmp_path / "theirs")
    torch.testing.assert_close(theirs, ours, rtol=0, atol=0)
    assert any("lora" in name for name in ours[1]) == ("adapter.name=lora" in RUNS[run])


class Noted(Technique):
    """Writes down when it is asked what."""

    def __init__(self, name, notes):
        super().__init__(lambda: notes.append(f"{name} removed"))
        self.name, self.notes = name, notes

    def flush(self):
        self.notes.append(f"{self.name} flushed")

    @contextlib.contextmanager
    def at_rest(self):
        self.notes.append(f"{self.name} at rest")
        yield
        self.notes.append(f"{self.name} back")


def test_the_outer_technique_is_flushed_put_at_rest_and_removed_before_the_inner():
    notes: list[str] = []
    techniques = Techniques(Noted("inner", notes), Noted("outer", notes))
    with techniques.at_rest():
        assert notes == ["outer flushed", "inner flushed", "outer at rest", "inner at rest"]
    del notes[:]
    techniques.remove()
    assert notes == ["outer removed", "inner removed"]


class Taking(Technique):
    """Takes the gradients, and is what is trained."""

    def __init__(self):
        super().__init__()
        self.told: list[str] = []

    def clip_grad_norm(self, unscale):
        self.told.append("clip")
        return torch.tensor(len(self.told))

    def update_weights(self, is_finite):
        self.told.append(f"update, finite {is_finite()}")
        return True

    def save(self, folder, *, writes=True):
        self.told.append("save")
        return True


def test_each_technique_is_told_whoever_takes_the_gradients(tmp_path):
    first, second = Taking(), Taking()
    techniques = Techniques(Technique(), first, second)
    assert techniques.clip_grad_norm(lambda values: None) == torch.tensor(1)
    assert techniques.update_weights(lambda: False)
    assert techniques.save(tmp_path)
    assert first.told == second.told == ["clip", "update, finite False", "save"]


def test_a_technique_that_says_nothing_leaves_everything_to_the_loop(tmp_path):
    for technique in (Technique(), Techniques(), Techniques(Technique(), Technique())):
        assert technique.before_forward(torch.ones(1, 1), 1) == {}
        assert technique.clip_grad_norm(lambda values: None) is None
        assert not technique.update_weights(lambda: True)
        assert not technique.save(tmp_path)
        assert not list(technique.weight_memory())
        assert not (technique.takes_whole_window)
        assert not (technique.updates_at_once)
        assert not (technique.is_trained)
