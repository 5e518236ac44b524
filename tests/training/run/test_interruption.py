"""A signal ends a run with everything saved, however it comes, and a second one ends it at once."""

from __future__ import annotations

import faulthandler
import json
import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest

from lowmem_ft.foundation.errors import Interrupted, UserError
from lowmem_ft.foundation.system import signals
from lowmem_ft.foundation.system.interrupts import Interruption
from lowmem_ft.training.callbacks.callbacks import FAIL
from lowmem_ft.training.checkpoints import run_checkpoints
from lowmem_ft.training.evaluation import run_evaluations
from lowmem_ft.training.run import health, loop
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes import reading_data
from lowmem_ft.training.runtimes.accelerate_runtime import AccelerateFiles, AccelerateRanks

SHORT = ("training.max_steps=6", "training.save_steps=null", "training.eval_steps=3")


def send(number):
    os.kill(os.getpid(), number)


def test_a_signal_that_a_launcher_passes_on_counts_once(monkeypatch):
    """The terminal sends Ctrl-C to all processes, and torchrun sends it to its own once more."""
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", float("inf"))  # however busy the machine is
    with Interruption() as run:
        send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGTERM)
    assert run.signal_number == signal.SIGINT


def test_a_second_signal_ends_the_process_at_once(monkeypatch):
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.0)
    with Interruption():
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_a_second_signal_ends_the_process_behind_a_handler_that_passes_signals_on(monkeypatch):
    """As libraries do that see signals first and call the handler that they have found."""
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with Interruption():
        found = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda number, frame: found(number, frame))
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_signal_says_what_there_is_to_go_on_from(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "ONE_REQUEST_SECONDS", 0.0)
    step, taken = loop.Retries.train_step, []

    def impatient(retries, window):
        taken.append(window)
        if len(taken) == 4:
            send(signal.SIGINT)
            send(signal.SIGINT)
        return step(retries, window)

    monkeypatch.setattr(loop.Retries, "train_step", impatient)
    settings = ("training.max_steps=6", "training.save_steps=2", "training.eval_steps=null")
    with pytest.raises(KeyboardInterrupt, match=r"at step 3\. Saved before: .*checkpoint-2; resume with "):
        train(tiny(*settings, output_dir=tmp_path / "run"))
    taken.clear()
    with pytest.raises(KeyboardInterrupt, match=r"at step 3: no checkpoint was saved\."):
        train(tiny(*settings, "training.save_steps=null", output_dir=tmp_path / "other"))


def test_the_handlers_are_put_back():
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
    before = [*map(signal.getsignal, numbers)]
    with Interruption() as run:
        assert all(signal.getsignal(number) == run._remember for number in numbers)
    assert [*map(signal.getsignal, numbers)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_an_ignored_signal_stays_ignored(number):
    """As SIGHUP is behind ``nohup``, and Ctrl-C in the background of a shell without job control."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interruption() as run:
            send(number)
        assert run.signal_number == 0
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_programs_own_handler_of_a_hang_up_or_a_user_signal_is_kept(number):
    """Such as submitit's, which queues the job again."""
    came = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        with Interruption() as run:
            send(number)
        assert (came, run.signal_number) == ([number], 0)
    finally:
        signal.signal(number, before)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of handlers in C")
def test_a_handler_in_c_of_a_user_signal_is_kept(tmp_path):
    """As of those who ask a process where it is."""
    with (tmp_path / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks)
        try:
            with Interruption() as run:
                send(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)
    assert "test_interruption.py" in (tmp_path / "stacks").read_text()
    assert run.signal_number == 0


IN_A_TERMINAL = """
import os, select, sys
from lowmem_ft.cli.commands.train import main
from lowmem_ft.data.batches.stream import DataStream

next_window, count = DataStream.next_window, 0
terminal = select.poll()
terminal.register(0, 0)

def third_window(self):
    global count
    count += 1
    if count == 3:
        os.write(2, b"the third step")
        terminal.poll()  # until it is gone
    return next_window(self)

DataStream.next_window = third_window
sys.exit(main(["recipe=tiny", "training.use_cpu=true", "training.eval_steps=null", "training.save_steps=null",
               "budget.preflight=false", "training.output_dir=" + sys.argv[1]]))
"""


def test_a_run_whose_terminal_is_gone_saves_and_stops(tmp_path):
    """As when the connection to a rented machine breaks."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "run")])
    shown = b""
    while b"the third step" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 129
    assert (tmp_path / "run" / "checkpoint-3" / "checkpoint.json").exists()


def test_a_signal_before_the_first_step_ends_the_process_at_once(tiny, tmp_path, monkeypatch):
    """There is nothing to save, and reading data or weights can take long."""
    monkeypatch.setattr(reading_data, "load_data", lambda *args, **kwargs: send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as stop:
        train(tiny(*SHORT, output_dir=tmp_path / "run"))
    assert stop.type is KeyboardInterrupt
    assert not (tmp_path / "run").exists()


def test_a_signal_while_the_finished_model_is_saved_lets_that_end(tiny, tmp_path, monkeypatch):
    save = loop.save_finished_model

    def interrupted(*args, **kwargs):
        send(signal.SIGTERM)
        save(*args, **kwargs)

    ended = []
    monkeypatch.setattr(AccelerateFiles, "end_trackers", lambda self: ended.append(self))
    monkeypatch.setattr(loop, "save_finished_model", interrupted)
    with pytest.raises(Interrupted) as stop:
        train(tiny(*SHORT, output_dir=tmp_path / "run"))
    assert (stop.value.exit_code, stop.value.checkpoint) == (143, None)
    assert stop.value.model_folder == tmp_path / "run" / "model"
    assert len(ended) == 1
    assert (stop.value.model_folder / "model.safetensors").exists()
    assert not list((tmp_path / "run").glob("checkpoint-*"))


def test_a_signal_at_the_end_hides_no_ruined_model(tiny, tmp_path, monkeypatch):
    def problems(*args):
        send(signal.SIGTERM)
        return ["Its weights are not finite."]

    monkeypatch.setattr(health.RunHealth, "problems_at_the_end", problems)
    with pytest.raises(UserError, match=r"do not use .* Its weights are not finite"):
        train(tiny(*SHORT, output_dir=tmp_path / "run"))


def test_a_signal_to_another_process_stops_this_one_too(tiny, tmp_path, monkeypatch):
    ended = []
    monkeypatch.setattr(AccelerateFiles, "end_trackers", lambda self: ended.append(self))
    largest = iter([0, 0, 0, 15 * (FAIL + 1)])  # asked before the first step, and once a step
    monkeypatch.setattr(
        AccelerateRanks,
        "max",
        lambda self, value: value if isinstance(value, bool) else next(largest, value),
    )
    with pytest.raises(Interrupted) as stop:
        train(tiny("training.eval_steps=null", "training.save_steps=null", output_dir=tmp_path / "run"))
    assert stop.value.exit_code == 143
    assert len(ended) == 1, "what trackers hold back would be lost"


def test_a_signal_says_what_to_go_on_from_even_if_no_step_was_taken(tiny, tmp_path, monkeypatch):
    settings = ("training.max_steps=6", "training.eval_steps=null", "training.save_steps=4")
    train(tiny(*settings, output_dir=tmp_path / "run"))
    from_start = ("training.max_steps=6", "training.eval_on_start=true", "training.eval_steps=4")
    monkeypatch.setattr(run_evaluations, "evaluate", lambda *args, **kwargs: send(signal.SIGTERM))
    with pytest.raises(Interrupted) as anew:
        train(tiny(*from_start, output_dir=tmp_path / "anew"))
    assert (anew.value.checkpoint, anew.value.model_folder) == (None, None)
    with pytest.raises(Interrupted) as further:
        train(tiny(*from_start, "training.resume_from_checkpoint=auto", output_dir=tmp_path / "run"))
    assert further.value.checkpoint == tmp_path / "run" / "checkpoint-4"


def test_a_loop_over_runs_that_goes_on_after_an_error_does_not_go_on_after_ctrl_c():
    assert not issubclass(Interrupted, Exception)
    assert "SIGINT" in str(Interrupted(signal.SIGINT, checkpoint=Path("runs/a/checkpoint-3")))
    assert "runs/a/checkpoint-3" in str(Interrupted(signal.SIGINT, checkpoint=Path("runs/a/checkpoint-3")))
    spaced = str(Interrupted(signal.SIGINT, checkpoint=Path("my runs/checkpoint-3")))
    assert "resume with 'training.resume_from_checkpoint=my runs/checkpoint-3'." in spaced


def test_a_step_is_not_saved_twice(tiny, tmp_path, monkeypatch):
    """Replacing the only checkpoint by itself would leave none for a moment."""
    saved, save = [], run_checkpoints.save_checkpoint

    def counted(*args):
        if not saved:
            send(signal.SIGTERM)
        saved.append(save(*args))
        return saved[-1]

    monkeypatch.setattr(run_checkpoints, "save_checkpoint", counted)
    with pytest.raises(Interrupted):
        train(tiny("training.save_steps=2", output_dir=tmp_path / "run"))
    assert [folder.name for folder in saved] == ["checkpoint-2"]


def test_an_evaluation_that_was_cut_short_is_made_when_the_run_goes_on(tiny, tmp_path, monkeypatch):
    from lowmem_ft.training.evaluation import held_out_loss

    def records(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        keys = ("step", "loss", "eval_loss", "learning_rate")
        records = [json.loads(line) for line in lines]
        return [{key: record.get(key) for key in keys} for record in records if "measured" not in record]

    train(tiny(*SHORT, output_dir=tmp_path / "whole"))
    forward = held_out_loss.evaluation_loss

    def interrupted(session, batches):
        send(signal.SIGTERM)
        return forward(session, batches)

    with monkeypatch.context() as patch:
        patch.setattr(held_out_loss, "evaluation_loss", interrupted)
        with pytest.raises(Interrupted) as stop:
            train(tiny(*SHORT, output_dir=tmp_path / "stopped"))
    assert stop.value.checkpoint == tmp_path / "stopped" / "checkpoint-3"  # which save_steps had not made
    assert stop.value.checkpoint.is_dir()
    train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=tmp_path / "stopped"))
    assert records(tmp_path / "stopped") == records(tmp_path / "whole")


def test_training_in_a_thread_works_without_signals(tiny, tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tiny(*SHORT, output_dir=tmp_path / "run"))))
    thread.start()
    thread.join()
    assert results[0].steps == 6
