"""A wrong path or key is told before torch, transformers and datasets are imported, which takes seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import types

import pyarrow
import pyarrow.parquet
import pytest
from processes import LIMIT_SECONDS, set_launch

from lowmem_ft.cli import main
from lowmem_ft.foundation.errors import MissingPackageError
from lowmem_ft.foundation.packages import is_installed
from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.recipe.training_config import require_tracker

HEAVY = {"torch", "transformers", "datasets", "accelerate", "pyarrow", "pandas"}

COMMANDS = [
    ["train", "recipe=nothing"],
    ["train", "recipe=tiny", "training.sed=1"],
    ["train", "recipe=tiny", "data=nowhere.jsonl"],
    ["train", "recipe=tiny", "model=./nowhere"],
    ["train", "recipe=tiny", "data.split=validation"],
    ["train", "recipe=tiny", "data=pairs.csv", "data.completion_column=answr"],
    ["train", "recipe=tiny", "data=org/dataset"],
    ["train", "recipe=tiny", "tiling.head=100000"],
    ["train", "recipe=tiny", "model=cut", "model.weights=pretrained"],
    ["train", "recipe=tiny", "model=bert"],
    ["estimate", "model=nosuch/folder"],
    ["train", "recipe=tiny", "training.output_dir=/proc/nowhere"],
    ["train", "recipe=tiny", "training.output_dir=old_run", "training.resume_from_checkpoint=auto"],
    ["train", "recipe=tiny", "training.resume_from_checkpoint=old_run/checkpoint-5"],
    ["train", "recipe=tiny", "offload.optimizer=host", "offload.folder=nowhere"],
    ["train", "recipe=tiny", "training.report_to=[mlflow]"],
    ["train", "recipe=tiny", "training.push_to_hub=true"],
    ["train", "recipe=tiny", "budget=2TiB"],
    ["plan", "model=llama-3.1-8b", "budget=10MiB", "--gpu", "l4"],
    ["plan", "model=llama-3.1-8b", "budget.host=1GiB", "--gpu", "l4"],
    ["plan", "recipe=tiny", "--gpu", "l4", "--write", "taken.yaml"],
    ["estimate", "recipe=tiny", "--plot", "taken.yaml"],
    ["plan", "model=llama-3.2-1b"],
    ["estimate", "recipe=tiny", "--json", "nowhere/x.json"],
    ["merge", "nowhere", "out"],
    ["recipes", "nothing"],
]


def test_each_is_told_without_them(tmp_path):
    """All in one process, as nothing that one of them imports may hide behind another."""
    (tmp_path / "old_run" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "old_run" / "recipe.yaml").write_text("name: of another model")
    (tmp_path / "old_run" / "metrics.jsonl").write_text("")
    (tmp_path / "taken.yaml").write_text("name: somebody's work")
    (tmp_path / "pairs.csv").write_text("prompt,answer\na,b\n")
    for name, model_type in {"cut": "llama", "bert": "bert"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": model_type}))
        (tmp_path / name / "tokenizer.json").write_text('{"model": {}}')
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}")
    code = f"""
import sys
from lowmem_ft.cli import main
from lowmem_ft.foundation import packages
from lowmem_ft.foundation.packages import is_installed
packages.may_have_gpu = lambda: False
for command in {COMMANDS!r}:
    code = main(command)
    print(code, *sorted({HEAVY!r} & set(sys.modules)), *command, sep="|")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.splitlines() == ["|".join(["2", *command]) for command in COMMANDS], done.stderr
    assert done.stderr.count("error: ") == len(COMMANDS) + 1  # the plot's file exists, and is no plot


@pytest.mark.parametrize(
    "settings, told",
    [
        (["budget=1MiB"], "budget.device=1MiB is less than the process holds before the model is loaded"),
        (["budget=200MiB", "training.use_cpu=true"], "budget.device=200MiB is less than the process holds"),
        (["budget.host=10MiB"], "budget.host=10MiB is less than the process holds"),
        (
            ["budget=2GiB"],
            "budget.device=2GiB is less than the process and the weights take, at least 108 MiB and 8.96 GiB",
        ),
        (
            ["budget=2GiB", "model.dtype=bfloat16"],
            "less than the process and the weights take, at least 108 MiB and 4.48 GiB",
        ),
        (
            ["budget=2GiB", "adapter.name=lora", "model.quantization=nf4"],
            "the weights take, at least 108 MiB and 2.83 GiB",
        ),
    ],
)
def test_a_budget_that_no_run_can_keep_is_told_without_them(settings, told, tmp_path, monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "lowmem_ft.planning.preflight.train", None)  # what imports them
    llama = {"vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **llama}))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    of_llama = [f"model={tmp_path}", f"training.output_dir={tmp_path / 'run'}"]
    assert main(["train", "recipe=tiny", *of_llama, *settings]) == 3
    assert told in capfd.readouterr().err
    with contextlib.suppress(ImportError):  # it would be watched alone
        assert main(["train", "recipe=tiny", *of_llama, *settings, "budget.enforce=false"]) == 2
    assert "less than the process" not in capfd.readouterr().err


def test_what_works_in_one_process_is_told_without_them(tmp_path, monkeypatch, capfd):
    """Each process is told by its launcher how many they are."""
    monkeypatch.setitem(sys.modules, "lowmem_ft.planning.preflight.train", None)  # what imports them
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    settings = [
        "optimizer.in_backward=true",
        "accumulation.order=vertical",
        f"training.output_dir={tmp_path / 'run'}",
    ]
    assert main(["train", "recipe=tiny", *settings]) == 2
    assert "optimizer.in_backward=true works in one process, or with" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_each_process_of_a_launch_ends_of_bad_data_and_the_main_one_tells(tmp_path, monkeypatch, capfd):
    """One that went on would wait for the others on another machine, until it gives up."""
    monkeypatch.setitem(sys.modules, "lowmem_ft.planning.preflight.train", None)  # what imports torch
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"messages": 1}\n')
    told: list[object] = []
    meeting = types.SimpleNamespace(tell_others=told.append, is_first_to_say=lambda text: is_main_process())
    command = ["train", "recipe=tiny", "data=data.jsonl"]
    assert main(command) == 2
    assert "Example 0 of data.jsonl" in capfd.readouterr().err
    monkeypatch.setitem(sys.modules, "lowmem_ft.training.processes.rendezvous", meeting)
    set_launch(monkeypatch, rank=1)
    assert main(command) == 2
    assert capfd.readouterr().err == ""
    assert len(told) == 1


def test_columns_of_parquet_are_told_before_all_but_its_reader(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"foo": ["a"]}), tmp_path / "data.parquet")
    code = f"""
import sys
from lowmem_ft.cli import main
from lowmem_ft.foundation.packages import is_installed
main(["train", "recipe=tiny", "data=data.parquet"])
print(*sorted({HEAVY!r} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "Columns seen: foo" in done.stderr
    assert done.stdout.split() == ["pyarrow"]


@pytest.mark.parametrize(
    "package, settings",
    [
        ("tensorboard", ["training.report_to=[tensorboard]"]),
        ("trackio", ["training.report_to=[tensorboard,trackio]"]),
        ("peft", ["adapter.name=lora"]),
        ("bitsandbytes", ["adapter.name=lora", "model.quantization=nf4"]),
        ("bitsandbytes", ["optimizer.name=adamw_bnb_8bit"]),
        ("gguf", ["model=w.gguf"]),
        ("flash-attn", ["model.attn_implementation=flash_attention_2"]),
    ],
)
def test_a_package_that_is_not_installed_is_told_without_them(
    package, settings, tmp_path, monkeypatch, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setitem(sys.modules, "lowmem_ft.planning.preflight.train", None)  # what imports them
    found = importlib.util.find_spec
    gone = package.replace("-", "_")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == gone else found(name, *of)
    )
    assert main(["train", "recipe=tiny", *settings]) == 2
    told = capfd.readouterr().err
    assert f"the package {package}, which is not installed. Run: pip install" in told


def test_all_trackers_that_are_not_installed_are_told_at_once(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lowmem_ft.foundation.packages.is_installed", lambda package: package == "trackio")
    assert main(["train", "recipe=tiny", "training.report_to=[tensorboard,trackio,wandb]"]) == 2
    told = capfd.readouterr().err.split()
    assert [word for word in told if word.startswith("training.report_to=")] == [
        "training.report_to=tensorboard",
        "training.report_to=wandb",
    ]


def test_tensorboardx_stands_in_for_tensorboard_as_it_does_in_accelerate(monkeypatch):
    installed = {"tensorboardX"}
    monkeypatch.setattr("lowmem_ft.foundation.packages.is_installed", lambda package: package in installed)
    require_tracker("tensorboard")
    installed.clear()
    with pytest.raises(MissingPackageError, match="the package tensorboard, which is not installed"):
        require_tracker("tensorboard")


def test_a_folder_of_a_packages_name_is_not_the_package(tmp_path, monkeypatch):
    """Where wandb ran, it leaves one; Python takes it for a package without a file."""
    (tmp_path / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.util.find_spec("no_such_package") is not None
    assert not is_installed("no_such_package")
    assert is_installed("torch")
