from __future__ import annotations

import dataclasses
import errno
import io
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from processes import LIMIT_SECONDS
from rich.console import Console

from lowmem_ft.cli import main
from lowmem_ft.cli.estimating import estimate_model, estimate_recipe
from lowmem_ft.foundation.catalog import gpu_catalog
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu, Price
from lowmem_ft.foundation.errors import ModelError, RecipeError, UserError
from lowmem_ft.foundation.memory.memory_estimate import (
    BudgetVerdict,
    DeviceLimit,
    MemoryEstimate,
    ModelSize,
    StepTime,
)
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.packages import LEFT_OUT_VARIABLE, kernel_packages_left_out
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.fitting_shipped_recipe import ShippedRecipe
from lowmem_ft.planning.estimator.method_estimates import MethodEstimate
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.gpu_count import placements
from lowmem_ft.recipe.shipped.fine_tuning_methods import methods_with


def make_gpu(name: str, gib: int, usd_per_hour: float | None) -> Gpu:
    prices = (
        () if usd_per_hour is None else (Price(provider="x", usd_per_hour=usd_per_hour, date="", source=""),)
    )
    return dataclasses.replace(load_gpus()["rtx-4090"], name=name, memory_bytes=gib * GIB, prices=prices)


GPUS = {
    gpu.name: gpu
    for gpu in (
        make_gpu("big", 80, 2.0),
        make_gpu("old", 16, 0.2),
        make_gpu("small", 8, 0.1),
    )
}


class FakeEstimator:
    """Estimates of a run that needs 20 GiB; remembers what it was asked."""

    def __init__(self) -> None:
        self.needs_bytes = 20 * GIB
        self.recipes: list = []
        self.refusals: dict[str, UserError] = {}
        self.changes_help = True
        self.interrupted_after: int | None = None
        self.searched: list = []
        self.asked_of_models: list = []
        self.counts: list[int] = []
        self.method_problems: dict[str, tuple[str, ...]] = {}

    def estimate_memory(self, recipe, gpu=None, *, budget=None, kept=None) -> MemoryEstimate:
        self.recipes.append(recipe)
        gpu = find_gpu(gpu) if isinstance(gpu, str) and gpu != "cpu" else None if gpu == "cpu" else gpu
        memory_bytes = gpu.memory_bytes if gpu else 0
        return MemoryEstimate(
            model=ModelSize(name="a-model", parameters=1000, trainable_parameters=1000),
            gpu=DeviceLimit(name=gpu.name if gpu else "cpu (x86_64)", memory_bytes=memory_bytes),
            allocated_peak_bytes=self.needs_bytes,
            reserved_peak_bytes=self.needs_bytes,
            process_peak_bytes=self.needs_bytes,
            host_peak_bytes=GIB,
            host_pinned_bytes=0,
            by_category_at_peak={"parameter": self.needs_bytes},
            by_phase={"load": self.needs_bytes},
            peak_phase="load",
            peak_module="",
            step=StepTime(seconds=1.0, tokens=100, bound_by="compute") if gpu else None,
            budget=BudgetVerdict(device_bytes=memory_bytes or None, host_bytes=None),
            fits=gpu is None or self.needs_bytes <= memory_bytes,
            timeline=Timeline(),
        )

    def estimate_on_gpus(self, recipe, gpus, *, budget=None, kept=None) -> list:
        if len(self.refusals) == len(gpus):
            raise self.refusals[gpus[0].name]
        return [
            types.SimpleNamespace(gpu=gpu, problems=self.refusals[gpu.name].problems)
            if gpu.name in self.refusals
            else self.estimate_memory(recipe, gpu)
            for gpu in gpus
        ]

    def estimate_methods(
        self, model, gpus, *, settings=(), count=1, is_thorough=True, kept=None, on_start=None
    ) -> list[MethodEstimate]:
        self.asked_of_models.append((model, [*settings], [gpu.name for gpu in gpus], is_thorough))
        self.counts.append(count)
        results = []
        for method, placement, gpu in itertools.product(methods_with(settings), placements(count), gpus):
            name = method.name if placement.engine is None else f"{method.name}, {placement.engine}"
            problems = self.method_problems.get(name, ())
            command = (f"recipe={method.rungs[-1]}", f"model={model}", *settings, *placement.settings)
            found = None if problems else self.estimate_memory(None, gpu)
            results.append(
                MethodEstimate(
                    method=method,
                    gpu=gpu,
                    placement=placement,
                    command=command,
                    estimate=found,
                    problems=problems,
                )
            )
        return results

    def estimate_changed(self, recipe, gpu=None, *, budget=None, kept=None) -> MemoryEstimate:
        """What the search asks: each change alone makes it fit, or none does."""
        if len(self.searched) == self.interrupted_after:
            raise KeyboardInterrupt
        self.searched.append(gpu)
        plain = self.estimate_memory(recipe, gpu)
        return (
            dataclasses.replace(plain, process_peak_bytes=7 * GIB, fits=True) if self.changes_help else plain
        )


@pytest.fixture
def estimator(monkeypatch: pytest.MonkeyPatch):
    fake = FakeEstimator()
    for asked in ("estimate_memory", "estimate_on_gpus"):
        monkeypatch.setattr(estimate_recipe, asked, getattr(fake, asked))
    monkeypatch.setattr(estimate_model, "estimate_methods", fake.estimate_methods)
    monkeypatch.setattr("lowmem_ft.planning.estimator.changes.estimate_memory", fake.estimate_changed)
    for place in (gpu_catalog, estimate_recipe, estimate_model):
        monkeypatch.setattr(place, "load_gpus", lambda: GPUS)
    monkeypatch.setattr("lowmem_ft.recipe.checks.path_checks.require_within_reach", lambda config: None)
    logger = logging.getLogger("lowmem_ft")
    level = logger.level
    yield fake
    logger.setLevel(level)


def estimate(*arguments: str) -> int:
    return main(["estimate", *arguments])


def test_a_run_that_fits_is_reported_and_exits_with_0(estimator, capsys):
    assert estimate("recipe=tiny", "--gpu", "big", "training.seed=3") == 0
    seen = capsys.readouterr()
    assert seen.out.startswith(
        "a-model fits on big with 60.0 GiB to spare, and needs 1.00 GiB of host memory\n"
    )
    assert "at $2.00 an hour (x, )" in seen.out
    assert seen.err == ""
    assert estimator.recipes == [load_recipe("tiny", ["training.seed=3"])]


def test_packages_are_left_out_where_that_is_asked_for(estimator, monkeypatch):
    monkeypatch.setenv(LEFT_OUT_VARIABLE, "")
    assert estimate("recipe=tiny", "--gpu", "big") == 0
    assert not kernel_packages_left_out()
    assert estimate("recipe=tiny", "--gpu", "big", "--without-packages") == 0
    assert kernel_packages_left_out()


def test_a_model_with_settings_is_estimated_by_each_method_with_them(estimator, capsys):
    """As one recipe of defaults it had float32 weights without checkpointing, and nobody was told."""
    assert estimate("model=some/model", "data.max_length=4096", "adapter.r=4", "--gpu", "big") == 0
    assert estimator.asked_of_models == [
        ("some/model", ["data.max_length=4096", "adapter.r=4"], ["big"], True)
    ]
    assert estimate("model=some/model", "adapter.name=lora", "budget=4GiB", "--gpu", "small") == 3
    assert estimator.asked_of_models[1][1] == ["adapter.name=lora", "budget=4GiB"]
    shown = capsys.readouterr().out
    by = "recipe=7b-lora model=some/model adapter.name=lora budget=4GiB"
    assert f"\n  lowmem-ft plan {by} --gpu small\n" in shown
    assert "See other GPUs with --gpu all." in shown
    assert estimate("model=some/model", "checkpointing.mode=auto", "--gpu", "big", "--changes") == 2
    said = capsys.readouterr().err
    assert "checkpointing.mode=auto needs a recipe" in said
    assert "--changes needs a recipe" in said


def test_several_gpus_have_a_row_an_engine_and_the_line_that_starts_it(estimator, capsys):
    estimator.method_problems = {"lora, ddp": ("Each process of ddp holds all weights.",)}
    settings = ("model=some/model", "model.quantization=none", "adapter.r=4")
    assert estimate(*settings, "--gpu", "4xbig", "--json", "-") == 0
    assert estimator.counts == [4]
    said = capsys.readouterr()
    text, report = " ".join(said.err.split()), json.loads(said.out)
    assert "a-model on 4 x big: LoRA" in text
    assert "LoRA, ddp cannot run" in text
    assert "LoRA, ddp is not estimated: Each process of ddp holds all weights." in text
    assert "--gpu 4xbig shows it in detail" in text
    (one,), (other,) = report["estimates"], report["cannot_run"]
    assert one["train"][:5] == ["torchrun", "--standalone", "--nproc_per_node=4", "-m", "lowmem_ft"]
    assert one["train"][5:] == ["train", *one["settings"]]
    assert "distributed.strategy=fsdp2" in one["settings"]
    assert (other["strategy"], other["num_processes"]) == ("ddp", 4)


@pytest.mark.parametrize(
    "words, said",
    [
        (["--gpu", "2xnonsense"], "There is no GPU 'nonsense'"),
        (["--gpu", "0xbig"], "a whole number of GPUs before the x"),
        (["--gpu", "2xbig", "distributed.num_processes=4"], "num_processes=4, but 2xbig is 2 GPUs"),
        (["--gpu", "2xbig", "distributed.strategy=zero3"], "DeepSpeed's engine, which cannot be traced"),
        (
            ["--gpu", "big", "distributed.strategy=ddp"],
            "is for several processes, and their number is not set",
        ),
        (["--gpu", "3xbig", "distributed.num_machines=2"], "must have the same number of GPUs each"),
    ],
)
def test_several_gpus_that_contradict_the_settings_are_refused_in_a_line(estimator, capsys, words, said):
    assert estimate("model=some/model", *words) == 2
    assert said in capsys.readouterr().err
    assert estimator.asked_of_models == []


def test_defaults_are_told_of_on_the_processor(estimator, capsys):
    assert estimate("model=some/model", "training.seed=3", "--gpu", "cpu") == 0
    assert estimator.recipes[0].model.name_or_path == "some/model"
    assert estimator.recipes[0].data.path is None
    assert "float32 weights without checkpointing" in " ".join(capsys.readouterr().out.split())
    assert estimate("recipe=tiny", "--gpu", "cpu") == 0
    assert "float32 weights without" not in " ".join(capsys.readouterr().out.split())


def test_a_model_alone_is_estimated_by_each_method(estimator, capsys):
    assert estimate("model=some/model", "budget.host=64GiB", "--gpu", "big") == 0
    assert estimator.asked_of_models == [("some/model", ["budget.host=64GiB"], ["big"], True)]
    out = capsys.readouterr().out
    assert out.startswith("a-model on big: full fine-tuning, LoRA, QLoRA\n")
    assert out.count("60.0 GiB free") == 3


def test_a_model_alone_on_all_gpus(estimator, capsys):
    assert estimate("model=some/model", "--gpu", "all", "--json", "-") == 0
    seen = capsys.readouterr()
    assert "Where a token is cheapest:" in seen.err
    report = json.loads(seen.out)
    assert report["schema"] == 1
    assert [(one["method"], one["gpu"]["name"]) for one in report["estimates"]] == [
        (method, gpu) for method in ("full", "lora", "qlora") for gpu in GPUS
    ]
    assert report["estimates"][0]["cost"] == {
        "usd_per_hour": 2.0,
        "usd_per_million_tokens": pytest.approx(2.0 / 3600 / 100 * 1e6),
        "provider": "x",
        "date": "",
    }
    assert report["estimates"][1]["cost"]["usd_per_million_tokens"] is None  # it does not fit there
    assert report["estimates"][0]["recipe"] == "8b-8gb"
    assert report["estimates"][0]["settings"] == ["recipe=8b-8gb", "model=some/model"]
    plain = estimator.estimate_memory(None, next(iter(GPUS.values()))).to_json()
    assert plain.items() <= report["estimates"][0].items()
    assert report["cannot_run"] == []
    assert estimator.asked_of_models[0][3] is False  # float32 streaming is for who asks by name


def test_rows_and_epochs_give_hours_and_dollars_of_the_users_data(estimator, capsys):
    """A step of the recipe is 100 tokens a second; an hour on this GPU is 2 dollars."""
    assert estimate("recipe=tiny", "--gpu", "big", "--rows", "3600", "--epochs", "2", "--json", "-") == 0
    seen = capsys.readouterr()
    training = load_recipe("tiny").training
    row_tokens = 100 // (training.per_device_train_batch_size * training.gradient_accumulation_steps)
    run = json.loads(seen.out)["own_data"]
    assert run["tokens"] == 7200 * row_tokens
    assert run["hours"] == pytest.approx(run["tokens"] / 100 / 3600)
    assert run["usd"] == pytest.approx(2 * run["hours"])
    assert f"3,600 rows of at most {row_tokens} tokens, 2 epochs" in " ".join(seen.err.split())
    assert estimate("recipe=tiny", "--gpu", "all", "--rows", "3600") == 0
    assert "hours and $: of 3,600 rows" in " ".join(capsys.readouterr().out.split())
    assert estimate("recipe=tiny", "--gpu", "cpu", "--rows", "3600") == 0
    assert "hours are unknown" in " ".join(capsys.readouterr().out.split())


def test_a_model_alone_that_fits_nowhere_exits_with_3_and_starts_no_search(estimator, capsys):
    estimator.needs_bytes = 100 * GIB
    assert estimate("model=some/model", "--gpu", "all") == 3
    shown = capsys.readouterr().out
    assert "fits on no GPU" in shown
    assert "\n  lowmem-ft plan recipe=8b-8gb model=some/model --gpu big\n" in shown
    assert estimator.searched == []


def test_methods_that_cannot_run_say_why_and_if_none_can_it_is_an_error(estimator, capsys):
    estimator.method_problems = {"full": ("No streaming here.",)}
    assert estimate("model=some/model", "--gpu", "big", "--json", "-") == 0
    cannot = json.loads(capsys.readouterr().out)["cannot_run"]
    assert cannot == [{"method": "full", "gpu": "big", "reason": "No streaming here."}]
    estimator.method_problems = dict.fromkeys(("full", "lora", "qlora"), ("There is no such model.",))
    assert estimate("model=some/model", "--gpu", "big") == 2
    assert capsys.readouterr().err == "error: There is no such model.\n"


def test_a_run_that_does_not_fit_exits_with_3_and_three_changes(estimator, capsys):
    assert estimate("recipe=tiny", "--gpu", "small") == 3
    out = capsys.readouterr().out
    assert out.startswith("a-model does not fit on small: 12.0 GiB over\n")
    changes = out[out.index("Cheapest changes that make it fit on small:") :]
    assert changes.count("peak 7.00 GiB  ") == 3
    assert "--gpu all" not in out
    assert set(estimator.searched) == {"small"}


def test_a_shipped_recipe_that_fits_is_told_before_the_search_for_changes(estimator, capsys, monkeypatch):
    def fits(recipe, gpu, *, kept, outlook):
        settings = ("recipe=1b-fp16-t4", "model=my models/x")
        return ShippedRecipe(
            settings=settings, trains="adapters alone", estimate=estimator.estimate_memory(recipe, gpu)
        )

    monkeypatch.setattr(estimate_recipe, "shipped_recipe_that_fits", fits)
    assert estimate("recipe=tiny", "--gpu", "small") == 3
    out = capsys.readouterr().out
    assert "A shipped recipe fits on small, with its own rows and steps" in " ".join(out.split())
    assert "and trains adapters alone:" in " ".join(out.split())
    shipped, _, changes = out.partition("\n  lowmem-ft train recipe=1b-fp16-t4 'model=my models/x'\n")
    assert "Cheapest changes" in changes
    assert "Cheapest changes" not in shipped
    assert estimate("recipe=tiny", "--gpu", "small", "--json", "-", "--changes") == 3
    shipped = json.loads(capsys.readouterr().out)["shipped_recipe"]
    assert shipped["settings"] == ["recipe=1b-fp16-t4", "model=my models/x"]


def test_where_no_change_helps_other_gpus_are_pointed_at(estimator, capsys):
    estimator.changes_help = False
    assert estimate("recipe=tiny", "--gpu", "small") == 3
    plan = "  lowmem-ft plan recipe=tiny --gpu small\n"
    assert capsys.readouterr().out.endswith(f"{plan}See other GPUs with --gpu all.\n")
    estimator.needs_bytes = 100 * GIB
    assert estimate("recipe=tiny", "--gpu", "all") == 3
    assert "See other GPUs" not in capsys.readouterr().out


def test_without_a_gpu_the_cpu_is_estimated_and_the_way_to_gpus_is_shown(estimator, capsys):
    assert estimate("recipe=tiny") == 0
    out = capsys.readouterr().out
    assert re.match(r"a-model needs \d\S* [MG]iB on cpu \(x86_64\)\n", out), "no limit to fit in"
    assert out.endswith("See GPUs with --gpu NAME or --gpu all.\n")
    assert estimate("recipe=1b-fp16-t4", "training.mixed_precision=no", "budget.host=64GiB") == 0
    assert capsys.readouterr().out.endswith("\n1b-fp16-t4 is made for --gpu t4.\n")


def test_json_on_stdout_stands_there_alone(estimator, capsys):
    assert estimate("recipe=tiny", "--gpu", "small", "--json", "-") == 3
    seen = capsys.readouterr()
    cost = {"usd_per_hour": 0.1, "usd_per_million_tokens": None, "provider": "x", "date": ""}
    plain = estimator.estimate_memory(None, GPUS["small"]).to_json()
    assert json.loads(seen.out) == {**plain, "cost": cost}
    assert "does not fit on small" in seen.err


def test_a_script_waits_for_no_search_that_it_has_not_asked_for(estimator, capsys, tmp_path):
    for file in ("-", str(tmp_path / "estimate.json")):
        assert estimate("recipe=tiny", "--gpu", "small", "--json", file) == 3
        seen = capsys.readouterr()
        assert "With --changes: search for the cheapest changes" in seen.out + seen.err
    assert estimator.searched == []
    assert estimate("recipe=tiny", "--gpu", "small", "--no-changes") == 3
    assert "Cheapest changes" not in capsys.readouterr().out
    assert estimator.searched == []


def test_changes_that_are_asked_for_stand_in_the_json(estimator, capsys):
    assert estimate("recipe=tiny", "--gpu", "small", "--json", "-", "--changes") == 3
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes["complete"] is True
    assert len(changes["fitting"]) == 3
    assert changes["fitting"][0]["device"]["process_peak_bytes"] == 7 * GIB
    assert all("=" in setting for one in changes["fitting"] for setting in one["overrides"])
    assert estimate("recipe=tiny", "--gpu", "big", "--json", "-", "--changes") == 0
    assert json.loads(capsys.readouterr().out)["changes"] is None


@pytest.mark.parametrize("after,kept", [(0, 0), (2, 2)])
def test_ctrl_c_ends_the_search_and_keeps_the_verdict_and_what_was_found(estimator, capsys, after, kept):
    estimator.interrupted_after = after
    assert estimate("recipe=tiny", "--gpu", "small", "--json", "-", "--changes") == 3
    seen = capsys.readouterr()
    changes = json.loads(seen.out)["changes"]
    assert (len(changes["fitting"]), changes["complete"]) == (kept, False)
    assert "does not fit on small" in seen.err
    assert "The search was stopped" in seen.err
    assert "No change makes it fit" not in seen.err


def test_ctrl_c_before_the_first_estimate_of_the_search_keeps_the_verdict(estimator, capsys, monkeypatch):
    def interrupted(recipe, gpu):
        raise KeyboardInterrupt

    monkeypatch.setattr(estimate_recipe, "outlook_for", interrupted)
    assert estimate("recipe=tiny", "--gpu", "small", "--json", "-", "--changes") == 3
    changes = json.loads(capsys.readouterr().out)["changes"]
    assert changes == {"fitting": [], "all_together": None, "complete": False}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_finalizer_of_the_search_is_not_lost(estimator, capsys, monkeypatch):
    """Python prints an exception there and goes on; a trace runs thousands of them."""
    plain, estimates = estimator.estimate_changed, []

    class Pressed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def pressed_once(*arguments, **keywords):
        estimates.append(arguments)
        if len(estimates) == 2:
            Pressed()
        return plain(*arguments, **keywords)

    monkeypatch.setattr("lowmem_ft.planning.estimator.changes.estimate_memory", pressed_once)
    before = signal.getsignal(signal.SIGINT)
    assert estimate("recipe=tiny", "--gpu", "small", "--json", "-", "--changes") == 3
    assert json.loads(capsys.readouterr().out)["changes"]["complete"] is False
    assert len(estimates) == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_the_verdict_is_said_before_the_search_begins(estimator, capsys, monkeypatch):
    heard = []
    plain = estimator.estimate_changed

    def listens(*arguments, **keywords):
        heard.append(capsys.readouterr().out)
        return plain(*arguments, **keywords)

    monkeypatch.setattr("lowmem_ft.planning.estimator.changes.estimate_memory", listens)
    assert estimate("recipe=tiny", "--gpu", "small") == 3
    assert heard[0].startswith("a-model does not fit on small: 12.0 GiB over\n")


def test_the_search_says_how_far_it_is_on_a_terminal(estimator, monkeypatch):
    terminal = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("rich.get_console", lambda: terminal)
    assert estimate("recipe=tiny", "--gpu", "small") == 3
    said: list[str] = []
    monkeypatch.setattr("rich.status.Status.update", lambda status, text: said.append(text))
    assert estimate("recipe=tiny", "--gpu", "small") == 3
    assert any("1 tried, 1 found; Ctrl-C ends it" in text for text in said)


def test_json_in_a_file_leaves_the_report_on_stdout(estimator, capsys, tmp_path):
    path = tmp_path / "estimate.json"
    assert estimate("recipe=tiny", "--gpu=big", f"--json={path}") == 0
    assert json.loads(path.read_text(encoding="utf-8"))["gpu"]["name"] == "big"
    assert "fits on big" in capsys.readouterr().out


def test_all_gpus_are_listed_by_the_price_of_tokens(estimator, capsys):
    """Where it fits: elsewhere by that of an hour."""
    estimator.needs_bytes = 10 * GIB
    assert estimate("recipe=tiny", "--gpu", "all") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line and line.split()[0] in GPUS]
    assert names == ["old", "big", "small"]


def test_all_gpus_that_it_does_not_fit_are_listed_by_the_price_of_an_hour(estimator, capsys):
    assert estimate("recipe=tiny", "--gpu", "all") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a-model fits on 1 of 3 GPUs"
    names = [line.split()[0] for line in lines if line and line.split()[0] in GPUS]
    assert names == ["big", "small", "old"]


def test_gpus_that_cannot_run_the_recipe_do_not_stop_the_others(estimator, capsys):
    estimator.refusals["old"] = RecipeError("bfloat16 needs compute capability 8.0, got 7.5.")
    assert estimate("recipe=tiny", "--gpu", "all", "--json", "-") == 0
    seen = capsys.readouterr()
    report = json.loads(seen.out)
    assert report["schema"] == 1
    assert [one["gpu"]["name"] for one in report["estimates"]] == ["big", "small"]
    assert report["cannot_run"] == [
        {"gpu": "old", "reason": "bfloat16 needs compute capability 8.0, got 7.5."}
    ]
    assert "Cannot run it: old. bfloat16 needs compute capability 8.0.\n" in seen.err


def test_what_no_gpu_can_run_is_an_error(estimator, capsys):
    estimator.refusals.update(dict.fromkeys(GPUS, ModelError("There is no model x.")))
    assert estimate("recipe=tiny", "model=x", "--gpu", "all") == 2
    assert capsys.readouterr().err == "error: There is no model x.\n"


def test_all_exits_with_3_where_none_fits_and_helps_the_nearest(estimator, capsys):
    estimator.needs_bytes = 100 * GIB
    assert estimate("recipe=tiny", "--gpu", "all") == 3
    assert "Cheapest changes that make it fit on big:" in capsys.readouterr().out
    assert set(estimator.searched) == {"big"}


def test_plot_and_snapshot_are_written(estimator, tmp_path, monkeypatch):
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=GIB, category="parameter", phase="load"))
    plain = estimator.estimate_memory
    monkeypatch.setattr(
        estimate_recipe,
        "estimate_memory",
        lambda *arguments, **keywords: dataclasses.replace(plain(*arguments), timeline=timeline),
    )
    plot, snapshot = tmp_path / "memory.html", tmp_path / "run.pickle"
    assert estimate("recipe=tiny", "--gpu", "big", "--plot", str(plot), "--snapshot", str(snapshot)) == 0
    assert "parameters" in plot.read_text(encoding="utf-8")
    assert b"segment_map" in snapshot.read_bytes()


def test_a_file_that_may_not_be_written_is_said_before_the_estimate(estimator, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    below_a_file = str(tmp_path / "file" / "x.pickle")
    assert estimate("recipe=tiny", "--gpu", "big", "--snapshot", below_a_file) == 2
    assert "is a file. Name another." in capsys.readouterr().err
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert estimate("recipe=tiny", "--gpu", "big", "--json", str(tmp_path / "x.json")) == 2
    assert "--json needs a file that may be written" in capsys.readouterr().err
    assert estimator.recipes == []


def test_a_file_that_turns_out_not_to_be_writable_is_no_traceback(estimator, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "write_text", refuses_to_write)
    path = tmp_path / "estimate.json"
    assert estimate("recipe=tiny", "--gpu", "big", "--json", str(path)) == 2
    assert f"error: --json cannot write {path}: No space left on device." in capsys.readouterr().err


def refuses_to_write(*arguments, **keywords):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_all_and_cpu_are_understood_in_capitals(estimator, capsys):
    assert estimate("recipe=tiny", "--gpu", "ALL") == 0
    assert "fits on 1 of 3 GPUs" in capsys.readouterr().out
    assert estimate("recipe=tiny", "--gpu", " CPU") == 0
    assert " on cpu (x86_64)" in capsys.readouterr().out


THEN_IMPORTED = """
import sys
from lowmem_ft.cli import main
try:
    sys.exit(main(["estimate", *sys.argv[1:]]))
finally:
    unneeded = {"bitsandbytes", "datasets", "peft", "transformers.trainer_utils"}
    print("imported:", *unneeded & sys.modules.keys(), file=sys.stderr)
"""


def test_the_tiny_recipe_end_to_end(tmp_path):
    """In a process of its own: each import is paid every time somebody asks."""
    plot, snapshot = tmp_path / "memory.html", tmp_path / "run.pickle"
    wanted = ["recipe=tiny", "training.lr_scheduler_type=cosine", "--gpu", "rtx-4090"]
    files = ["--json", "-", "--plot", plot, "--snapshot", snapshot]
    done = subprocess.run(
        [sys.executable, "-c", THEN_IMPORTED, *wanted, *files],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["fits"] is True
    assert report["gpu"]["name"] == "rtx-4090"
    assert sum(report["by_category_at_peak"].values()) == report["device"]["allocated_peak_bytes"]
    assert "fits on rtx-4090" in done.stderr
    assert done.stderr.splitlines()[-1] == "imported:"
    assert plot.stat().st_size > 10_000
    assert snapshot.stat().st_size > 10_000
