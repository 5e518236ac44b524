"""Scripts whose models see or hear run unchanged, and take on this machine what their estimates say."""

from __future__ import annotations

import json

import pytest
from measuring.real_script import run_for_real
from sweeps import few_quick
from user_scripts.rows import OWN

from lowmem_ft.planning.script_runs import estimate_script

SHARE = 0.001
"""What they may differ by: numbers that libraries keep for the log, and tensors of a few bytes."""

SCRIPT = OWN / "pictures.py"
SEEING = [
    family
    for family in json.loads((OWN / "seeing_models.json").read_text())["configs"]
    if family != "whisper"
]
CASES = [
    *(("Trainer", "pictures", family) for family in SEEING),
    *(("SFT", "pictures", family) for family in SEEING),
    ("Trainer", "sounds", "gemma4"),
    ("Trainer", "sounds", "whisper"),
]
QUICK = [
    ("Trainer", "pictures", "qwen3_vl"),
    *(("SFT", "pictures", family) for family in ("smolvlm", "gemma4")),
    *CASES[-2:],
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("trainer, kind, family", few_quick(CASES, QUICK))
def test_models_that_see_or_hear_take_what_is_estimated(tmp_path, monkeypatch, trainer, kind, family):
    monkeypatch.chdir(tmp_path)
    arguments = ["--trainer", trainer, "--family", family, *(["--sounds"] if kind == "sounds" else [])]
    assert estimate_script(SCRIPT, [*arguments, "--rows", "2"], gpu="rtx-4090").steps == 3
    arguments += ["--rows", "3"]
    found, real = estimate_script(SCRIPT, arguments, gpu="cpu"), run_for_real(SCRIPT, arguments)
    assert not [line for line in found.estimate.choices if "does not have" in line and "init.py" not in line]
    assert found.estimate.allocated_peak_bytes == pytest.approx(real.peak_bytes, rel=SHARE)
    assert found.kept_bytes == pytest.approx(real.kept_bytes, rel=SHARE)
    for phase in ("forward", "backward", "optimizer_step"):
        assert found.estimate.by_phase[phase] == pytest.approx(real.by_phase[phase], rel=SHARE), phase
