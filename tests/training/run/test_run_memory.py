"""Every run ends with what was estimated beside what it took."""

from __future__ import annotations

import json

import pytest
import torch

from lowmem_ft import estimate_memory
from lowmem_ft.foundation.catalog.timed_steps import timed_steps, with_seconds_here
from lowmem_ft.foundation.errors import Interrupted
from lowmem_ft.foundation.memory.comparison import Peaks, compared, estimated_peaks
from lowmem_ft.foundation.system.phase_peaks import PhasePeaks
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator.run_host_memory import process_bytes_on_cpu
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.callbacks.callbacks import CONTINUE
from lowmem_ft.training.run import loop
from lowmem_ft.training.run.loop import train

SETTINGS = ("training.max_steps=2", "training.save_steps=1", "training.eval_steps=1")

RUNGS = [
    (),
    ("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit", "offload.optimizer=host"),
    ("adapter.name=lora",),
]


class Estimated:
    """A preflight that has its estimate; see :class:`lowmem_ft.training.run.preflight.Preflight`."""

    def __init__(self, estimate):
        self._estimate = estimate

    def begin(self, recipe, device):
        pass

    def finish(self, longest_row):
        return self._estimate

    def close(self):
        pass


def records(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line[key]) for line in lines if key in line]


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: " ".join(rung) or "tiny")
def test_what_stays_is_as_estimated_to_the_byte(tiny, tmp_path, rung):
    recipe = tiny(*SETTINGS, *rung)
    train(recipe, preflight=Estimated(estimate_memory(recipe, "cpu")))
    ((first, estimated),) = records(tmp_path / "run", "estimated")
    measured = records(tmp_path / "run", "measured")
    assert first == 0
    assert [step for step, _ in measured] == [1, 2], "with each checkpoint, and at the end"
    rows = {row.name: row for row in compared(Peaks.from_json(estimated), Peaks.from_json(measured[-1][1]))}
    assert rows["weights"].error == 0
    assert rows["optimizer state"].error == 0
    assert {"while loading", "in a step", "in evaluation", "while saving"} <= rows.keys()
    assert rows[
        "peak of the process"
    ].measured  # of all tests in this process, which is no figure to hold it to
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "| peak of the process | " in card
    assert "estimated before the run: " in card
    assert "while loading" not in card


def test_a_run_without_an_estimate_says_what_it_took(tiny, tmp_path):
    train(tiny(*SETTINGS))
    assert records(tmp_path / "run", "estimated") == []
    assert Peaks.from_json(records(tmp_path / "run", "measured")[-1][1]).peak_bytes > 0


def test_a_run_that_is_stopped_has_left_both(tiny, tmp_path, monkeypatch):
    recipe = tiny(*SETTINGS)
    monkeypatch.setattr(loop.TrainingRun, "_requested", lambda self: (15, CONTINUE))
    with pytest.raises(Interrupted):
        train(recipe, preflight=Estimated(estimate_memory(recipe, "cpu")))
    assert len(records(tmp_path / "run", "estimated")) == 1
    assert records(tmp_path / "run", "measured")[-1][0] == 1


def test_a_run_that_is_stopped_after_its_last_step_has_measured_it_once(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        loop.TrainingRun,
        "_requested",
        lambda self: (15 * (self.progress.step == self.num_steps), CONTINUE),
    )
    with pytest.raises(Interrupted):
        train(tiny(*SETTINGS))
    assert [step for step, _ in records(tmp_path / "run", "measured")] == [1, 2]


def test_a_finished_run_that_is_started_again_keeps_what_was_measured(tiny, tmp_path):
    again = ("training.resume_from_checkpoint=auto",)
    train(tiny(*SETTINGS), preflight=Estimated(estimate_memory(tiny(), "cpu")))
    before = records(tmp_path / "run", "measured")
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    train(tiny(*SETTINGS, *again))
    assert records(tmp_path / "run", "measured") == before
    assert "step" in before[-1][1]["by_phase"]
    assert (tmp_path / "run" / "model" / "README.md").read_text() == card


def test_a_run_that_takes_more_steps_has_measured_them(tiny, tmp_path):
    train(tiny(*SETTINGS))
    train(tiny(*SETTINGS, "training.max_steps=3", "training.resume_from_checkpoint=auto"))
    assert [step for step, _ in records(tmp_path / "run", "measured")] == [1, 2, 3]
    seconds = [value for _, value in records(tmp_path / "run", "seconds")]
    assert seconds == sorted(seconds), "those of the first process are part of the run's"


def test_no_phase_is_above_the_peak(monkeypatch):
    monkeypatch.setattr("lowmem_ft.foundation.system.phase_peaks.phase_peak_bytes", lambda device: 10**15)
    peaks = PhasePeaks(torch.device("cpu"))
    with peaks.during("step"):
        pass
    if peaks.by_phase:  # where the system tells phases apart
        assert peaks.peak_bytes == peaks.host_peak_bytes == peaks.by_phase["step"] == 10**15


def test_on_a_gpu_phases_are_of_tensors_alone():
    estimate = estimate_memory(load_recipe("tiny"), "t4")
    peaks = estimated_peaks(estimate)
    assert peaks.peak_bytes == estimate.allocated_peak_bytes == max(peaks.by_phase.values())
    assert peaks.by_phase["step"] == max(
        estimate.by_phase[phase] for phase in ("forward", "backward", "optimizer_step")
    )
    on_cpu = estimated_peaks(estimate_memory(load_recipe("tiny"), "cpu"))
    assert on_cpu.reserved_bytes is None
    assert on_cpu.by_phase["step"] > process_bytes_on_cpu(), "the process itself is in it"


PACKED = ("training.max_steps=3", "data.packing=true", "data.eval_size=null", "training.eval_steps=null")


def test_a_run_on_a_processor_gives_later_estimates_their_seconds(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    recipe, threads = tiny(*PACKED), torch.get_num_threads()
    before = with_seconds_here(estimate_memory(recipe, "cpu"), threads)
    assert before.step is None
    train(recipe, preflight=Estimated(before))
    after = with_seconds_here(estimate_memory(recipe, "cpu"), threads)
    (timed,) = timed_steps(threads)
    assert after.step.seconds == pytest.approx(timed.seconds)
    assert after.step.tokens == before.cpu_work.tokens


def test_a_killed_run_has_left_the_seconds_of_its_second_step(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    recipe, seen = tiny(*PACKED), []
    kept = lambda run: seen.append(len(timed_steps(torch.get_num_threads())))  # noqa: E731
    monkeypatch.setattr(loop.TrainingRun, "_stop_if_requested", kept)
    train(recipe, preflight=Estimated(estimate_memory(recipe, "cpu")))
    assert seen == [0, 1, 1]


def test_steps_of_rows_that_are_much_shorter_are_not_kept(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    recipe = tiny(*SETTINGS)  # chats of some 40 tokens, and rows of up to 128 estimated
    train(recipe, preflight=Estimated(estimate_memory(recipe, "cpu")))
    assert timed_steps(torch.get_num_threads()) == []
