"""The line of questions: one at a time, newer ones first to count, an end for each."""

from __future__ import annotations

import threading

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.child_process import ChildFailedError
from lowmem_ft.ui import desk as desk_module
from lowmem_ft.ui.desk import Answer, Desk, Progress, SupersededError


class Process:
    """Answers in the test's own process; a question that is an event waits for it, or for the end of the process."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.closed = threading.Event()

    def call(self, _, function, *arguments, on_progress):
        on_progress("reading the settings")
        for argument in arguments:
            if isinstance(argument, threading.Event):
                while not argument.wait(0.01):
                    if self.closed.is_set():
                        raise ChildFailedError("it ended with exit code -9")
        return function(*arguments, on_progress=on_progress)

    def close(self):
        self.closed.set()


@pytest.fixture
def desk(monkeypatch):
    monkeypatch.setattr(desk_module, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(desk_module, "_TICK_SECONDS", 0.01)
    monkeypatch.setattr(Process, "made", 0)
    desk = Desk(make_process=Process)
    yield desk
    desk.close()


def double(number, on_progress):
    on_progress("doubling")
    return 2 * number


def fail(number, on_progress):
    raise UserError("The number is wrong.")


def wait_for(event, on_progress):
    return "waited"


def answer_of(events):
    *progress, last = events
    assert all(isinstance(event, Progress) for event in progress)
    assert isinstance(last, Answer)
    return last.value


def until_working(events):
    """Take progress until the process works."""
    return next(event for event in events if event.doing == "reading the settings")


def test_a_question_is_answered_once_and_then_remembered(desk):
    calls = []

    def count(number, on_progress):
        calls.append(number)
        return double(number, on_progress)

    assert answer_of(desk.ask("tab", "estimate", count, 3)) == 6
    assert answer_of(desk.ask("other tab", "estimate", count, 3)) == 6
    assert answer_of(desk.ask("tab", "estimate", count, 4)) == 8
    assert calls == [3, 4]
    assert Process.made == 1


def test_an_error_of_the_user_is_raised_and_the_process_stays(desk):
    with pytest.raises(UserError, match="The number is wrong"):
        list(desk.ask("tab", "estimate", fail, 1))
    assert answer_of(desk.ask("tab", "estimate", double, 1)) == 2
    assert Process.made == 1


def test_a_newer_question_of_the_same_part_drops_the_older(desk):
    never = threading.Event()
    older = desk.ask("tab", "estimate", wait_for, never)
    until_working(older)
    newer = desk.ask("tab", "estimate", double, 5)
    next(newer)
    with pytest.raises(SupersededError):
        list(older)
    assert answer_of(newer) == 10
    assert Process.made == 2


def test_the_same_question_twice_is_worked_on_once(desk):
    event = threading.Event()
    first = desk.ask("tab", "estimate", wait_for, event)
    until_working(first)
    with pytest.raises(SupersededError):
        next(desk.ask("tab", "estimate", wait_for, event))
    event.set()
    assert answer_of(first) == "waited"
    assert Process.made == 1


def test_another_tab_waits_and_is_told_so(desk):
    event = threading.Event()
    first = desk.ask("tab", "estimate", wait_for, event)
    until_working(first)
    second = desk.ask("other tab", "estimate", double, 5)
    assert next(second).doing == "waiting for 1 other question"
    event.set()
    assert answer_of(first) == "waited"
    assert answer_of(second) == 10
    assert Process.made == 1


def test_cancel_ends_the_questions_of_a_tab_alone(desk):
    event = threading.Event()
    first = desk.ask("tab", "estimate", wait_for, event)
    until_working(first)
    second = desk.ask("other tab", "plan", double, 5)
    next(second)
    desk.cancel("tab")
    with pytest.raises(SupersededError):
        list(first)
    assert answer_of(second) == 10


def test_a_closed_iterator_ends_the_work(desk):
    events = desk.ask("tab", "estimate", wait_for, threading.Event())
    until_working(events)
    events.close()
    assert answer_of(desk.ask("tab", "estimate", double, 5)) == 10
    assert Process.made == 2


def test_too_many_questions_are_refused(desk, monkeypatch):
    monkeypatch.setattr(desk_module, "MOST_WAITING", 2)
    waiting = [desk.ask(f"tab {number}", "estimate", wait_for, threading.Event()) for number in range(2)]
    until_working(waiting[0])
    next(waiting[1])
    with pytest.raises(UserError, match="at most 2 may wait"):
        next(desk.ask("third", "estimate", double, 1))
    for events in waiting:
        events.close()
    assert answer_of(desk.ask("third", "estimate", double, 1)) == 2


def test_an_answer_that_takes_too_long_ends(desk):
    desk._limit_seconds = 0.05
    with pytest.raises(UserError, match="may take at most 0 s"):
        list(desk.ask("tab", "estimate", wait_for, threading.Event()))
    desk._limit_seconds = 60.0
    assert answer_of(desk.ask("tab", "estimate", double, 1)) == 2


def test_a_process_that_fails_is_explained_and_replaced(desk):
    def end(number, on_progress):
        raise ChildFailedError("it ended with exit code -9")

    with pytest.raises(UserError, match="ended before it had an answer: it ended with exit code -9"):
        list(desk.ask("tab", "estimate", end, 1))
    assert answer_of(desk.ask("tab", "estimate", double, 1)) == 2
    assert Process.made == 2
