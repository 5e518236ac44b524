"""``lowmem-ft measure-host``."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from lowmem_ft.cli import main
from lowmem_ft.cli.answers import measure_host as answer
from lowmem_ft.foundation.catalog.this_host import FILE_NAME
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator.measured_host import counts_of_pass, fuse, measure_host, tiny_qwen3
from lowmem_ft.techniques.kernels.fused_operators import has_fused_operators


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
    out = capsys.readouterr().out
    assert "as usual: Liger's kernels, which measure it, do not run here" in " ".join(out.split())
    assert f"kept            {folder}" in out.replace("\n", "").replace("  kept", "kept")


def test_a_folder_that_cannot_be_written_is_an_error(folder, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    folder.write_text("a file in the way")
    assert main(["measure-host"]) == 2
    assert KEPT_FOLDER_VARIABLE in capsys.readouterr().err


def ticking(monkeypatch, *seconds):
    """Let passes of a processor take these seconds by turns."""
    ticks = itertools.accumulate(
        itertools.chain.from_iterable((0.0, taken) for taken in itertools.cycle(seconds))
    )
    monkeypatch.setattr("lowmem_ft.planning.estimator.measured_host.time.process_time", lambda: next(ticks))


def test_an_operator_is_a_pass_of_the_small_model_over_the_operators_that_a_trace_counts(monkeypatch):
    ticking(monkeypatch, 1.0)
    counts = counts_of_pass(tiny_qwen3(), lambda model: None)
    assert measured("cpu").operator_seconds == pytest.approx(1 / counts.operators)
    assert counts.operators > 16 * 30
    assert (counts.triton, counts.python) == (0, 0)


@pytest.mark.skipif(not has_fused_operators(tiny_qwen3(1)), reason="needs liger-kernel")
def test_a_launch_by_triton_is_what_the_fused_model_takes_beyond_its_counted_operators(monkeypatch):
    ticking(monkeypatch, 1.0, 2.0)
    counts = counts_of_pass(tiny_qwen3(), fuse)
    costs = measure_host(
        torch.device("cpu"), seconds=0.0, fuse=lambda model: model.device.type == "cpu" or fuse(model)
    )
    counted = counts.operators + counts.python + counts.triton * costs.triton_launch
    assert costs.operator_seconds * counted == pytest.approx(2.0)
    assert counts.triton >= 16 * 10
