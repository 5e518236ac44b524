"""``lowmem-ft measure-host``."""

from __future__ import annotations

import json

import pytest
import torch

from lowmem_ft.cli import main
from lowmem_ft.cli.answers import measure_host as answer
from lowmem_ft.foundation.catalog.this_host import FILE_NAME
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator.measured_host import KernelCount, measure_host, tiny_llama


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    monkeypatch.setattr(answer, "measure_host", lambda device, **options: measured("cpu"))
    return tmp_path / "kept"


def measured(device):
    return measure_host(torch.device(device), seconds=0.0)


def test_without_a_gpu_an_operator_is_told_and_nothing_is_kept(folder, capsys):
    assert main(["measure-host"]) == 0
    out = capsys.readouterr().out
    assert "us, without a launch: this machine has no NVIDIA GPU" in out
    assert "Triton launch" not in out
    assert not folder.exists()


def test_with_a_gpu_it_is_kept_and_where_is_told(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert main(["measure-host", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kept_in"] == str(folder / FILE_NAME)
    (row,) = json.loads((folder / FILE_NAME).read_text())
    assert {name: found[name] for name in row} == row
    assert main(["measure-host"]) == 0
    assert f"kept            {folder}" in capsys.readouterr().out.replace("\n", "").replace("  kept", "kept")


def test_a_folder_that_cannot_be_written_is_an_error(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    folder.write_text("a file in the way")
    assert main(["measure-host"]) == 2
    assert KEPT_FOLDER_VARIABLE in capsys.readouterr().err


def test_an_operator_is_a_step_of_the_small_model_over_its_kernels(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr(
        "lowmem_ft.planning.estimator.measured_host.time.perf_counter", lambda: float(next(ticks))
    )
    model, ids = tiny_llama(), torch.zeros(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    with KernelCount() as count:  # with gradients to add to, as in each step that is timed
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    costs = measured("cpu")
    assert costs.operator_seconds == pytest.approx(1 / count.kernels)
    assert count.kernels > 16 * 30
