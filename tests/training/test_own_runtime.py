"""A runtime of another class takes the place of Accelerate's, from loading to saving, without a patch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.optimizers import OptimizerState, export_optimizer_state, import_optimizer_state
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.out_of_memory import diagnosis
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.runtimes import process_group
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.runtimes.values import Values

SHORT = ("training.max_steps=4", "training.save_steps=2", "training.eval_steps=2", "data.max_length=64")


class OwnFiles(RunFiles):
    """Files with the optimizer's state in one of their own, and the records of a tracker."""

    def __init__(self, ranks):
        super().__init__(ranks)
        self.logged = []

    def save_session(self, session, tokenizer, folder, identity):
        self.save_trained(session, tokenizer, folder)
        named_parameters = session.unwrapped_model.named_parameters()
        state = export_optimizer_state(session.optimizer, named_parameters)
        torch.save(dict(state.tensors), folder / "state.pt")
        return state.scalars

    def load_session(self, session, folder, optimizer_scalars):
        state = OptimizerState(tensors=torch.load(folder / "state.pt"), scalars=optimizer_scalars)
        named_parameters = session.unwrapped_model.named_parameters()
        import_optimizer_state(session.optimizer, named_parameters, state)

    def log(self, record):
        self.logged.append(record)


def plain_runtime() -> Runtime:
    """One process on a CPU, with files of its own."""
    runtime = Runtime.in_one_process(torch.device("cpu"))
    return dataclasses.replace(runtime, files=OwnFiles(runtime.ranks))


def test_a_run_on_another_runtime_is_the_same_run_and_goes_on_from_its_own_files(
    tiny, tmp_path, metrics, monkeypatch
):
    train(tiny(*SHORT, output_dir=tmp_path / "accelerate"))
    monkeypatch.delattr(process_group, "launched_runtime")
    runtime = plain_runtime()
    train(tiny(*SHORT, output_dir=tmp_path / "plain"), runtime=runtime)
    assert [record["step"] for record in runtime.files.logged if "eval_loss" in record] == [2, 4]
    checkpoint = tmp_path / "plain" / "checkpoint-2"
    assert (checkpoint / "state.pt").exists()
    assert not list(checkpoint.glob("optimizer*"))
    goes_on = f"training.resume_from_checkpoint={checkpoint}"
    train(tiny(*SHORT, goes_on, output_dir=tmp_path / "resumed"), runtime=plain_runtime())
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "accelerate")
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "accelerate")[2:]
    for run in ("plain", "resumed"):
        assert_same_model(tmp_path / run, tmp_path / "accelerate")


def assert_same_model(run, other):
    own, stock = (load_file(folder / "model" / "model.safetensors") for folder in (run, other))
    torch.testing.assert_close(own, stock, rtol=0, atol=0)


def test_memory_that_runs_out_while_loading_is_that_of_the_runtime(tiny, monkeypatch):
    class Full(Values):
        def load_model(self, *args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    runtime = plain_runtime()
    runtime.ranks.plan = ParallelPlan(num_processes=3)
    runtime = dataclasses.replace(runtime, values=Full(runtime.machine, runtime.ranks))
    known = {}
    refuse = diagnosis.does_not_fit
    monkeypatch.setattr(
        diagnosis,
        "does_not_fit",
        lambda *args, **told: known.update(told) or refuse(*args, **told),
    )
    with pytest.raises(DoesNotFitError, match="while the model was loaded"):
        train(tiny(*SHORT), runtime=runtime)
    assert known["num_processes"] == 3
