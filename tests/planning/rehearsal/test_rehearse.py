"""A rehearsed run: all that a run does but its values, with the numbers of the estimate where the two meet."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_frames import call_in
from gpu_runs import budget_of_one_mib
from rich.console import Console
from torch import nn

from lowmem_ft.cli import main
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.planning.estimator import device_target, estimate_memory
from lowmem_ft.planning.rehearsal import seconds_by_tokens
from lowmem_ft.planning.rehearsal.records import _HostWaits
from lowmem_ft.planning.rehearsal.result import DISK_BYTES_PER_SECOND
from lowmem_ft.planning.rehearsal.runtime import _bytes_in_files
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.estimate_table import format_dollars
from lowmem_ft.reports.rehearsal_table import rehearsal_table
from lowmem_ft.training.run.loop import train
from lowmem_ft.virtual_gpu.calls.work import WorkLog
from lowmem_ft.virtual_gpu.device import registration

EVALUATED = ("data.eval_size=8", "training.eval_steps=1")
ALIKE = ("data.loss_on=all", "data.eval_size=null", "training.eval_steps=null")

STREAMED = (
    *("model.dtype=bfloat16", "accumulation.order=vertical", "optimizer.in_backward=true"),
    *("offload.parameters=stream", "offload.activations=inputs", "offload.optimizer=host"),
    *("optimizer.master=split24", "optimizer.state=8bit"),
)


@pytest.fixture(scope="module")
def whole(rehearse, recipe_in, tmp_path_factory):
    """The rehearsal of the whole tiny run, of which every checkpoint stays."""
    wanted = recipe_in(tmp_path_factory.mktemp("whole"), "training.save_total_limit=null")
    return rehearse(wanted, "rtx-4090")


@pytest.fixture(scope="module")
def streamed(rehearse, recipe_in, tmp_path_factory):
    """The rehearsal of two steps with streamed weights, and with a kernel of attention that is not installed here.

    These weights lie on the host while the loss is compared, where flash-attn has no kernel.
    """
    settings = (*ALIKE, *STREAMED, "model.attn_implementation=flash_attention_2")
    return rehearse(recipe_in(tmp_path_factory.mktemp("streamed"), *settings), "rtx-4090", steps=2)


def assert_it_takes_what_the_estimate_of_its_longest_rows_says(found):
    longest, wanted = found.longest, found.recipe
    data = dataclasses.replace(wanted.data, max_length=longest.shape.length)
    estimate = estimate_memory(dataclasses.replace(wanted, data=data), "rtx-4090")
    assert longest.is_exact
    assert longest.at_step == 1
    assert longest.peak_bytes == estimate.allocated_peak_bytes
    assert found.worst.allocated_peak_bytes >= longest.peak_bytes


@pytest.mark.parametrize(
    "settings, steps",
    [
        pytest.param((), None, id="two micro-batches", marks=pytest.mark.slow),
        pytest.param(
            ("training.gradient_accumulation_steps=1",), None, id="one micro-batch", marks=pytest.mark.slow
        ),
        pytest.param(("data.packing=true", "accumulation.order=vertical"), 2, id="packed, vertical"),
        pytest.param(STREAMED, None, id="streamed, all of it", marks=pytest.mark.slow),
    ],
)
def test_the_longest_window_takes_what_the_estimate_of_its_shape_says_to_the_byte(
    rehearse, settings, steps, recipe
):
    found = rehearse(recipe(*ALIKE, *settings), "rtx-4090", steps=steps)
    assert_it_takes_what_the_estimate_of_its_longest_rows_says(found)
    assert [told for told in found.estimate.choices if "lowmem_ft/" in told] == [], "lines of our own files"


def test_streamed_weights_and_flash_attn_take_what_the_estimate_of_the_longest_window_says(streamed):
    assert streamed.rehearsed_steps == 2
    assert_it_takes_what_the_estimate_of_its_longest_rows_says(streamed)


def test_seconds_of_rows_of_one_length_are_those_of_the_estimate(rehearse, small, chats):
    wanted = small("data.loss_on=all", f"data={chats([9] * 32)}", "training.max_steps=3")
    found = rehearse(wanted, "rtx-4090")
    length = found.longest.shape.length
    data = dataclasses.replace(wanted.data, max_length=length)
    estimate = estimate_memory(dataclasses.replace(wanted, data=data), "rtx-4090")
    assert estimate.step is not None
    assert found.estimate.step is not None
    # The estimate's clock runs from one update's end to the next one's.
    assert found.estimate.step.seconds == pytest.approx(estimate.step.seconds, rel=0.05)
    assert found.time.steps == pytest.approx(found.num_steps * found.estimate.step.seconds)
    assert found.rounding == 0


def test_it_is_the_run_that_train_makes(whole, recipe):
    """Steps, tokens, evaluations, checkpoints: those of a real run on a CPU with the same settings."""
    found = whole
    assert not Path(found.recipe.training.output_dir).exists()
    result = train(recipe("training.save_total_limit=null", "training.use_cpu=true"))
    records = [json.loads(line) for line in (result.output_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert found.num_steps == found.rehearsed_steps == result.steps
    assert found.tokens == steps[-1]["tokens"]
    assert found.num_evaluations == sum("eval_loss" in record for record in records)
    folders = sorted(result.output_dir.glob("checkpoint-*"), key=lambda folder: int(folder.name[11:]))
    assert [saved.at_step for saved in found.checkpoints] == [int(folder.name[11:]) for folder in folders]
    assert result.evaluation is not None

    def size(folder, pattern="*"):
        return sum(file.stat().st_size for file in folder.glob(pattern))

    last, model = found.checkpoints[-1], found.model
    assert model is not None
    # safetensors has a header beside the bytes of its tensors.
    assert 0 <= size(folders[-1], "model*.safetensors") - last.weight_bytes < 5_000
    assert 0 <= size(folders[-1], "optimizer-*.safetensors") - last.optimizer_bytes < 10_000
    assert 0 <= size(result.model_folder, "model*.safetensors") - model.weight_bytes < 5_000


@pytest.mark.slow
def test_a_run_that_keeps_its_best_is_rehearsed_to_its_last_step(rehearse, recipe):
    """With a checkpoint at each evaluation, as if each were better than the one before."""
    best = ("training.load_best_model_at_end=true", "training.early_stopping_patience=1")
    every = ("training.eval_steps=4", "training.save_steps=null", "training.save_total_limit=1")
    found = rehearse(recipe(*best, *every), "rtx-4090")
    assert found.rehearsed_steps == found.num_steps
    assert found.num_checkpoints == (found.num_steps - 1) // 4
    assert found.kept_checkpoints == 2
    assert found.model is not None


def test_early_stopping_with_all_its_keys_neither_ends_a_rehearsal_nor_is_refused(rehearse, small):
    early = ("training.early_stopping_patience=1", "training.early_stopping_threshold=0.5")
    settings = (*early, "training.metric_for_best_model=perplexity", *EVALUATED)
    found = rehearse(small(*settings), "rtx-4090", steps=3)
    assert (found.rehearsed_steps, found.recipe.training.early_stopping_patience) == (3, 1)


def test_an_adapters_run_reads_the_whole_base(rehearse, small, tmp_path):
    base = Path(small().model.name_or_path)
    stored = ("model.weights=pretrained", "model.dtype=bfloat16", "adapter.name=lora")
    found = rehearse(small(*stored), "rtx-4090", steps=1)
    model = found.estimate.model
    assert found.model is not None
    assert found.model.weight_bytes == 4 * model.trainable_parameters, "an adapter is saved"
    of_base = model.parameters - model.trainable_parameters
    assert found.time.loading * DISK_BYTES_PER_SECOND == pytest.approx(4 * of_base), "float32 in the files"
    assert base.is_dir()
    assert found.download_bytes == 0


def test_random_weights_are_read_from_nowhere(whole):
    assert whole.time.loading == 0


def test_a_model_of_the_hub_is_downloaded_first_and_the_report_says_for_how_much(whole):
    found = dataclasses.replace(whole, download_bytes=int(60e9))
    assert found.download_seconds == 480
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(rehearsal_table(found))
    words = " ".join(console.export_text().split())
    price = found.gpu.cheapest_price
    assert price is not None
    rent = format_dollars(price.usd_per_hour * 480 / 3600)
    assert f"not counted: the download of 55.9 GiB, unless the machine has them, 8 min, {rent}" in words


def test_weights_that_share_their_memory_are_one_in_the_files():
    model = nn.ModuleDict(
        {name: nn.Linear(4, 8, bias=False) for name in ("embedding", "head", "first", "second")}
    )
    embedding: Any = model["embedding"].weight
    model["head"].weight = nn.Parameter(embedding.detach())
    halves = torch.ones(2, 8, 4)
    model["first"].weight, model["second"].weight = map(nn.Parameter, halves)
    assert _bytes_in_files(model) == embedding.nbytes + halves.nbytes


def test_a_part_of_the_run_stands_for_all_of_it(rehearse, whole):
    part = rehearse(whole.recipe, "rtx-4090", steps=7)
    assert (part.num_steps, part.rehearsed_steps) == (whole.num_steps, 7)
    assert part.time.steps == pytest.approx(whole.time.steps, rel=0.1)
    assert part.tokens == pytest.approx(whole.tokens, rel=0.1)
    assert part.num_evaluations == whole.num_evaluations
    assert part.num_checkpoints == whole.num_checkpoints


def test_an_evaluation_of_several_sources_is_one(rehearse, small, chats, tmp_path):
    files = [chats([3, 3, 3, 3]).rename(tmp_path / "more.jsonl"), chats([3, 3, 3, 3])]
    settings = (f"data={','.join(map(str, files))}", "data.eval_size=2", "training.eval_generations=2")
    once = ("training.max_steps=2", "training.eval_steps=1", "training.max_new_tokens=2")
    found = rehearse(small(*settings, *once), "rtx-4090")
    assert found.num_evaluations == 2


def test_windows_of_other_lengths_are_traced_by_themselves_and_take_less(rehearse, small, chats):
    found = rehearse(small(f"data={chats([2] * 30 + [40] * 10)}"), "rtx-4090")
    lengths = {step.shape.length for step in found.steps}
    assert len(lengths) > 1
    assert found.longest.shape.length == max(lengths)
    peaks = [step.peak_bytes for step in found.steps]
    assert max(peaks) == found.longest.peak_bytes
    assert sum(step.times for step in found.steps) == 3 * 10  # epochs of ten micro-batches


def seconds_of(shapes):
    return sum(shape.times * shape.seconds for shape in shapes)


def assert_seconds_add_up(found):
    updates = found.num_steps * found.update_seconds
    assert seconds_of(found.steps) + updates == pytest.approx(found.time.steps)
    assert seconds_of(found.evaluations) == pytest.approx(found.time.evaluations)
    assert found.to_json()["run"]["update_seconds"] == found.update_seconds


def test_the_seconds_of_shapes_and_updates_add_up_to_the_runs(whole):
    assert_seconds_add_up(whole)
    assert whole.update_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("training.gradient_accumulation_steps=4", "accumulation.order=vertical"),
        ("optimizer.in_backward=true", "training.gradient_accumulation_steps=1"),
    ],
    ids=["vertical", "in backward"],
)
def test_seconds_add_up_where_updates_are_no_part_of_their_own(rehearse, recipe, chats, settings):
    assert_seconds_add_up(rehearse(recipe(*settings, f"data={chats([2, 40, 9, 17] * 10)}"), "rtx-4090"))


def test_it_says_where_the_host_waits(whole):
    waits = whole.steps[-1].waits
    files = {place.rpartition(":")[0] for place in waits}
    assert "lowmem_ft/training/step/outcome.py" in files  # is the step finite?
    assert not [place for place in waits if "estimator" in place or "torch/" in place]


@pytest.mark.parametrize(
    "between", [seconds_by_tokens, device_target, registration], ids=lambda m: m.__name__
)
def test_lines_that_stand_for_those_of_the_program_do_not_wait(between):
    work = WorkLog(Timeline())
    waits = _HostWaits(work)
    call_in(between)(work.on_host_wait, 2)
    [[place, times]] = waits.take().items()
    assert "test_rehearse.py:" in place
    assert times == 2


def test_fields_of_the_data_that_are_not_used_are_told(rehearse, small, tmp_path):
    file = tmp_path / "alpaca.jsonl"
    file.write_text('{"instruction": "Hi", "output": "Hello", "tools": [{"name": "look_up"}]}\n' * 8)
    found = rehearse(small(f"data={file}"), "rtx-4090", steps=1)
    assert any("8 of 8 (100.0%) have `tools`" in warning for warning in found.warnings)


def test_warnings_of_the_run_are_told_once(rehearse, small, chats):
    file = chats([3] * 20 + [4000] * 10)  # whose answers are cut
    log = logging.getLogger("lowmem_ft.training")
    steps = []

    def on_step(*step):
        steps.append(step)
        log.warning("Each step says so.")

    found = rehearse(small(f"data={file}"), "rtx-4090", steps=3, on_step=on_step)
    assert len(steps) > 1
    assert found.warnings.count("Each step says so.") == 1
    assert any("max_length" in warning for warning in found.warnings)


def test_a_gpu_without_our_kernels_is_warned_of_as_the_run_does(rehearse, small, caplog):
    wanted = small("training.max_steps=2", "loss.chunk_tokens=64")
    for _ in range(2):  # each rehearsal says so
        of_loss, of_update = rehearse(wanted, "t4", steps=1).warnings
        assert of_loss.startswith("The loss is computed by many small kernels")
        assert of_update.startswith("Weights are updated by many small kernels")
        assert all(
            one.endswith("it needs compute capability 8.0, cuda:0 has 7.5.") for one in (of_loss, of_update)
        )
    assert rehearse(wanted, "rtx-4090", steps=1).warnings == ()
    estimate_memory(wanted, "t4")
    assert "small kernels" not in caplog.text


def test_what_only_values_could_tell_is_no_warning(rehearse, small):
    found = rehearse(small("model.dtype=bfloat16", "optimizer.master=none"), "rtx-4090", steps=2)
    assert [warning.partition(" for ")[0] for warning in found.warnings] == ["No master weights"]


def test_a_run_goes_on_from_its_checkpoint(rehearse, small):
    train(small("training.use_cpu=true", "training.max_steps=7", "training.lr_scheduler_type=constant"))
    longer = small(
        "training.max_steps=10", "training.lr_scheduler_type=constant", "training.resume_from_checkpoint=auto"
    )
    found = rehearse(longer, "rtx-4090")
    assert found.rehearsed_steps == 3
    assert found.longest.at_step == 8
    assert [warning.partition(":")[0] for warning in found.warnings] == ["Resuming with other settings"]


def test_a_folder_in_the_way_is_told_and_left_alone(rehearse, small, tmp_path):
    train(small("training.use_cpu=true", "training.max_steps=2"))
    before = sorted((tmp_path / "run").rglob("*"))
    found = rehearse(small(), "rtx-4090", steps=2)
    assert any("holds another run" in warning for warning in found.warnings)
    assert sorted((tmp_path / "run").rglob("*")) == before


def test_memory_that_runs_out_is_told_with_step_and_data(rehearse, small, chats):
    wanted = small(f"data={chats([40] * 64)}", "training.per_device_train_batch_size=32")
    needs = rehearse(wanted, "rtx-4090", steps=1).estimate.process_peak_bytes
    small = dataclasses.replace(find_gpu("rtx-4090"), memory_bytes=needs - 2**22, held_by_others_bytes=0)
    found = rehearse(wanted, small)
    assert not found.fits
    failure = found.failure
    assert failure is not None
    assert failure.at_step == 1
    assert failure.shape == found.longest.shape
    assert len(failure.sample_ids) == 32


def test_races_are_found_in_a_rehearsal(rehearse, streamed, monkeypatch):
    assert streamed.estimate.races == ()
    monkeypatch.setattr(
        "lowmem_ft.virtual_gpu.device.streams.VirtualStream.wait_event", lambda self, event: None
    )
    monkeypatch.setattr(
        "lowmem_ft.virtual_gpu.device.streams.VirtualEvent.wait", lambda self, stream=None: None
    )
    assert rehearse(streamed.recipe, "rtx-4090", steps=1).to_json()["races"]


def test_the_command_keeps_it_for_the_report_of_the_run(small_settings, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    folder = Path("a run")
    settings = [
        "recipe=tiny",
        f"training.output_dir={folder}",
        "training.use_cpu=true",
        "training.max_steps=3",
        *small_settings,
    ]
    assert main(["rehearse", *settings, "--gpu", "rtx-4090"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "`lowmem-ft report 'a run'`" in " ".join(said.split())
    train(load_recipe("tiny", settings[1:]))
    assert main(["report", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "steps of the run" in shown
    assert "3 / 3" in shown
    assert "files of the model" in shown
    assert "ran on a CPU but was rehearsed for a GPU" in " ".join(shown.split())
    assert "real batches" not in shown
    assert "other settings" not in shown
    assert main(["report", str(folder), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["rehearsed"]["run"]["steps"] == run["steps"] == 3


def test_a_gpu_that_is_too_small_ends_the_command_with_3(small_settings, tmp_path, capsys):
    budget = budget_of_one_mib(find_gpu("rtx-4090"))
    settings = [f"training.output_dir={tmp_path / 'run'}", f"budget={budget}", *small_settings]
    assert main(["rehearse", "recipe=tiny", *settings, "--gpu", "rtx-4090", "--no-changes"]) == 3
    assert "Memory runs out while the model is loaded" in capsys.readouterr().out
