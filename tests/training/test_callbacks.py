"""Objects of the caller's hear of a run's steps, evaluations and checkpoints, and may end it."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import traceback

import pytest
from transformers import TrainerCallback

from lowmem_ft import EvaluationEvent, SaveEvent, StepEvent, Stop, UserError
from lowmem_ft.planning.preflight.train import train as train_after_preflight
from lowmem_ft.training.folder.checkpoint_folders import read_progress
from lowmem_ft.training.run.loop import train

SHORT = (
    "training.max_steps=5",
    "training.eval_steps=2",
    "training.save_steps=3",
    "training.eval_on_start=true",
)


class Listener:
    def __init__(self):
        self.events = []

    def on_step(self, event):
        self.events.append(event)

    on_evaluate = on_save = on_step


def test_each_event_has_what_the_run_wrote_down(tiny, tmp_path):
    listener = Listener()
    settings = (*SHORT, "training.load_best_model_at_end=true", "training.save_total_limit=null")
    train_after_preflight(tiny(*settings, "budget.preflight=false"), callbacks=[listener])
    run = tmp_path / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [event for event in listener.events if isinstance(event, StepEvent)]
    evaluations = [event for event in listener.events if isinstance(event, EvaluationEvent)]
    saved = [event for event in listener.events if isinstance(event, SaveEvent)]
    assert len(steps) + len(evaluations) + len(saved) == len(listener.events)
    of_steps = [record for record in records if "loss" in record]
    assert [dataclasses.asdict(event) for event in steps] == [{**one, "num_steps": 5} for one in of_steps]
    of_evaluations = [record for record in records if "eval_loss" in record]
    assert [one.step for one in evaluations] == [0, 2, 4, 5]
    for event, record in zip(evaluations, of_evaluations, strict=True):
        assert (event.step, event.loss, event.perplexity, event.num_label_tokens) == tuple(record.values())
    assert [event.best_step for event in evaluations] == [None, 2, 4, 5]
    assert [(event.step, event.checkpoint) for event in saved] == [
        (step, run / f"checkpoint-{step}") for step in (2, 3, 4)
    ]
    assert [read_progress(event.checkpoint).step for event in saved] == [2, 3, 4]
    with pytest.raises(dataclasses.FrozenInstanceError):
        steps[0].loss = 0.0


class Asks:
    def __init__(self, answer, step=3):
        self.answer, self.step, self.heard = answer, step, []

    def on_step(self, event):
        self.heard.append(event.step)
        return self.answer if event.step == self.step else None


def test_a_wish_to_stop_ends_the_run_as_a_finished_one(tiny, tmp_path, metrics):
    other = Asks(Stop("Never heard."), step=5)
    result = train(tiny(*SHORT), callbacks=[Asks(Stop("Enough.")), other])
    assert (result.steps, result.stopped) == (3, "Enough.")
    assert other.heard == metrics(tmp_path / "run", "step") == [1, 2, 3]
    assert result.evaluation is not None
    assert (result.model_folder / "model.safetensors").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 2, 3]


def test_a_run_may_end_before_its_first_step(tiny, tmp_path):
    class AtOnce:
        def on_evaluate(self, event):
            return Stop()

    result = train(tiny(*SHORT), callbacks=[AtOnce()])
    assert result.steps == 0
    assert result.evaluation is not None


class Fails:
    def on_step(self, event):
        if event.step == 2:
            return {}["nothing"]


def test_an_exception_ends_the_run_with_a_checkpoint_and_its_own_traceback(tiny, tmp_path, metrics):
    later = Asks(None)
    with pytest.raises(KeyError) as error:
        train(tiny(*SHORT), callbacks=[Fails(), later])
    assert traceback.extract_tb(error.tb)[-1].line == 'return {}["nothing"]'
    assert later.heard == [1]
    assert not (tmp_path / "run" / "model").exists()
    assert read_progress(tmp_path / "run" / "checkpoint-2").step == 2
    assert train(tiny(*SHORT, "training.resume_from_checkpoint=auto")).steps == 5
    assert metrics(tmp_path / "run", "step") == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_an_exception_at_the_last_evaluation_leaves_a_checkpoint(tiny, tmp_path):
    class FailsAtTheEnd:
        def on_evaluate(self, event):
            assert event.step < 5

    with pytest.raises(AssertionError):
        train(tiny(*SHORT), callbacks=[FailsAtTheEnd()])
    assert read_progress(tmp_path / "run" / "checkpoint-5").step == 5


@pytest.mark.parametrize("answer", [True, Stop, Stop(None)], ids=str)  # type: ignore[arg-type]
def test_an_answer_that_means_nothing_is_refused(tiny, tmp_path, answer):
    with pytest.raises(UserError, match=re.escape(f"which ends the run; got {answer!r}")):
        train(tiny(*SHORT), callbacks=[Asks(answer, step=1)])


@pytest.mark.filterwarnings("error")
def test_a_method_that_has_to_be_awaited_is_refused(tiny, tmp_path):
    class Waits:
        async def on_step(self, event):
            pass

    with pytest.raises(UserError, match=r"Waits.on_step must return None.*got <coroutine"):
        train(tiny(*SHORT), callbacks=[Waits()])
    gc.collect()  # a coroutine that was never awaited warns then


@pytest.mark.parametrize("callbacks", [Fails(), None, 5, iter([Fails()])], ids=lambda one: type(one).__name__)
def test_callbacks_are_a_list(tiny, tmp_path, callbacks):
    with pytest.raises(
        UserError, match=f"callbacks is a list of objects, got .* {type(callbacks).__name__}. Write"
    ):
        train_after_preflight(tiny("model=nowhere"), callbacks=callbacks)


@pytest.mark.parametrize(
    "callback,problem",
    [
        (
            type("Broken", (), {"on_step": 5})(),
            "A callback's on_step must be a method, got another value in Broken",
        ),
        (object(), "must have one of the methods on_step, on_evaluate, on_save; object has none"),
        (Listener, r"must be an object, got the class Listener. Pass Listener\(\)."),
        (TrainerCallback(), "TrainerCallback has on_epoch_begin, .*, which no run calls"),
    ],
)
def test_what_no_run_could_call_is_refused_before_anything_is_read(tiny, tmp_path, callback, problem):
    with pytest.raises(UserError, match=problem):
        train_after_preflight(tiny("model=nowhere"), callbacks=[callback])
    assert not (tmp_path / "run").exists()


TRAIN = """
import os, sys
from lowmem_ft import Stop
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train

kind, *settings = sys.argv[1:]

class InOne:
    def on_step(self, event):
        assert os.environ["RANK"] == "0"
        if event.step == 2 and kind == "stops":
            return Stop("Enough.")
        if event.step == 2:
            raise KeyError("mine")

result = train(load_recipe("tiny", settings), callbacks=[InOne()])
print(os.environ["RANK"], result.steps, result.stopped)
"""
OF_TWO = ("training.use_cpu=true", "distributed.strategy=ddp", *SHORT)


def test_all_processes_stop_where_the_main_one_is_asked_to(forks, tmp_path):
    done = forks.run_several(2, TRAIN, "stops", *OF_TWO, f"training.output_dir={tmp_path / 'run'}")
    assert [one.stdout.splitlines()[-1:] for one in done] == [["0 2 Enough."], ["1 2 None"]], done[1].stderr


@pytest.mark.slow
def test_an_exception_in_the_main_process_ends_all_of_them(forks, tmp_path):
    done = forks.run_several(2, TRAIN, "fails", *OF_TWO, f"training.output_dir={tmp_path / 'run'}")
    assert 'raise KeyError("mine")' in done[0].stderr or "KeyError: 'mine'" in done[0].stderr
    assert "OtherProcessError: Process 0 has failed" in done[1].stderr
    assert "KeyError: 'mine'" in done[1].stderr
    assert read_progress(tmp_path / "run" / "checkpoint-2").step == 2
