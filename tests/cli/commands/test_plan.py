from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from lowmem_ft.cli import main
from lowmem_ft.cli.answers import plan as plan_answer
from lowmem_ft.cli.commands import plan as cli_plan
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import DeviceLimit, MemoryEstimate, ModelSize, StepTime
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.device_target import limits
from lowmem_ft.planning.planner import plan_target
from lowmem_ft.recipe import load_recipe

KEEP = (
    "plan.keep=[model,training.mixed_precision,optimizer,offload,tiling,loss,accumulation,"
    "checkpointing.mlp_activation,checkpointing.skip_last_layers]"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=256, max_position_embeddings=4096, **sizes).save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Rows take 2 GiB each, half of that with checkpointing, which takes a third more time."""

    def estimate_memory(recipe, gpu, *, budget, kept=None) -> MemoryEstimate:
        rows, is_again = recipe.training.per_device_train_batch_size, recipe.checkpointing.mode != "none"
        peak = round((1 + rows * (1 if is_again else 2)) * GIB)
        allowed = limits(gpu, budget, recipe.distributed.plan().per_machine)
        return MemoryEstimate(
            model=ModelSize(name="tiny", parameters=10_000, trainable_parameters=10_000),
            gpu=DeviceLimit(name=gpu.name, memory_bytes=gpu.memory_bytes),
            allocated_peak_bytes=peak,
            reserved_peak_bytes=peak,
            process_peak_bytes=peak,
            host_peak_bytes=3 * GIB,
            host_pinned_bytes=0,
            by_category_at_peak={"activation": peak},
            by_phase={"backward": peak},
            peak_phase="backward",
            peak_module="",
            step=StepTime(
                seconds=(9 - rows / 4) * (1.3 if is_again else 1), tokens=32768, bound_by="compute"
            ),
            budget=allowed,
            fits=allowed.device_bytes is not None and peak <= allowed.device_bytes,
        )

    monkeypatch.setattr(plan_target, "estimate_memory", estimate_memory)


def test_a_plan_says_what_to_set_and_why(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", f"model={folder}", "model.weights=random", KEEP, "budget=10GiB", "--gpu", "l4"]) == 0
    printed = capsys.readouterr().out
    assert "tiny fits in 10.0 GiB of l4" in printed
    assert "training.per_device_train_batch_size=4" in printed
    assert "what keeps it from being" in printed
    assert " tokens/s, $" in printed
    assert "per 1M tokens at $0.71 an hour" in " ".join(printed.split())
    assert "device memory" in printed
    assert "Simpler settings that were rejected" in printed
    assert "too much for the device" in printed
    assert "Gains from more memory" in printed
    assert "combinations considered" in printed
    assert "No combination is left that could be better." in " ".join(printed.split())
    assert "lowmem-ft train" in printed
    assert "training.gradient_accumulation_steps=16" in printed  # of a model alone
    report, _, command = printed.partition("Train it:")
    assert max(map(len, report.splitlines())) <= 80
    assert all(line.endswith(" \\") for line in command.strip().splitlines()[:-1])


def test_the_command_it_prints_trains_the_plan(folder, capsys):
    rows = ["training.per_device_train_batch_size=1", "training.gradient_accumulation_steps=16"]
    arguments = ["recipe=tiny", f"model={folder}", KEEP, "budget=10GiB", "data.max_length=2048", *rows]
    main(["plan", *arguments, "--gpu", "l4", "--json", "-"])
    written = capsys.readouterr()
    values = json.loads(written.out)
    words = shlex.split(written.err.partition("lowmem-ft train ")[2].replace("\\\n", ""))
    assert len({word.partition("=")[0] for word in words}) == len(words)  # nothing is set twice
    assert words[0] == "recipe=tiny"
    recipe = load_recipe("tiny", words[1:])
    rows = values["chosen"]["overrides"]["training.per_device_train_batch_size"]
    assert recipe.training.per_device_train_batch_size == rows == 4
    assert recipe.training.gradient_accumulation_steps == 4


def test_a_plan_of_a_model_alone_says_what_trains_it(folder, tmp_path, capsys):
    """Train would plan it anew, and wants data."""
    file = tmp_path / "my.yaml"
    arguments = [f"model={folder}", "model.weights=random", KEEP, "budget=10GiB", "--gpu", "l4"]
    main(["plan", *arguments])
    assert "--write my.yaml, then: lowmem-ft train recipe=my.yaml data=YOUR_DATA" in said(capsys)
    main(["plan", *arguments, "--write", str(file)])
    assert f"lowmem-ft train recipe={file} data=YOUR_DATA" in said(capsys)
    assert file.read_text().startswith(f"# lowmem-ft train recipe={file} data=YOUR_DATA\n")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_written_plan_is_a_recipe(folder, tmp_path, capsys):
    file = tmp_path / "my[small].yaml"
    arguments = [f"model={folder}", "model.weights=random", KEEP, "budget=10GiB", "--gpu", "l4"]
    assert main(["plan", *arguments, "--write", str(file)]) == 0
    assert f"train 'recipe={file}'" in " ".join(capsys.readouterr().out.replace("\n", "").split())
    recipe = load_recipe(file)
    assert recipe.training.per_device_train_batch_size == 4
    assert recipe.plan.mode == "none"
    assert recipe.budget.device == "10GiB"
    for_what = "# Planned for l4 with 10.0 GiB of device memory and any amount of host memory; it takes "
    assert file.read_text().splitlines()[1].startswith(for_what)


@pytest.mark.parametrize(
    "asked, name",
    [
        (["budget=10 GiB", "--gpu", "l4"], "{model}-10-GiB-l4"),
        (["--gpu", "l4"], "{model}-l4"),
        (["budget=10GiB"], "{model}-10GiB"),
        (["budget=10GiB", "name=mine"], "mine"),
        (["recipe=tiny", "--gpu", "l4"], "tiny-l4"),
    ],
)
def test_a_written_plan_is_named_by_what_it_is_for_as_its_run_folder_will_be(
    folder, tmp_path, capsys, asked, name
):
    file = tmp_path / "my.yaml"
    assert main(["plan", f"model={folder}", "model.weights=random", KEEP, *asked, "--write", str(file)]) == 0
    assert load_recipe(file).name == name.format(model=Path(folder).name)


def test_where_nothing_fits_the_exit_code_says_so_and_nothing_is_written(folder, tmp_path, capsys):
    file = tmp_path / "my.yaml"
    arguments = [f"model={folder}", "model.weights=random", KEEP, "budget=1GiB", "--gpu", "l4"]
    assert main(["plan", *arguments, "--write", str(file)]) == 3
    printed = " ".join(capsys.readouterr().out.split())
    assert "tiny does not fit in 1.00 GiB of l4" in printed
    assert "1.13 GiB of device memory" in printed  # (1 + 1 GiB) / 0.94 less 1 GiB
    assert "The smallest GPU of the catalogue that would do: " in printed
    assert "plan.keep holds" in printed
    assert "is not written" in printed
    assert not file.exists()


def test_a_file_that_is_there_stays_unless_it_may_be_replaced(folder, tmp_path, capsys):
    plan, report, empty = tmp_path / "my.yaml", tmp_path / "plan.json", tmp_path / "empty.json"
    plan.write_text("name: mine")
    report.write_text("{}")
    empty.touch()  # as mktemp leaves it
    arguments = ["plan", f"model={folder}", "model.weights=random", KEEP, "budget=10GiB", "--gpu", "l4"]
    assert main([*arguments, "--write", str(plan), "--json", str(report)]) == 2
    told = capsys.readouterr().err
    for name, file in {"write": plan, "json": report}.items():
        assert (
            f"--{name} writes a new file, got {file}, which exists already. Name another, or add --over"
            in told
        )
    assert (plan.read_text(), report.read_text()) == ("name: mine", "{}")
    assert main([*arguments, "--json", str(empty)]) == 0
    assert json.loads(empty.read_text())["fits"]
    assert main([*arguments, "--write", str(plan), "--json", str(report), "--overwrite"]) == 0
    assert load_recipe(plan).budget.device == "10GiB"
    assert json.loads(report.read_text())["fits"]


def test_what_it_prints_for_copying_is_quoted(folder, tmp_path, capsys):
    file, data = tmp_path / "my plan [2].yaml", tmp_path / "my chats.jsonl"
    data.write_text('{"text": "a"}')
    arguments = ["recipe=tiny", f"model={folder}", f"data={data}", KEEP, "budget=10GiB", "--gpu", "l4"]
    assert main(["plan", *arguments]) == 0
    command = capsys.readouterr().out.partition("Train it:")[2]
    words = shlex.split(command.replace("\\\n", ""))
    assert words[:2] == ["lowmem-ft", "train"]
    assert {"recipe=tiny", f"data={data}", KEEP} <= {*words}
    assert f"'{KEEP}'" in command
    assert main(["plan", *arguments, "--write", str(file)]) == 0
    _, written = capsys.readouterr().out.split("Train it:")
    trains = ["lowmem-ft", "train", f"recipe={file}"]
    assert shlex.split(written) == trains
    assert shlex.split(file.read_text().splitlines()[0].removeprefix("# ")) == trains


def test_where_torch_finds_no_gpu_it_asks_for_one(folder, capsys, monkeypatch):
    """A driver may be there without one, as in a container of CUDA's."""
    monkeypatch.setattr(cli_plan, "may_have_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ["plan", f"model={folder}", "model.weights=random", KEEP]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    commands = [shlex.split(command) for command in told.split("`")[1::2]]
    assert ["lowmem-ft", *arguments, "--gpu", "rtx-4090"] in commands
    assert ["lowmem-ft", *arguments, "budget=24GiB"] in commands


def test_ctrl_c_shows_the_best_so_far(folder, capsys, monkeypatch):
    estimate, made = plan_target.estimate_memory, []

    def until_ctrl_c(recipe, gpu, *, budget, kept):
        if len(made) == 3:
            raise KeyboardInterrupt
        made.append(recipe)
        return estimate(recipe, gpu, budget=budget)

    monkeypatch.setattr(plan_target, "estimate_memory", until_ctrl_c)
    assert main(["plan", f"model={folder}", "model.weights=random", KEEP, "budget=9GiB", "--gpu", "l4"]) == 0
    assert "You ended the search." in " ".join(capsys.readouterr().out.split())


def test_on_80_columns_the_progress_says_how_to_end_it(folder, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(plan_answer, "progress_line", lambda doing: contextlib.nullcontext(said.append))
    assert main(["plan", f"model={folder}", "model.weights=random", KEEP, "budget=10GiB", "--gpu", "l4"]) == 0
    assert said
    for line in said:
        assert line.endswith("; Ctrl-C ends it")
        assert len(line) <= 70  # beside a spinner, and dots, and with larger numbers


def test_the_card_that_stands_for_a_budget_is_named_and_the_runs_length_is_told(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "plan.json"
    assert main(["plan", "recipe=tiny", KEEP, "budget=10GiB", "--json", str(file)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Device: rtx-3060, the cheapest GPU by the hour in the catalogue with budget.device=10GiB; --gpu NAME takes"
        in printed
    )
    assert re.search(r"The run: [\d,]+ steps, [\d,]+ tokens, .*\$", printed)
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told["run"].keys() == {"steps", "tokens", "seconds"}
    assert told["chosen"]["estimate"]["cost"]["usd_per_hour"] > 0


def test_data_that_cannot_be_read_costs_the_hours_and_not_the_plan(tmp_path, capsys):
    assert (
        main(["plan", "recipe=tiny", KEEP, f"data={tmp_path}/none.jsonl", "budget=10GiB", "--gpu", "l4"]) == 0
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "The length of the run is unknown: data.path names a file that does not exist" in printed
    assert "Device: " not in printed


def test_rows_and_epochs_give_hours_and_dollars_of_the_users_data(folder, capsys):
    """32,768 tokens a step are 16 rows of 2,048."""
    words = ["plan", f"model={folder}", "model.weights=random", KEEP, "budget=10GiB", "--gpu", "l4"]
    assert main([*words, "--rows", "1600", "--epochs", "3", "--json", "-"]) == 0
    seen = capsys.readouterr()
    estimate = json.loads(seen.out)["chosen"]["estimate"]
    run, speed = estimate["own_data"], estimate["step"]["tokens_per_second"]
    assert run["tokens"] == 1600 * 3 * 2048
    assert run["hours"] == pytest.approx(run["tokens"] / speed / 3600)
    assert run["usd"] == pytest.approx(find_gpu("l4").cheapest_price.usd_per_hour * run["hours"])
    assert "Your data: " in seen.err
    assert "1,600 rows of at most 2,048 tokens, 3 epochs" in " ".join(seen.err.split())
