"""Memory of small models that ``torch.compile`` has compiled, next to the same models without, on this processor.

    PYTHONPATH=scripts python -m measuring.compiled_runs

prints for each model and each way of compiling (the whole model, or each layer) the difference of the real peaks, as a
share of what a forward and a backward pass hold: the peak without weights and optimizer state. Needs a C++ compiler,
and two to four minutes for each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from measuring.real_script import run_for_real
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

CASES: dict[str, dict[str, Any]] = {
    "Qwen3, 4 x 256": {},
    "Qwen3, 4 x 256, two micro-batches": {"accumulate": 2},
    "Qwen3, 4 x 16, two micro-batches": {"length": 16, "accumulate": 2},
    "Qwen3, 4 x 256, LoRA": {"lora": True},
    "Qwen3, 4 x 256, bfloat16": {"dtype": "bfloat16"},
    "BERT, 4 x 256": {"kind": "bert"},
}
_DEFAULTS = {"kind": "qwen3", "dtype": "float32", "length": 256, "accumulate": 1, "lora": False}
WAYS = ("no", "whole", "layers")
_STATES = 2
"""Tensors of AdamW's state as large as a trained parameter."""


def train(case: str, way: str) -> None:
    """Train a model for three steps, compiled in one of the ways."""
    options = {**_DEFAULTS, **CASES[case]}
    model = _model(**options)
    network = torch.compile(model) if way == "whole" else model
    for name, layer in model.named_modules():
        if way == "layers" and name.rpartition(".")[0].endswith(("layers", "encoder.layer")):
            layer.compile()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad])
    for _ in range(3):
        for _ in range(options["accumulate"]):
            ids = torch.randint(0, 2048, (4, options["length"]))
            labels = torch.randint(0, 3, (4,)) if options["kind"] == "bert" else ids
            network(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def _model(kind: str, dtype: str, lora: bool, **others: Any) -> Any:
    torch.manual_seed(0)
    model = _of_kind(kind).to(getattr(torch, dtype))
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))


def _of_kind(kind: str) -> Any:
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2}
    if kind == "bert":
        config = AutoConfig.for_model(kind, **sizes, num_attention_heads=4, num_labels=3)
        return AutoModelForSequenceClassification.from_config(config)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **heads))


def main() -> None:
    """Measure all cases, each run in a process of its own."""
    for case, options in CASES.items():
        plain, *compiled = (run_for_real(__file__, [case, way]) for way in WAYS)
        parameters = [*_model(**{**_DEFAULTS, **options}).parameters()]
        states = sum(_STATES * one.nbytes for one in parameters if one.requires_grad)
        held = plain.peak_bytes - sum(one.nbytes for one in parameters) - states
        for way, real in zip(WAYS[1:], compiled, strict=True):
            print(f"{case}, {way}: {(real.peak_bytes - plain.peak_bytes) / held:+.1%} of a pass", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(*sys.argv[1:3])
    else:
        main()
