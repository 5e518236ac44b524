"""One Qwen3-8B decoder layer, forward and backward: as transformers has it, with Liger's kernels, compiled.

Four numbers of each show whether compiling pays: seconds that the GPU computes, that the host launches, that a
pass takes where both run side by side, and the bytes of its peak.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from lease_items.parts import Numbers, Part, Setting, timed, wait
from lease_items.shapes import MODEL, TINY
from speed.kernel_trace import digest, events_of
from torch.profiler import ProfilerActivity, profile

Kind = Literal["eager", "liger", "compiled"]
KINDS: tuple[Kind, ...] = ("eager", "compiled", "liger")
ROWS = (1, 2)

TOGETHER = 10
"""Passes one after the other, of which each may be launched while the one before computes."""


def parts(setting: Setting) -> Iterator[Part]:
    """Yield each kind with one row and with two; Inductor takes up to a minute for its first kernels."""
    for rows in ROWS:
        for kind in KINDS:
            # Without a GPU Dynamo alone is tried: Inductor would build C++ for a minute.
            backend = "eager" if setting.device == "cpu" else "inductor"
            yield Part(
                name=f"a layer, {kind}, {rows} row{'s' * (rows > 1)}",
                run=functools.partial(_measured, kind, rows, backend, setting),
                seconds={"eager": 4, "liger": 6, "compiled": 25 if rows == 1 else 15}[kind],
                settings={"kind": kind, "rows": rows} | ({"backend": backend} if kind == "compiled" else {}),
                needs=("transformers", *(("liger_kernel", "triton") if kind == "liger" else ())),
                needs_cuda=kind == "liger",
            )


def _measured(kind: Kind, rows: int, backend: str, setting: Setting) -> Numbers:
    run = _pass(kind, rows, backend, setting)
    begin = time.perf_counter()
    run()
    wait(setting.device)
    first_seconds = time.perf_counter() - begin
    times = timed([run], setting.device, repeats=2 if setting.tiny else 12)
    wait(setting.device)
    if setting.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if setting.device == "cuda" else 0
    begin = time.perf_counter()
    for _ in range(TOGETHER):
        run()
    wait(setting.device)
    together_seconds = (time.perf_counter() - begin) / TOGETHER
    on_gpu = setting.device == "cuda"
    return {
        "device_seconds": times.device,
        "host_seconds": times.host,
        "together_seconds": together_seconds,
        "first_pass_seconds": first_seconds,
        "recorded": recorded(run) if on_gpu else None,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
    }


def _pass(kind: Kind, rows: int, backend: str, setting: Setting) -> Callable[[], object]:
    from lowmem_ft.models.config import ModelConfig
    from lowmem_ft.models.hf_config import load_model_config
    from lowmem_ft.models.loading import model_of_config
    from lowmem_ft.techniques.kernels.fused_operators import enable_fused_operators

    device = torch.device(setting.device, 0) if setting.device == "cuda" else torch.device("cpu")
    config = ModelConfig(name_or_path=MODEL, dtype="bfloat16", weights="random")
    hf_config = load_model_config(config, architecture_only=True)
    sizes = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "vocab_size": 512}
    if setting.tiny:
        sizes |= {name: value for name, value in vars(TINY).items() if hasattr(hf_config, name)}
    hf_config.update(sizes)
    torch.manual_seed(0)
    model: Any = model_of_config(config, hf_config, "sdpa", device).train()
    if kind == "liger":
        enable_fused_operators(model, "liger", device=device, compute_dtype=torch.bfloat16)
    (layer,) = model.model.layers
    tokens = TINY.row_tokens if setting.tiny else 2048
    hidden = torch.randn(rows, tokens, hf_config.hidden_size, device=device, dtype=torch.bfloat16)
    hidden.requires_grad_()
    positions = torch.arange(tokens, device=device).expand(rows, -1)
    angles = model.model.rotary_emb(hidden, positions)
    if kind == "compiled":
        layer.compile(backend=backend)
    d_output = torch.randn_like(hidden)

    def run() -> None:
        output = layer(hidden, position_embeddings=angles, position_ids=positions, attention_mask=None)
        output = output[0] if isinstance(output, tuple) else output
        output.backward(d_output)
        layer.zero_grad(set_to_none=True)
        hidden.grad = None

    return run


def recorded(run: Callable[[], object]) -> dict[str, Any]:
    """Return what the GPU did in a call: kernels, and seconds by their kind."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    return digest(events_of(found))
