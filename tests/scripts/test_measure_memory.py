import json
import sys

import measure_memory
import pytest
import torch
from measured_on import require_device
from measuring import real_run
from measuring.comparison import compare, summarize
from measuring.cuda_matrix import cuda_rows

from lowmem_ft.foundation.catalog.model_architectures import find_architecture

DEVICE = torch.device("cuda", 0)
ROW = {
    "measured": {"allocated": {"load": 100, "backward": 200}, "reserved": {"load": 128, "backward": 256}},
    "estimated": {"allocated": {"load": 100, "backward": 202}, "reserved_peak": 256, "process_peak": 300},
}
ROW["measured"]["process"] = 310


@pytest.fixture
def cuda(cuda_driver, monkeypatch):
    """Moves torch's counters as a device would: ``cuda(allocated, reserved)``."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    return cuda_driver(total_memory=1000).hold


def test_cuda_peaks_belong_to_the_phase_that_made_them(cuda):
    meter = real_run.PhaseMeter(DEVICE)
    meter.begin("forward")
    cuda(60, 80)
    cuda(20, 80)
    meter.begin("backward")
    cuda(40, 80)
    meter.begin("forward")
    cuda(30, 80)
    meter.end()
    assert meter.peaks.allocated == {"forward": 60, "backward": 40}
    assert meter.peaks.reserved == {"forward": 80, "backward": 80}


def test_rows_that_are_there_are_not_run_again(tmp_path, monkeypatch):
    ran = []

    def in_new_process(device, name, overrides):
        ran.append(name)
        return None if name == "broken" else {"name": name, **ROW}

    monkeypatch.setattr(measure_memory, "in_new_process", in_new_process)
    rows, out = [{"name": "old", **ROW}], tmp_path / "new" / "rows.json"
    failed = measure_memory.run_missing({"old": (), "broken": (), "new": ()}, rows, "cuda", out)
    assert (ran, failed) == (["broken", "new"], ["broken"])
    assert [row["name"] for row in json.loads(out.read_text())] == ["old", "new"]


def test_a_comparison_knows_its_side():
    errors = list(compare("row", ROW["measured"], ROW["estimated"]))
    of = {(error.metric, error.phase): round(error.error, 3) for error in errors}
    assert of == {
        ("allocated", "load"): 0.0,
        ("allocated", "backward"): 0.01,
        ("allocated", "run"): 0.01,
        ("reserved", "run"): 0.0,
        ("process", "run"): -0.032,
    }
    summary = summarize(errors)
    assert (summary.median, summary.worst) == (pytest.approx(0.01), pytest.approx(10 / 310))
    assert summary.under == pytest.approx(10 / 310)


def test_every_cuda_row_is_a_recipe_of_a_model_that_needs_no_network(tmp_path):
    rows = cuda_rows()
    assert len(rows) >= 30
    for overrides in rows.values():
        assert find_architecture(measure_memory.recipe_of(overrides, tmp_path).model.name_or_path)


def test_a_measurement_for_a_gpu_does_not_go_on_with_the_processor(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    require_device("cpu")
    with pytest.raises(SystemExit, match="--device cuda needs a CUDA device"):
        require_device("cuda")
