"""Measure the host's time for Python between operators, in operators; half a minute on a CPU.

    python scripts/calibrate host [--repeats 40]

A small Qwen3 with tensors of a few numbers runs with one technique and without it, by turns in one process, so that
any other load affects both alike. What a step takes longer, less the operators that came, is divided by the calls that
came: passes of autograd functions written in Python, hooks on saved tensors, calls of a dispatch mode. An operator of
bitsandbytes is compared with one of torch. The numbers of ``lowmem_ft/virtual_gpu/upstream/host_python.py`` are these.
"""

from __future__ import annotations

import json
import time
import timeit
from collections import Counter
from typing import Any

import torch
from bitsandbytes import functional
from command_line import parser_of
from measured_on import measured_on
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from lowmem_ft.planning.estimator.measured_host import TOKENS, WIDTH, tiny_qwen3
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.techniques.accumulation.fused_accumulation import enable_fused_accumulation
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp
from lowmem_ft.virtual_gpu.costs.flops import is_free
from lowmem_ft.virtual_gpu.upstream.host_python import OPERATORS, Kind, host_python_counted


class KernelCount(TorchDispatchMode):
    """A count of operators that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kernels += not is_free(func)
        return func(*args, **kwargs or {})


class Steps:
    """Forward and backward passes of one model.

    Args:
        model: the model, with its technique.
        autocast: whether it computes under autocast, as the mixed precision of adapters does.
    """

    def __init__(self, model: Any, *, autocast: bool = False) -> None:
        self.seconds = float("inf")
        self._model, self._autocast = model.train(), autocast
        self._ids = torch.zeros(1, TOKENS, dtype=torch.long)
        for _ in range(3):
            self.run()
        self.calls: Counter[Kind] = Counter()
        with host_python_counted(lambda kind: self.calls.update([kind])):
            self.run()
        with KernelCount() as count:
            self.run()
        self.kernels = count.kernels

    def run(self) -> None:
        """Run one, and keep the least seconds of all so far."""
        begin = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
            loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        loss.backward()
        self.seconds = min(self.seconds, time.perf_counter() - begin)


def main() -> None:
    """Print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--repeats", type=int, default=40, help="steps of each model, of which the fastest counts"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    plain = Steps(tiny_qwen3())
    pairs: dict[str, tuple[Steps, Steps, Kind]] = {
        "sums inside products": (_with_sums(fused=False), _with_sums(fused=True), "pass"),
        "fused adapters": (_with_adapters("peft"), _with_adapters("fused"), "pass"),
        "MLPs in four tiles": (plain, Steps(_in_tiles(4)), "pass"),
        "torch's checkpointing": (plain, Steps(_checkpointed_by_torch()), "hook"),
        "checkpointing": (plain, Steps(_checkpointed("full")), "short hook"),
        "selective checkpointing": (plain, Steps(_checkpointed("selective")), "dispatch"),
    }
    everyone = list(dict.fromkeys(steps for *both, _ in pairs.values() for steps in both))
    for _ in range(arguments.repeats):
        for steps in everyone:
            steps.run()
    operator = plain.seconds / plain.kernels
    found = {name: worth(before, after, kind, operator) for name, (before, after, kind) in pairs.items()}
    found["bitsandbytes"] = {"bitsandbytes": of_bitsandbytes(operator)}
    where = measured_on("cpu")
    print(json.dumps({**where, "operator_seconds": operator, "operators": found}, indent=1))


def worth(before: Steps, after: Steps, kind: Kind, operator: float) -> dict[Kind, float]:
    """Return how many operators a call is worth, the calls of other kinds taken as they are counted."""
    came: dict[Kind, int] = {one: after.calls[one] - before.calls[one] for one in OPERATORS}
    others = sum(OPERATORS[other] * number for other, number in came.items() if other != kind)
    longer = (after.seconds - before.seconds) / operator - (after.kernels - before.kernels) - others
    return {kind: round(longer / came[kind], 2)}


def of_bitsandbytes(operator: float, count: int = 1000) -> float:
    """Return how many operators the Python before a kernel of bitsandbytes is worth."""
    weight = torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(weight, quant_type="nf4")
    unpack = torch.ops.bitsandbytes.dequantize_4bit.default

    def unpacked() -> object:
        return unpack(packed, state.absmax, state.blocksize, "nf4", weight.shape, weight.dtype)

    ours, torchs = (min(timeit.repeat(run, number=1, repeat=count)) for run in (unpacked, lambda: weight * 2))
    return round((ours - torchs) / operator, 2)


def _with_sums(*, fused: bool) -> Steps:
    model = tiny_qwen3()
    enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True)
    if fused:
        enable_fused_accumulation(model, device=torch.device("cpu"))
    return Steps(model)


def _with_adapters(kernel: Any) -> Steps:
    config = AdapterConfig(name="lora", r=4, kernel=kernel)
    model = enable_lora(tiny_qwen3(), config).peft_model
    enable_fused_adapters(model, config)
    return Steps(model, autocast=True)


def _in_tiles(number: int) -> PreTrainedModel:
    model = tiny_qwen3()
    enable_tiled_mlp(model, TilingConfig(mlp=number))
    return model


def _checkpointed(mode: Any) -> PreTrainedModel:
    model = tiny_qwen3()
    enable_checkpointing(model, CheckpointingConfig(mode=mode))
    return model


def _checkpointed_by_torch() -> PreTrainedModel:
    model = tiny_qwen3()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


if __name__ == "__main__":
    main()
