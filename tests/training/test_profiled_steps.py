"""``training.profile_steps``: what is written, what it says, and that the run is the same without it."""

from __future__ import annotations

import gzip
import json
import signal
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import Interrupted, RecipeError, UserError
from lowmem_ft.monitoring.profiling.step_profile import SlowModule, StepProfile
from lowmem_ft.monitoring.profiling.step_profiler import StepProfiler
from lowmem_ft.training.folder.replaced_run import PROFILE_FILE, PROFILE_TABLE, PROFILE_TRACE
from lowmem_ft.training.run import profiled_steps
from lowmem_ft.training.run.advice import advice_of
from lowmem_ft.training.run.loop import TrainingRun, train

SHORT = (
    "training.max_steps=4",
    "training.save_steps=null",
    "training.eval_steps=null",
    "data.eval_size=null",
)
PROFILED = "training.profile_steps=[2, 3]"
LOWEST = (
    "checkpointing.mode=full",
    "accumulation.order=vertical",
    "optimizer.in_backward=true",
    "offload.optimizer=host",
    "offload.parameters=stream",
    "offload.activations=inputs",
)
RUNS = {
    "plain": ("checkpointing.mode=none", "loss.chunk_tokens=null", "training.per_device_train_batch_size=2"),
    "checkpointed": ("checkpointing.mode=full",),
    "lowest rung": LOWEST,
    "updates at once": (*LOWEST[:3], "training.max_grad_norm=null"),
}
OF_RUNTIME = {"backward", "clip_grad_norm", "fetch", "update_weights"}


class Useless(nn.Module):
    """Does much that changes nothing, then what another module does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        wasted = torch.ones(400, 400)
        for _ in range(40):
            wasted = wasted @ wasted * 1e-3
        return self.inner(hidden)


def profile_in(folder):
    return StepProfile.from_json(json.loads((folder / PROFILE_FILE).read_text()))


def put_on(run):
    """The hooks of modules and the methods of parts of the run that are there for a profile."""
    modules = run.session.unwrapped_model.modules()
    hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
    owners = (run.session.techniques, run.runtime.machine, run.stream, run.session.optimizer)
    methods = [{"next_window", "update", *OF_RUNTIME} & vars(owner).keys() for owner in owners]
    return any("ModuleRanges" in repr(hook) for hook in hooks), *methods


@pytest.mark.parametrize("name", RUNS)
def test_a_profiled_run_is_the_same_run(name, tiny, metrics, tmp_path):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    expected = train(tiny(*SHORT, *RUNS[name], output_dir=plain))
    run = TrainingRun.build(tiny(*SHORT, *RUNS[name], PROFILED, output_dir=profiled))
    seen, step = [], run.step
    run.step = lambda: (seen.append(put_on(run)), step())[1]
    result = run.train()
    seen.append(put_on(run))

    assert metrics(profiled) == metrics(plain)
    assert metrics(profiled, "grad_norm") == metrics(plain, "grad_norm")
    ours, theirs = (load_file(one.model_folder / "model.safetensors") for one in (result, expected))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    nothing = (False, set(), set(), set(), set())
    everything = (True, {"clip_grad_norm", "update_weights"}, OF_RUNTIME, {"next_window"}, {"update"})
    assert seen == [nothing, everything, everything, nothing, nothing]

    rows = profile_in(profiled).rows
    parts = {row.part for row in rows}
    assert {"data", "forward", "backward", "update"} <= parts
    assert ("recomputation" in parts) == (name != "plain")
    products = [row for row in rows if row.operator in ("mm", "addmm")]
    assert {row.part for row in products} == parts & {"forward", "recomputation", "backward"}
    of_layers = [row for row in products if row.module.endswith("mlp.down_proj") and row.part == "backward"]
    num_micro_batches = (
        sum(row.calls for row in products if "down_proj" in row.module and row.part == "forward") / 2
    )
    assert sum(row.calls for row in of_layers) == 2 * 2 * num_micro_batches, (
        "two products in each of two layers"
    )


def test_the_events_of_a_profile_are_freed_before_memory_is_given_back(tiny, tmp_path, monkeypatch):
    """Else the C library keeps their memory, of a larger model hundreds of MiB, for the rest of the run."""
    profilers, alive = [], []

    class Noted(StepProfiler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            profilers.append(weakref.ref(self))

    monkeypatch.setattr(profiled_steps, "StepProfiler", Noted)
    monkeypatch.setattr(
        profiled_steps, "return_free_memory", lambda: alive.extend(ref() for ref in profilers)
    )
    train(tiny(*SHORT, PROFILED, output_dir=tmp_path))
    assert alive == [None]


def test_a_slow_module_is_named_first_in_table_advice_and_report(tiny, tmp_path, capsys, caplog):
    folder = tmp_path / "run"
    run = TrainingRun.build(tiny(*SHORT, PROFILED, "budget.preflight=false", output_dir=folder))
    mlp = run.session.unwrapped_model.model.layers[1].mlp
    mlp.act_fn = Useless(mlp.act_fn)
    caplog.set_level("INFO", "lowmem_ft")
    run.train()

    slow, profile = "model.layers.1.mlp.act_fn", profile_in(folder)
    table = (folder / PROFILE_TABLE).read_text()
    _, by_operator, by_module = profile.sections()
    assert by_operator.rows[0][0].startswith("mm  ")
    assert by_operator.rows[0][0].endswith(slow)
    assert by_module.rows[0][0] == f"{slow} Useless"
    assert f"{slow} Useless" in table
    assert max(map(len, table.splitlines())) <= 80
    assert profile.advice[0].startswith(f"{slow} Useless takes ")
    assert "test_profiled_steps.py" in profile.advice[0]
    assert profile.advice[0] in caplog.text
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "steps 2 to 3" in shown
    assert f"{slow} Useless" in shown

    trace = json.loads(gzip.decompress((folder / PROFILE_TRACE).read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {"aten::mm", f"lowmem_ft module: {slow}", "lowmem_ft step"} <= names
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [one.get("profiled", False) for one in records if "loss" in one] == [False, True, True, False]
    (rates,) = ([one["tokens_per_second"] for one in records if "loss" in one],)
    assert f"{rates[3]:,.0f}" in shown, "the report's speed is that of steps that were not profiled"


def test_a_run_that_is_stopped_in_between_leaves_the_profile_of_the_steps_until_then(tiny, tmp_path):
    folder = tmp_path / "run"
    run = TrainingRun.build(tiny(*SHORT, PROFILED, "budget.preflight=false", output_dir=folder))
    step = run.step

    def and_stop():
        record = step()
        if record["step"] == 2:
            run.interruption.signal_number = signal.SIGTERM
        return record

    run.step = and_stop
    with pytest.raises(Interrupted):
        run.train()
    assert profile_in(folder).steps == (2, 2)
    assert not put_on(run)[0]


def test_steps_after_the_end_are_refused_and_done_ones_are_not(tiny, tmp_path):
    with pytest.raises(UserError, match=r"profile_steps=\[2, 3\].*ends with step 2.*max_steps=3"):
        train(tiny(*SHORT, PROFILED, "training.max_steps=2", output_dir=tmp_path / "short"))
    folder = tmp_path / "run"
    train(tiny(*SHORT, "training.save_steps=4", output_dir=folder))
    again = ("training.max_steps=5", "training.resume_from_checkpoint=auto")
    train(tiny(*SHORT, PROFILED, *again, output_dir=folder))
    assert not (folder / PROFILE_FILE).exists()


@pytest.mark.parametrize("steps", ["[0, 2]", "[3, 2]", "[1, 21]", "[1, 2, 3]", "5"])
def test_bad_steps_are_refused(steps, tiny):
    with pytest.raises(RecipeError, match=r"training\.profile_steps"):
        tiny(f"training.profile_steps={steps}")


def test_a_file_that_is_no_profile_is_told(tiny, tmp_path, capsys):
    folder = tmp_path / "run"
    train(tiny(*SHORT, "training.max_steps=1", "budget.preflight=false", output_dir=folder))
    (folder / PROFILE_FILE).write_text("{}")
    assert main(["report", str(folder)]) == 2
    assert "is not the profile of a run" in " ".join(capsys.readouterr().err.split())


def test_advice_is_a_few_sentences_the_largest_first(tiny):
    """On a machine that others load, many modules may be slow at once."""
    model = torch.nn.ModuleList(torch.nn.GELU() for _ in range(9))
    slow = tuple(
        SlowModule(module=str(index), seconds=float(index), others_seconds=0.5) for index in range(1, 9)
    )
    profile = StepProfile(
        steps=(1, 2),
        num_steps=2,
        step_seconds=40.0,
        device="cpu",
        busy_seconds=0.0,
        rows=(),
        classes={str(index): "GELU" for index in range(9)},
        slow=slow,
    )
    advice = advice_of(profile, tiny(), model)
    assert [sentence.partition(" ")[0] for sentence in advice] == ["8", "7", "6", "5", "4"]
