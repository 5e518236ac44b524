"""Scripts whose models see or hear run unchanged, and take on this machine what their estimates say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import seeing_models
from measuring.real_script import run_for_real
from sweeps import few_quick

from lowmem_ft.planning.script_runs import estimate_script

SHARE = 0.001
"""What they may differ by: numbers that libraries keep for the log, and tensors of a few bytes."""

TRAINER = """
    import sys

    import seeing_models as tiny
    import torch
    from transformers import Trainer, TrainingArguments

    kind, family, rows_of_a_batch = sys.argv[1:]
    arguments = TrainingArguments(
        "out", per_device_train_batch_size=int(rows_of_a_batch), max_steps=3, report_to="none", save_strategy="no",
        use_cpu=not torch.cuda.is_available(), disable_tqdm=True, remove_unused_columns=False, logging_steps=1,
    )
    rows = tiny.rows_with_pictures(12) if kind == "pictures" else tiny.rows_with_sounds(family, 12)
    collate = tiny.collator_of_pictures if kind == "pictures" else tiny.collator_of_sounds
    Trainer(tiny.model_of(family), arguments, train_dataset=rows, data_collator=collate(family)).train()
"""

SFT = """
    import sys

    import seeing_models as tiny
    import torch
    from datasets import Dataset, Features, Image, List, Value
    from trl import SFTConfig, SFTTrainer

    family, rows_of_a_batch = sys.argv[2:]
    arguments = SFTConfig(
        "out", per_device_train_batch_size=int(rows_of_a_batch), max_steps=3, report_to="none", save_strategy="no",
        use_cpu=not torch.cuda.is_available(), bf16=False, disable_tqdm=True, max_length=None,
        gradient_checkpointing=False,
    )
    turn = {"role": Value("string"), "content": Value("string")}
    rows = Dataset.from_list(
        tiny.rows_with_pictures(12), Features({"images": List(Image()), "messages": List(turn)})
    )
    SFTTrainer(
        tiny.model_of(family), args=arguments, train_dataset=rows, processing_class=tiny.processor(family)
    ).train()
"""

SEEING = [family for family in seeing_models.CONFIGS if family != "whisper"]
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


@pytest.fixture
def script_of(script, monkeypatch):
    """Writes the script of a trainer, which imports the tiny models."""
    paths = (str(Path(seeing_models.__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return {"Trainer": lambda: script(TRAINER), "SFT": lambda: script(SFT)}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("trainer, kind, family", few_quick(CASES, QUICK))
def test_models_that_see_or_hear_take_what_is_estimated(script_of, trainer, kind, family):
    name = script_of[trainer]()
    assert estimate_script(name, [kind, family, "2"], gpu="rtx-4090").steps == 3
    arguments = [kind, family, "3"]
    found, real = estimate_script(name, arguments, gpu="cpu"), run_for_real(name, arguments)
    assert not [line for line in found.estimate.choices if "does not have" in line and "init.py" not in line]
    assert found.estimate.allocated_peak_bytes == pytest.approx(real.peak_bytes, rel=SHARE)
    assert found.kept_bytes == pytest.approx(real.kept_bytes, rel=SHARE)
    for phase in ("forward", "backward", "optimizer_step"):
        assert found.estimate.by_phase[phase] == pytest.approx(real.by_phase[phase], rel=SHARE), phase
