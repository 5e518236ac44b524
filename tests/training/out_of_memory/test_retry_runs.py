"""Runs whose memory runs out: they go on with a cut, which they keep, or say what there is to know."""

from __future__ import annotations

import json
import re
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.foundation import out_of_memory_errors
from lowmem_ft.foundation.errors import DoesNotFitError, Interrupted, UserError
from lowmem_ft.foundation.tensors.live_tensors import live_tensors
from lowmem_ft.foundation.units import GIB, MIB
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.checkpoints import run_checkpoints
from lowmem_ft.training.evaluation import held_out_loss
from lowmem_ft.training.folder.checkpoint_folders import read_progress
from lowmem_ft.training.folder.micro_batch_limit import MicroBatchLimit
from lowmem_ft.training.folder.replaced_run import allocator_file
from lowmem_ft.training.out_of_memory import diagnosis
from lowmem_ft.training.processes.gradient_averaging import ddp_takes
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes.accelerate_runtime import AccelerateRanks
from lowmem_ft.training.step.step import WindowPass

CUDA = torch.device("cuda:0")
SHORT = ("training.max_steps=6", "training.save_steps=2", "training.eval_steps=null", "data.eval_size=null")


NO_ROOM = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nmore")


def run_out_at(monkeypatch, step, meanwhile=lambda: None, error=NO_ROOM):
    """Let the backward of one step's second micro-batch find no memory, and something happen just then."""
    gradients, count = WindowPass.gradients, 0

    def failing(self):
        nonlocal count
        count += 1
        if count != step:
            return gradients(self)
        calls = 0

        def refuse(gradient):
            nonlocal calls
            calls += 1
            if calls == 2:
                meanwhile()
                raise error.with_traceback(None)

        with self.session.unwrapped_model.model.norm.weight.register_hook(refuse):
            return gradients(self)

    monkeypatch.setattr(WindowPass, "gradients", failing)


def test_a_run_whose_memory_ran_out_is_one_that_was_resumed_with_that_cut(
    tiny, metrics, tmp_path, monkeypatch, caplog
):
    run, resumed = tmp_path / "run", tmp_path / "resumed"
    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        run_out_at(patch, 5)
        train(tiny(*SHORT, output_dir=run))
    (warning,) = [record for record in caplog.records if "memory ran out" in record.message]
    assert "(CUDA out of memory. Tried to allocate 1.00 GiB.). Nothing is lost" in warning.message
    cut = read_progress(run / "checkpoint-6").cut
    assert cut.max_tokens is not None
    assert read_progress(run / "checkpoint-4").cut == MicroBatchLimit()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record.get("retries") for record in steps] == [None] * 4 + [1, None]
    assert [record.get("max_micro_batch_tokens") for record in steps] == [None] * 4 + [cut.max_tokens] * 2
    # The same run, resumed from the checkpoint before that step with its cut.
    shutil.copytree(run, resumed, ignore=shutil.ignore_patterns("model", "checkpoint-6"))
    set_cut(resumed / "checkpoint-4", cut.max_tokens)
    train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=resumed))
    for key in ("loss", "grad_norm"):
        assert metrics(resumed, key) == metrics(run, key)
    assert_same_model(run, resumed)


NOT_STARTED = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")


@pytest.mark.parametrize(
    "error", [NOT_STARTED, RuntimeError("Triton Error [CUDA]: out of memory")], ids=["cuBLAS", "Triton"]
)
def test_a_library_that_finds_no_room_lets_the_step_start_over(error, tiny, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(out_of_memory_errors, "_free_bytes", lambda: 30 * MIB)
    run_out_at(monkeypatch, 2, error=error)
    with caplog.at_level("WARNING"):
        train(tiny(*SHORT, "training.max_steps=2", "training.save_steps=null", output_dir=tmp_path / "run"))
    assert f"({error}). Nothing is lost: the step starts over" in caplog.text


def test_a_library_that_does_not_start_with_room_to_spare_is_broken(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(out_of_memory_errors, "_free_bytes", lambda: 12 * GIB)
    run_out_at(monkeypatch, 2, error=NOT_STARTED)
    with pytest.raises(
        UserError, match=r"could not start .*12\.0 GiB of the device are free.*nvidia-smi"
    ) as told:
        train(tiny(*SHORT, output_dir=tmp_path / "run"))
    assert not isinstance(told.value, DoesNotFitError)
    assert told.value.__cause__ is NOT_STARTED


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory):
    """A run whose memory ran out in its fifth step."""
    folder = tmp_path_factory.mktemp("cut") / "run"
    with pytest.MonkeyPatch.context() as patch:
        run_out_at(patch, 5)
        train(load_recipe("tiny", [*SHORT, "training.use_cpu=true", f"training.output_dir={folder}"]))
    return folder


def assert_goes_on_as(whole, folder, tiny, metrics):
    train(tiny(*SHORT, "training.resume_from_checkpoint=auto", output_dir=folder))
    for key in ("loss", "grad_norm"):
        assert metrics(folder, key) == metrics(whole, key)
    assert (
        read_progress(folder / "checkpoint-6").cut
        == read_progress(whole / "checkpoint-6").cut
        != MicroBatchLimit()
    )
    assert_same_model(whole, folder)


KILLED_IN_THE_SECOND_ATTEMPT = """
import os, signal, sys, torch
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.step.step import WindowPass

gradients, attempts = WindowPass.gradients, 0

def fail_then_die(self):
    global attempts
    attempts += 1

    def end(gradient):
        if attempts == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        if attempts == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    with self.session.unwrapped_model.model.norm.weight.register_hook(end):
        return gradients(self)

WindowPass.gradients = fail_then_die
train(load_recipe("tiny", sys.argv[1:]))
"""


def test_a_run_killed_while_a_step_starts_over_goes_on_bit_for_bit(
    tiny, metrics, forks, cut_run, tmp_path, monkeypatch
):
    """The cut is not in the checkpoint yet: memory runs out once more, and the step starts over once more."""
    killed = tmp_path / "killed"
    settings = (*SHORT, "training.use_cpu=true", f"training.output_dir={killed}")
    done = forks.run(KILLED_IN_THE_SECOND_ATTEMPT, *settings)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(metrics(killed)) == 4
    assert read_progress(killed / "checkpoint-4").cut == MicroBatchLimit()
    run_out_at(monkeypatch, 1)
    assert_goes_on_as(cut_run, killed, tiny, metrics)


def test_ctrl_c_as_a_step_starts_over_saves_it_with_its_cut(tiny, metrics, cut_run, tmp_path, monkeypatch):
    stopped = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        run_out_at(patch, 5, meanwhile=lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted) as stop:
            train(tiny(*SHORT, output_dir=stopped))
    assert stop.value.checkpoint == stopped / "checkpoint-5"
    assert_goes_on_as(cut_run, stopped, tiny, metrics)


def test_pieces_are_summed_in_float32_before_processes_share_gradients(tiny, tmp_path, monkeypatch):
    """``DistributedDataParallel`` refuses a gradient that is finer than its weight once it has wrapped the model."""
    one = ("model.dtype=bfloat16", "optimizer.master=split16", "training.gradient_accumulation_steps=1")
    run = tmp_path / "run"
    train(tiny(*SHORT, *one, "training.max_steps=2", output_dir=run))
    set_cut(run / "checkpoint-2", 64)
    wrapped = []
    prepare = AccelerateRanks.prepare

    def seen(self, model, optimizer):
        wrapped.append(ddp_takes(model))
        return prepare(self, model, optimizer)

    monkeypatch.setattr(AccelerateRanks, "prepare", seen)
    train(tiny(*SHORT, *one, "training.resume_from_checkpoint=auto", "training.max_steps=3", output_dir=run))
    assert wrapped == [False]


def set_cut(checkpoint, max_tokens):
    """Have a run go on from a checkpoint as if its memory had run out before."""
    manifest = checkpoint / "checkpoint.json"
    saved = json.loads(manifest.read_text())
    saved["progress"]["cut"]["max_tokens"] = max_tokens
    manifest.write_text(json.dumps(saved))


def assert_same_model(one, other):
    one, other = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_goes_on_with_its_cut(tiny, metrics, tmp_path, monkeypatch):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    for folder, steps in ((whole, "training.max_steps=6"), (stopped, "training.max_steps=4")):
        with monkeypatch.context() as patch:
            run_out_at(patch, 3)
            train(tiny(*SHORT, steps, "training.lr_scheduler_type=constant", output_dir=folder))
    go_on = ("training.lr_scheduler_type=constant", "training.resume_from_checkpoint=auto")
    train(tiny(*SHORT, *go_on, output_dir=stopped))
    assert metrics(stopped) == metrics(whole)


def test_a_checkpoint_from_before_there_were_cuts_has_none(tiny, tmp_path):
    train(tiny(*SHORT, "training.max_steps=2", output_dir=tmp_path / "run"))
    manifest = tmp_path / "run" / "checkpoint-2" / "checkpoint.json"
    saved = json.loads(manifest.read_text())
    del saved["progress"]["cut"]
    manifest.write_text(json.dumps(saved))
    assert read_progress(manifest.parent).cut == MicroBatchLimit()


def test_an_evaluation_cuts_its_own_batches(tiny, tmp_path, monkeypatch, caplog):
    settings = ("training.max_steps=2", "data.eval_size=8", "training.per_device_eval_batch_size=4")
    whole = train(tiny(*settings, output_dir=tmp_path / "whole"))
    forward, num_rows = held_out_loss.evaluation_loss, []

    def full(session, batches):
        for batch in batches:
            num_rows.append(len(batch.input_ids_BT))
            if len(batch.input_ids_BT) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(session, batches)

    monkeypatch.setattr(held_out_loss, "evaluation_loss", full)
    cut = train(tiny(*settings, output_dir=tmp_path / "cut"))
    assert num_rows.count(4) == 1
    assert cut.evaluation.num_label_tokens == whole.evaluation.num_label_tokens
    assert cut.evaluation.loss == pytest.approx(whole.evaluation.loss, rel=1e-6)
    assert cut.loss == whole.loss
    assert "evaluation, which continues with at most" in caplog.text
    assert "max_micro_batch_tokens" not in (tmp_path / "cut" / "metrics.jsonl").read_text()


def test_an_error_in_an_evaluation_of_single_rows_ends_the_run(tiny, tmp_path, monkeypatch):
    def full(session, batches):
        if list(batches):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(()), torch.zeros((), dtype=torch.int64)

    monkeypatch.setattr(held_out_loss, "evaluation_loss", full)
    settings = ("training.max_steps=2", "data.eval_size=2", "training.per_device_eval_batch_size=1")
    with pytest.raises(
        DoesNotFitError, match="in an evaluation, whose batch cannot be cut: it is a single row"
    ):
        train(tiny(*settings, output_dir=tmp_path / "run"))


def test_an_error_inside_an_update_ends_the_run_with_all_that_is_known(tiny, tmp_path, monkeypatch):
    def full(self, *_, **__):
        if self.state and next(iter(self.state.values()))["step"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return step(self)

    of_others = {id(tensor) for tensor in live_tensors()}  # tests before this one

    def own_tensors():
        return (tensor for tensor in live_tensors() if id(tensor) not in of_others)

    monkeypatch.setattr(diagnosis, "live_tensors", own_tensors)
    step = ChunkedOptimizer.step
    monkeypatch.setattr(ChunkedOptimizer, "step", full)
    with pytest.raises(DoesNotFitError) as raised:
        train(tiny(*SHORT, output_dir=tmp_path / "run"))
    message = str(raised.value)
    assert "after 3 steps" in message
    assert "inside an update of the weights" in message
    shown = message.partition("Largest tensors: ")[2].partition(").")[0]
    assert re.search(
        r"(gradient of |exp_avg of |; |^)model\.[\w.]+ \(float32 \[[\d, ]+\], [\d.]+ KiB", shown
    ), shown
    assert f"Resume the run from {tmp_path / 'run' / 'checkpoint-2'}" in message
    assert "cheapest first: " in message


def test_an_error_while_saving_is_told_apart(tiny, tmp_path, monkeypatch):
    def full(*_, **__):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(run_checkpoints, "save_checkpoint", full)
    with pytest.raises(DoesNotFitError, match="while the checkpoint of step 2 was saved") as raised:
        train(tiny(*SHORT, output_dir=tmp_path / "run"))
    assert "Resume the run from" not in str(raised.value)


def test_what_cudas_allocator_held_is_written_beside_the_run(tmp_path, cuda_driver):
    driver, file = cuda_driver(), tmp_path / allocator_file(0)
    driver.hold(allocated=7, reserved=9)
    driver.segments = [{"address": 1, "blocks": []}]
    said = diagnosis._with_allocator_state(file, CUDA)
    assert said == f"A snapshot of the allocator is in {file}."
    written = json.loads(file.read_text())
    assert written["stats"]["allocated_bytes.all.peak"] == 7
    assert written["segments"] == driver.segments


def test_a_full_disk_does_not_hide_that_memory_ran_out(tmp_path, cuda_driver):
    cuda_driver()
    said = diagnosis._with_allocator_state(tmp_path / "no folder" / allocator_file(0), CUDA)
    assert said.startswith("The allocator's snapshot could not be written to")


def test_a_run_for_the_cpu_is_not_told_of_the_gpu(tiny, cuda_driver):
    cuda_driver().hold(allocated=70 * GIB, reserved=70 * GIB)
    error = diagnosis.does_not_fit_here(tiny(), "while the model was loaded", None)
    assert "70.0 GiB" not in str(error)
