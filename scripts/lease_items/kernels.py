"""The bandwidth that each kind of kernel reaches, at the sizes of a Qwen3-8B layer.

Bytes are the least that a kernel has to read and write, so that a share of the copy's bandwidth says how much better it
could be. For attention and the loss, which also compute products, FLOP/s and seconds are reported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lease_items.parts import Numbers, Part, Setting, Times, timed, turns
from lease_items.shapes import Shapes, shapes
from torch import Tensor, nn

from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.techniques.gradients.norm import clip_grad_norm

UPDATED_ELEMENTS = (2**20, 2**22, 12288 * 4096, 151936 * 4096)
"""A norm's neighbours, a chunk of former days, a projection of the MLP, and the head."""

ROWS_OF_TILES = (4, 8, 16)
"""Values of ``triton_kernel.ROWS`` to try."""

DOCUMENTS = (1, 4, 16)

Call = Callable[[], object]


def parts(setting: Setting) -> Iterator[Part]:
    """Yield each kind of kernel, those first by which steps differ most from the clock's."""
    size = shapes(tiny=setting.tiny)
    tokens = 2 * size.row_tokens
    part = functools.partial(_part, setting)
    yield part("copy", functools.partial(_elementwise, (tokens, size.intermediate_size), "copy_"))
    yield part("sum in place", functools.partial(_elementwise, (tokens, size.intermediate_size), "add_"))
    with_triton = {"needs": ("triton",), "needs_cuda": not _is_interpreted()}
    for elements in UPDATED_ELEMENTS[:1] if setting.tiny else UPDATED_ELEMENTS:
        for rows in ROWS_OF_TILES if elements in (UPDATED_ELEMENTS[0], UPDATED_ELEMENTS[2]) else (4,):
            settings = {"elements": 2**10 if setting.tiny else elements, "rows_of_tile": rows}
            name = f"our update in Triton, {settings['elements']} elements, {rows} rows of a tile"
            yield part(name, functools.partial(_our_update, **settings), settings=settings, **with_triton)
        many = 2**10 if setting.tiny else elements
        name = f"bitsandbytes' 8-bit update, {many} elements"
        run = functools.partial(_update_of_bitsandbytes, many)
        yield part(name, run, settings={"elements": many}, needs=("bitsandbytes",))
    for name, make in LIGERS.items():
        yield part(
            f"Liger's {name}",
            functools.partial(_of_liger, make, size, tokens),
            needs=("liger_kernel", "triton"),
            needs_cuda=True,
        )
    yield part("causal attention", functools.partial(_causal, size, 2), settings={"documents": 1})
    for number in DOCUMENTS:
        run = functools.partial(_varlen, size, 2, number)
        yield part(
            f"varlen attention, documents of {size.row_tokens // number}",
            run,
            settings={"documents": number},
            needs_cuda=True,
        )
    yield part("loss of a chunk", functools.partial(_loss, size, min(1024, tokens)), needs=("transformers",))
    yield part("clipping a layer's gradients", functools.partial(_clipping, size))
    run = functools.partial(_unpacking, (size.intermediate_size, size.hidden_size))
    yield part("bitsandbytes' NF4 unpacking", run, needs=("bitsandbytes",))


def _part(setting: Setting, name: str, run: Callable[[str], Numbers], **options: Any) -> Part:
    return Part(name=name, run=functools.partial(run, setting.device), seconds=2, **options)


def _is_interpreted() -> bool:
    """Return whether Triton's kernels run without a GPU, slowly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _numbers(times: Times, num_bytes: float) -> Numbers:
    return {
        "device_seconds": times.device,
        "host_seconds": times.host,
        "bytes": round(num_bytes),
        "gb_per_second": num_bytes / times.device / 1e9,
    }


def _made(make: Callable[[], Call], num_bytes: float, device: str) -> list[Call]:
    """Return calls on inputs of their own, enough for none to be found in a cache."""
    return [make() for _ in range(turns(num_bytes, device))]


def _drawn(*sizes: int, device: str, is_leaf: bool = False) -> Tensor:
    return torch.randn(sizes, device=device, dtype=torch.bfloat16, requires_grad=is_leaf)


def _elementwise(shape: tuple[int, int], name: str, device: str) -> Numbers:
    def make() -> Call:
        target, source = (_drawn(*shape, device=device) for _ in range(2))
        return functools.partial(getattr(target, name), source)

    num_bytes = shape[0] * shape[1] * 2 * (2 if name == "copy_" else 3)
    return _numbers(timed(_made(make, num_bytes, device), device), num_bytes)


# --- updates ---------------------------------------------------------------------------------------------------------


def _parameters(elements: int, bytes_of_element: float, device: str) -> list[nn.Parameter]:
    """Return parameters with gradients, together larger than a cache."""
    number = turns(elements * bytes_of_element, device)
    parameters = [nn.Parameter(_drawn(elements, device=device)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = _drawn(elements, device=device)
    return parameters


def _of_updates(optimizer: Any, parameters: Sequence[nn.Parameter], device: str) -> Numbers:
    """Time steps of an optimizer; numbers are those of one parameter."""
    optimizer.step()
    kept = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and not name.startswith("qmap")  # what bitsandbytes' codes mean
    ]
    times = timed([optimizer.step], device, repeats=4)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    num_bytes = 2 * sum(one.nbytes for one in (*parameters, *kept)) + sum(one.nbytes for one in gradients)
    number = len(parameters)
    return _numbers(Times(times.device / number, times.host / number), num_bytes / number)


def _our_update(device: str, *, elements: int, rows_of_tile: int) -> Numbers:
    from lowmem_ft.optimizers.triton import triton_kernel  # imports Triton

    parameters = _parameters(elements, 14.06, device)
    optimizer = ChunkedOptimizer(
        parameters,
        OPTIMIZERS["adamw"].update_rule(),
        {"lr": 1e-5, "weight_decay": 0.0, **OPTIMIZERS["adamw"].hyperparameters},
        state="8bit",
        master="split16",
        seed=0,
    )
    optimizer.kernel = "triton"
    with _set(triton_kernel, "ROWS", rows_of_tile):
        return _of_updates(optimizer, parameters, device)


@contextlib.contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _update_of_bitsandbytes(elements: int, device: str) -> Numbers:
    import bitsandbytes  # pyright: ignore[reportMissingImports]  # an optional package

    parameters = _parameters(elements, 10, device)
    optimizer = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-5, min_8bit_size=0)
    return _of_updates(optimizer, parameters, device)


def _unpacking(shape: tuple[int, int], device: str) -> Numbers:
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    def make() -> Call:
        packed, state = functional.quantize_4bit(_drawn(*shape, device=device), quant_type="nf4")
        return functools.partial(functional.dequantize_4bit, packed, state)

    num_bytes = shape[0] * shape[1] * (0.5 + 4 / 64 + 2)
    return _numbers(timed(_made(make, num_bytes, device), device), num_bytes)


def _clipping(size: Shapes, device: str) -> Numbers:
    parameters = [
        nn.Parameter(_drawn(outputs, inputs, device=device))
        for inputs, outputs in size.linear_layers().values()
    ]
    for parameter in parameters:
        parameter.grad = _drawn(*parameter.shape, device=device)
    times = timed([lambda: clip_grad_norm(parameters, 1.0)], device)
    return _numbers(times, 6 * sum(parameter.numel() for parameter in parameters))


# --- Liger's ---------------------------------------------------------------------------------------------------------


def _norm(size: Shapes, tokens: int, device: str) -> tuple[Call, tuple[Tensor, ...], int, int]:
    from liger_kernel.ops import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

    hidden = _drawn(1, tokens, size.hidden_size, device=device, is_leaf=True)
    weight = _drawn(size.hidden_size, device=device, is_leaf=True)
    run = functools.partial(LigerRMSNormFunction.apply, hidden, weight, 1e-6, 0.0, "llama", False, None)
    return run, (hidden, weight), 2 * hidden.nbytes, 3 * hidden.nbytes


def _swiglu(size: Shapes, tokens: int, device: str) -> tuple[Call, tuple[Tensor, ...], int, int]:
    from liger_kernel.ops import LigerSiLUMulFunction  # pyright: ignore[reportMissingImports]

    gate, up = (_drawn(1, tokens, size.intermediate_size, device=device, is_leaf=True) for _ in range(2))
    return functools.partial(LigerSiLUMulFunction.apply, gate, up), (gate, up), 3 * up.nbytes, 5 * up.nbytes


def _rotary(size: Shapes, tokens: int, device: str) -> tuple[Call, tuple[Tensor, ...], int, int]:
    from liger_kernel.ops import LigerRopeFunction  # pyright: ignore[reportMissingImports]

    heads = (size.num_attention_heads, size.num_key_value_heads)
    query, key = (_drawn(1, tokens, n, size.head_dim, device=device, is_leaf=True) for n in heads)
    cos, sin = (_drawn(1, tokens, size.head_dim, device=device) for _ in range(2))

    def run() -> object:
        return LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), cos, sin, None, 1)

    num_bytes = 2 * (query.nbytes + key.nbytes)
    return run, (query, key), num_bytes, num_bytes


LIGERS = {"norm": _norm, "SwiGLU": _swiglu, "rotary embedding": _rotary}
"""Make a call, its leaves, and the bytes of its forward and of its backward pass."""


def _of_liger(make: Callable[..., Any], size: Shapes, tokens: int, device: str) -> Numbers:
    def forward() -> Call:
        return make(size, tokens, device)[0]

    def backward() -> Call:
        run, leaves, *_ = make(size, tokens, device)
        outputs = [out for out in _as_tuple(run()) if out.requires_grad]
        gradients = [torch.randn_like(output) for output in outputs]
        return functools.partial(torch.autograd.grad, outputs, leaves, gradients, retain_graph=True)

    *_, forward_bytes, backward_bytes = make(size, tokens, device)
    return {
        "forward": _numbers(timed(_made(forward, forward_bytes, device), device), forward_bytes),
        "backward": _numbers(timed(_made(backward, backward_bytes, device), device), backward_bytes),
    }


def _as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


# --- attention and the loss ------------------------------------------------------------------------------------------


def _heads(size: Shapes, device: str, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as ``shape`` with the heads in the place of 0."""
    heads = (size.num_attention_heads, size.num_key_value_heads, size.num_key_value_heads)
    query, key, value = (
        _drawn(*(n or number for n in shape), size.head_dim, device=device, is_leaf=True) for number in heads
    )
    return query, key, value


def _both_passes(run: Callable[[], Tensor], leaves: Sequence[Tensor], flops: float, device: str) -> Numbers:
    output = run()
    d_output = torch.randn_like(output)
    forward = timed([run], device)
    backward = timed([lambda: torch.autograd.grad(output, leaves, d_output, retain_graph=True)], device)
    return {
        "forward_device_seconds": forward.device,
        "backward_device_seconds": backward.device,
        "forward_tflop_per_second": flops / forward.device / 1e12,
        "backward_tflop_per_second": 2.5 * flops / backward.device / 1e12,
    }


def _attention_flops(size: Shapes, rows: int, documents: int) -> float:
    """Return the FLOPs of the causal half of the scores, within documents."""
    length = size.row_tokens // documents
    return 4 * rows * documents * size.num_attention_heads * length**2 * size.head_dim / 2


def _causal(size: Shapes, rows: int, device: str) -> Numbers:
    query, key, value = leaves = _heads(size, device, rows, 0, size.row_tokens)

    def run() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return _both_passes(run, leaves, _attention_flops(size, rows, 1), device)


def _varlen(size: Shapes, rows: int, documents: int, device: str) -> Numbers:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = leaves = _heads(size, device, rows * size.row_tokens, 0)
    length = size.row_tokens // documents
    borders = torch.arange(0, rows * size.row_tokens + 1, length, dtype=torch.int32, device=device)
    # From torch 2.12 on; earlier ones share key heads unasked.
    grouped: Any = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def run() -> Tensor:
        output: Any = varlen_attn(
            query, key, value, borders, borders, length, length, window_size=(-1, 0), **grouped
        )
        return output

    return _both_passes(run, leaves, _attention_flops(size, rows, documents), device)


def _loss(size: Shapes, tokens: int, device: str) -> Numbers:
    """Time the loss of one chunk with its gradients, and the three products in it alone."""
    from lowmem_ft.techniques.loss.linear_cross_entropy import (
        linear_cross_entropy_sum,
    )  # imports transformers

    hidden = _drawn(tokens, size.hidden_size, device=device, is_leaf=True)
    weight = nn.Parameter(_drawn(size.vocab_size, size.hidden_size, device=device) * 0.02)
    labels = torch.randint(size.vocab_size, (tokens,), device=device)
    whole = timed(
        [lambda: linear_cross_entropy_sum(hidden, weight, labels, chunk_tokens=tokens)], device, repeats=8
    )
    with torch.no_grad():
        logits = hidden @ weight.t()
        products = timed(
            [lambda: (hidden @ weight.t(), logits @ weight, logits.t() @ hidden)], device, repeats=8
        )
    num_bytes = 3 * logits.nbytes  # read twice, and the gradient written over them
    others = max(whole.device - products.device, 1e-9)
    return {
        "chunk_tokens": tokens,
        "device_seconds": whole.device,
        "host_seconds": whole.host,
        "products_device_seconds": products.device,
        "bytes_outside_products": num_bytes,
        "gb_per_second_outside_products": num_bytes / others / 1e9,
    }
