"""Scripts that compile: it is seen, told where, and makes the ranges wider, and nothing else."""

from __future__ import annotations

import pytest

from lowmem_ft.planning.script_runs import estimate_script

RANGES = "the ranges are wider by what compiling may change"

WAYS = {
    "nothing": ("", ""),
    "a model": ("net = torch.compile(model, mode='max-autotune')", "Sequential (train.py:10)"),
    "its method": ("model.compile(fullgraph=True)", "Sequential (train.py:10)"),
    "layers": ("for layer in model[::2]: layer.compile()", "2 x Linear (train.py:10)"),
    "a layer": ("model[0] = torch.compile(model[0], fullgraph=True)", "Linear (train.py:10)"),
    "a function": ("squared = torch.compile(squared)", "squared (train.py:10)"),
    "a decorated function": (
        "@torch.compile\ndef squared(x): return (x * x).mean()",
        "squared (train.py:10)",
    ),
    "with options": (
        "@torch.compile(fullgraph=True, dynamic=False)\ndef squared(x): return (x * x).mean()",
        "squared (train.py:10)",
    ),
    "by accelerate": (
        "from accelerate.utils import compile_regions\nnet = compile_regions(torch.nn.Sequential(model))",
        "Sequential (train.py:11, by accelerate)",
    ),
    "two": (
        "net = torch.compile(model); squared = torch.compile(squared)",
        "Sequential (train.py:10), squared (train.py:10)",
    ),
    "what is never called": ("torch.compile(model)", ""),
    "what is switched off": ("net = torch.compile(model, disable=True)", ""),
    "what runs as written": ("net = torch.compile(model, backend='eager')", ""),
}

SCRIPT = """import torch
from torch import nn

def squared(x):
    return (x * x).mean()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
net = model
{}
optimizer = torch.optim.AdamW(model.parameters())
while True:
    squared(net(torch.randn(512, 256, device="cuda"))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def compiled_in(found) -> list[str]:
    return [choice for choice in found.estimate.choices if choice.startswith("torch.compile")]


@pytest.mark.parametrize("line, names", WAYS.values(), ids=WAYS.keys())
def test_what_a_script_compiles_is_named_and_widens_the_ranges_alone(script, line, names):
    without = estimate_script(script(SCRIPT.format("")), gpu="t4").estimate
    found = estimate_script(script(SCRIPT.format(line)), gpu="t4")
    assert compiled_in(found) == (
        [f"torch.compile: {names}, estimated as it runs uncompiled; {RANGES}"] if names else []
    )
    estimate, name = found.estimate, "Sequential"
    assert estimate.model.name == name
    assert estimate.by_phase == without.by_phase
    assert estimate.step.seconds == pytest.approx(without.step.seconds, rel=1e-6)
    assert estimate.step.high_seconds == pytest.approx(without.step.high_seconds, rel=1e-6)
    assert (estimate.step.low_seconds < without.step.low_seconds / 2) is bool(names)
    ranges = estimate.process_range, without.process_range
    assert (ranges[0].low_bytes < ranges[1].low_bytes) is bool(names)
    assert (ranges[0].high_bytes > ranges[1].high_bytes) is bool(names)
    assert not any("compile" in text for text in estimate.not_modelled)


TRAINER = """
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    rows = Dataset.from_dict({"input_ids": [list(range(48))] * 64, "labels": [list(range(48))] * 64})
    Trainer(
        AutoModelForCausalLM.from_pretrained("model"),
        TrainingArguments("out", per_device_train_batch_size=4, torch_compile=True),
        train_dataset=rows,
    ).train()
"""


def test_a_trainer_that_compiles_is_told_by_the_line_that_trains(script):
    found = estimate_script(script(TRAINER), gpu="t4")
    assert compiled_in(found) == [
        f"torch.compile: LlamaForCausalLM (train.py:10, by accelerate), estimated as it runs uncompiled; {RANGES}"
    ]
    assert found.estimate.model.name == "LlamaForCausalLM"


@pytest.mark.parametrize(
    "line, num_rows, verdict",
    [
        ("", 850_000, "fits"),
        ("net = torch.compile(model)", 850_000, "may not fit"),
        ("", 1_000_000, "does not fit"),
        ("net = torch.compile(model)", 1_000_000, "may not fit"),
    ],
)
def test_a_limit_within_the_wider_range_is_no_clear_verdict(script, line, num_rows, verdict):
    text = SCRIPT.format(line).replace("randn(512", f"randn({num_rows}")
    assert estimate_script(script(text), gpu="t4").estimate.verdict == verdict
