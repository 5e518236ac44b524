"""How long the rest of a run takes, by a clock that the test turns."""

from __future__ import annotations

import contextlib
import itertools

import pytest

from lowmem_ft.training.run.loop import train
from lowmem_ft.training.run.time_left import TimeLeft


class Run:
    """A run whose steps, evaluations and saves take as long as the test says."""

    def __init__(self, num_steps, step=0, **settings):
        self.now = 1000.0
        self.step = step
        every = {"eval_steps": None, "save_steps": None, "evaluates_at_end": False} | settings
        self.left = TimeLeft(num_steps=num_steps, step=step, clock=lambda: self.now, **every)

    def does(self, work, seconds):
        with self.left.during(work):
            self.now += seconds
        self.now += 0.01  # a line of a log

    def steps(self, *seconds):
        for each in seconds:
            self.does("step", each)


def test_nothing_is_said_before_a_step_was_timed():
    run = Run(10)
    assert run.left.seconds() is None
    run.steps(3)
    assert run.left.seconds() == pytest.approx(27)


@pytest.mark.parametrize("seconds", [0.1, 31, 400, 7200])
def test_steps_of_any_length_have_a_time_left(seconds):
    run = Run(10)
    run.steps(*[seconds] * 4)
    assert run.left.seconds() == pytest.approx(6 * seconds)


def test_the_first_step_of_a_process_counts_until_there_is_another():
    run = Run(100, step=90)
    run.steps(60)
    assert run.left.seconds() == pytest.approx(9 * 60)
    run.steps(2)
    assert run.left.seconds() == pytest.approx(8 * 2)
    run.steps(4)
    assert run.left.seconds() == pytest.approx(7 * 3)


def test_the_last_steps_count():
    run = Run(1000)
    run.steps(*[1] * 100, *[3] * 50)
    assert run.left.seconds() == pytest.approx(850 * 3)


def test_evaluations_and_saves_count_as_often_as_they_are_still_to_come():
    run = Run(20, eval_steps=5, save_steps=10, evaluates_at_end=True)
    run.steps(*[2] * 5)
    assert run.left.seconds() == pytest.approx(15 * 2)
    run.does("evaluation", 60)
    assert run.left.seconds() == pytest.approx(15 * 2 + 3 * 60)  # after 10, 15 and 20
    run.steps(*[2] * 5)
    assert run.left.seconds() == pytest.approx(10 * 2 + 3 * 60)  # that of 10 is still to come
    run.does("evaluation", 60)
    run.does("save", 30)
    assert run.left.seconds() == pytest.approx(10 * 2 + 2 * 60 + 30)
    run.steps(*[2] * 10)
    assert run.left.seconds() == pytest.approx(60 + 30)
    run.does("save", 30)
    assert run.left.seconds() == pytest.approx(60)
    run.does("evaluation", 60)
    assert run.left.seconds() == 0


def test_an_evaluation_does_not_make_it_leap():
    run = Run(1000, eval_steps=10, evaluates_at_end=True)
    said = []
    for step in range(1, 201):
        run.steps(1)
        said.append(run.left.seconds())
        if step % 10 == 0:
            run.does("evaluation", 30)
    after_the_first = said[10:]
    assert all(0.5 < before - after < 32 for before, after in itertools.pairwise(after_the_first))


def test_it_counts_down_within_a_step_and_not_below_what_comes_after():
    run = Run(10)
    run.steps(100, 100)
    with run.left.during("step"):
        run.now += 30
        assert run.left.seconds() == pytest.approx(770)
        run.now += 1000
        assert run.left.seconds() == pytest.approx(700)


def test_the_first_evaluation_takes_nothing_from_the_steps_time():
    run = Run(10, eval_steps=2, evaluates_at_end=True)
    run.steps(10, 10)
    with run.left.during("evaluation"):
        run.now += 25
        assert run.left.seconds() == pytest.approx(80)
    assert run.left.seconds() == pytest.approx(80 + 4 * 25)


def test_a_step_that_fails_is_not_counted():
    run = Run(10)
    run.steps(10, 10)
    with contextlib.suppress(MemoryError), run.left.during("step"):
        run.now += 999
        raise MemoryError
    assert run.left.seconds() == pytest.approx(80)


def test_a_run_that_is_at_its_end_has_nothing_left():
    assert Run(10, step=10).left.seconds() == 0


def test_a_run_has_its_steps_evaluations_and_saves_timed(tiny, tmp_path, monkeypatch):
    timed = []

    class Noted(TimeLeft):
        def during(self, work):
            timed.append(work)
            return super().during(work)

    monkeypatch.setattr("lowmem_ft.training.run.loop.TimeLeft", Noted)
    settings = ("training.max_steps=3", "training.eval_steps=2", "training.save_steps=3")
    train(tiny(*settings, output_dir=tmp_path / "run"))
    assert timed == ["step", "step", "evaluation", "step", "save", "evaluation"]
