"""Host time of a decoder layer, forward and backward, in ratio to that of stock transformers.

    python scripts/bench layer [--rounds 60] [--only "Liger,LoRA by PEFT"]

Where the host sets the pace, a step waits for Python. Here kernels take next to no time: tensors are tiny, and a launch
of Triton ends before the driver. Two models of Qwen3's architecture differ in their number of layers alone, so their
difference is that of whole layers. All variants run in turn in one process, and the least of its CPU time counts for
each, so that another load on the machine affects all alike. It needs no GPU, whose launches would come on top.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

from command_line import parser_of

from lowmem_ft import VirtualGPU  # noqa: F401  isort: skip  first: it silences a needless message of bitsandbytes

import torch
from measured_on import measured_on
from measuring.stubbed_launches import stubbed_launches
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_ft.planning.estimator.measured_host import TOKENS, tiny_qwen3
from lowmem_ft.techniques.accumulation.fused_accumulation import enable_fused_accumulation
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.peft_layers import add_layers
from lowmem_ft.techniques.attention.varlen_attention import (
    VARLEN_ATTENTION,
    border_inputs,
    register_varlen_attention,
)
from lowmem_ft.techniques.checkpointing import recomputed_activation
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.checkpointing.recomputed_activation import enable_recomputed_activations
from lowmem_ft.techniques.kernels.fused_operators import _switched_on
from lowmem_ft.techniques.kernels.liger_patches import ligers_patches

FEW, MANY = 4, 16
_WARM_ROUNDS = 3

Model = Any
Change = Callable[[Model], Model]


def main() -> None:
    """Print one JSON object."""
    changes, num_rounds = asked_for(__doc__)
    with computing_nothing():
        seconds = seconds_of_a_layer(changes, num_rounds)
    rows = {
        name: {
            "layer_us": round(1e6 * value),
            "of_stock": round(value / seconds["stock"], 2),
            **{f"of_{other}": round(value / seconds[other], 2) for other in _rivals(name, seconds)},
        }
        for name, value in seconds.items()
    }
    print(json.dumps({**measured_on("cpu"), "layers": [FEW, MANY], "variants": rows}, indent=2))


def asked_for(description: str | None) -> tuple[dict[str, Change], int]:
    """Return the variants that the command line names, or all, and the number of passes of each."""
    parser = parser_of(description)
    parser.add_argument("--rounds", type=int, default=60, help="forward and backward passes of each model")
    parser.add_argument("--only", default="", help="names of variants, by commas; stock is always there")
    arguments = parser.parse_args()
    chosen = [name for name in arguments.only.split(",") if name]
    if unknown := [name for name in chosen if name not in CHANGES]:
        parser.error(f"--only names variants, got {', '.join(unknown)}. There are: {', '.join(CHANGES)}")
    changes = {name: one for name, one in CHANGES.items() if name in ("stock", *chosen) or not chosen}
    return changes, arguments.rounds


def seconds_of_a_layer(
    changes: dict[str, Change], num_rounds: int, after_round: Callable[[int], object] = lambda number: None
) -> dict[str, float]:
    """Return the host's seconds of a layer by variant.

    Args:
        changes: for each variant, what makes it of a stock model.
        num_rounds: passes of each model, after a few that are not counted.
        after_round: called with the number of each round when it is over.
    """
    models = {(name, num): change(tiny_qwen3(num)) for name, change in changes.items() for num in (FEW, MANY)}
    taken = {key: [] for key in models}
    for number in range(num_rounds + _WARM_ROUNDS):
        for key, model in models.items():
            start = time.process_time()
            run_pass(model)
            taken[key].append(time.process_time() - start)
        after_round(number)
    least = {key: min(seconds[_WARM_ROUNDS:]) for key, seconds in taken.items()}
    return {name: (least[name, MANY] - least[name, FEW]) / (MANY - FEW) for name in changes}


def run_pass(model: Model) -> None:
    """Run a forward and a backward pass, with borders of documents and autocast as a step has them."""
    device = model.device
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    places = torch.arange(TOKENS, device=device)[None] % (TOKENS // 2)
    implementation = model.config._attn_implementation
    inputs = border_inputs(implementation, places, device) if implementation == VARLEN_ATTENTION else {}
    has_adapters = hasattr(model, "peft_config")  # in float32, as a step makes them
    with torch.autocast(device.type, torch.bfloat16, enabled=has_adapters, cache_enabled=False):
        loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
    loss.backward()


def _liger(model: Model) -> Model:
    for patch in ligers_patches(model):
        for _ in _switched_on(patch, model.device):
            pass
    return model


def _with_varlen_attention(model: Model) -> Model:
    register_varlen_attention()
    model.set_attn_implementation(VARLEN_ATTENTION)
    return _liger(model)


def _fused_sums(model: Model) -> Model:
    enable_fused_accumulation(_liger(model), device=model.device)
    return model


def _checkpointed(model: Model, change: Change = _liger) -> Model:
    model = change(model)
    enable_checkpointing(model, CheckpointingConfig(mode="full"))
    return model


def _recomputing(model: Model) -> Model:
    config = CheckpointingConfig(mlp_activation="recompute")
    enable_recomputed_activations(_liger(model), config, device=model.device)
    return model


def _lora(model: Model, kernel: Any, *, is_packed: bool = False) -> Model:
    from peft import LoraConfig

    if is_packed:
        _pack(model)
    model = add_layers(model, LoraConfig(r=8, target_modules="all-linear"))
    enable_fused_adapters(model, AdapterConfig(kernel=kernel))
    return model


def _pack(model: Model) -> None:
    """Replace the linear layers of a model by bitsandbytes' 4-bit ones."""
    import bitsandbytes

    nn4: Any = bitsandbytes.nn

    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            packed: Any = nn4.Linear4bit(layer.in_features, layer.out_features, False, torch.bfloat16)
            weight: Any = nn4.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
            packed.weight = weight.to(model.device)
            model.set_submodule(name, packed)
    model.is_loaded_in_4bit = True


CHANGES: dict[str, Change] = {
    "stock": lambda model: model,
    "checkpointed": partial(_checkpointed, change=lambda model: model),
    "Liger": _liger,
    "Liger varlen": _with_varlen_attention,
    "Liger fused sums": _fused_sums,
    "Liger recomputing": _recomputing,
    "Liger checkpointed": _checkpointed,
    "LoRA by PEFT": partial(_lora, kernel="peft"),
    "LoRA": partial(_lora, kernel="fused"),
    "QLoRA by PEFT": partial(_lora, kernel="peft", is_packed=True),
    "QLoRA": partial(_lora, kernel="fused", is_packed=True),
}


def _rivals(name: str, seconds: dict[str, float]) -> Iterator[str]:
    if (other := f"{name} by PEFT") in seconds:
        yield other


@contextlib.contextmanager
def computing_nothing() -> Iterator[None]:
    """Let Triton's kernels compute nothing, and documents' attention be that of a row, which CPUs have."""
    torch.set_num_threads(1)
    with (
        stubbed_launches(),
        mock.patch("torch.nn.attention.varlen.varlen_attn", _attention_of_a_row),
        mock.patch.object(recomputed_activation, "has_values", return_value=False),
    ):
        yield


def _attention_of_a_row(
    query: Tensor, key: Tensor, value: Tensor, *others: Any, enable_gqa: bool, **more: Any
) -> Tensor:
    q, k, v = (one.transpose(0, 1)[None] for one in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa)[0].transpose(0, 1)


if __name__ == "__main__":
    sys.exit(main())
