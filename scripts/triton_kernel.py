"""Cost of the update's Triton kernel on each generation of GPUs, from its compilation; no GPU is needed.

    python scripts/triton_kernel.py --archs 75 80 89 90 100 120

Bytes are those of the global loads and stores in the compiled kernel, per element of its tile. Every thread of a
warp loads the scale of its row, which crosses the bus once; it counts once.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from lowmem_ft.foundation.tensors.operator_costs import registered_cost
from lowmem_ft.optimizers.formats.master_formats import master_format
from lowmem_ft.optimizers.formats.operators import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES
from lowmem_ft.optimizers.formats.state_formats import state_format
from lowmem_ft.optimizers.triton.triton_update import VECTOR

AVERAGES = {"adamw": 2, "lion": 1, "sgd": 1}
MASTERS = ("weight", "fp32", "split16", "split24", "stochastic_rounding", "none")
STATES = (
    ("fp32", "fp32"),
    ("bf16", "bf16"),
    ("8bit", "8bit"),
    ("bf16", "fp32"),
    ("8bit", "bf16"),
    ("fp32", "8bit"),
)
"""Formats of the first and of the second average."""
_POINTERS = {
    ("master", "weight"): "*fp32",
    ("master", "fp32"): "*fp32",
    ("master", "split24"): "*i8",
    ("state", "fp32"): "*fp32",
    ("state", "bf16"): "*i16",
}


@dataclass(frozen=True)
class Compiled:
    """The kernel for one architecture, rule and formats.

    Args:
        registers: registers per thread.
        spilled_bytes: bytes per thread stored in memory for want of registers.
        fused: number of multiplications and additions that are one operation.
        moved_bytes: bytes moved per element.
        least_bytes: bytes per element that the formats require, and that estimates count: all state read and written
            once, the gradient read, and a weight with a float32 copy written.
    """

    registers: int
    spilled_bytes: int
    fused: int
    moved_bytes: float
    least_bytes: float


def compiled(arch: int, rule: str, master: str, states: Sequence[str]) -> Compiled:
    """Compile the kernel with bfloat16 gradients and clipping, for aligned tensors.

    Args:
        arch: compute capability without its point, such as 89.
        rule: ``adamw``, ``lion`` or ``sgd``.
        master: a format, or ``weight`` for float32 weights.
        states: formats of two averages, of which the rule may have one.
    """
    import triton  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    from lowmem_ft.optimizers.triton.triton_kernel import OPTIONS, ROWS, update_chunk

    constants = {
        "RULE": rule,
        "MASTER": master,
        "STATE_0": states[0],
        "STATE_1": states[1] if AVERAGES[rule] > 1 else "none",
        "IS_HALF_GRADIENT": True,
        "HAS_CLIP": True,
        "FROM_END_0": rule == "lion",
        "FROM_END_1": rule == "lion",
        "SIGNED_OCTAVES": SIGNED_OCTAVES,
        "UNSIGNED_OCTAVES": UNSIGNED_OCTAVES,
        "IN_VECTORS": True,
        "VECTOR": VECTOR,
        "ROWS": ROWS,
    }
    types = {
        "weight": "*fp32" if master == "weight" else "*i16",
        "beside": _POINTERS.get(("master", master), "*i16"),
        "gradient": "*i16",
        "clip": "*fp32",
        "values_0": _POINTERS.get(("state", states[0]), "*i8"),
        "scales_0": "*fp32",
        "values_1": _POINTERS.get(("state", states[1]), "*u8"),
        "scales_1": "*fp32",
        "num_elements": "i32",
        **dict.fromkeys(("element", "key_of_weight", "key_0", "key_1"), "i64"),
        **{f"c{number}": "fp32" for number in range(8)},
        **dict.fromkeys(constants, "constexpr"),
    }
    names, kernel = list(types), cast(Any, update_chunk)
    aligned = [
        name
        for name, param in zip(types, kernel.params, strict=True)
        if types[name].startswith("*") and not param.do_not_specialize_on_alignment
    ]
    source = ASTSource(
        update_chunk,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS).asm["ptx"]
    registers, spilled_bytes = usage(ptx, arch, "--fmad=false")
    return Compiled(
        registers=registers,
        spilled_bytes=spilled_bytes,
        fused=len(re.findall(r"\bfma\.", ptx)),
        moved_bytes=_moved_bytes(ptx, ROWS, 32 * OPTIONS["num_warps"]),
        least_bytes=_counted_bytes(rule, master, states),
    )


def _counted_bytes(rule: str, master: str, states: Sequence[str]) -> float:
    """Return the bytes that a trace counts per element, with bfloat16 gradients."""
    num_elements = 2**16
    dtype = torch.float32 if master == "weight" else torch.bfloat16

    def made(sizes: Iterable[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        return [torch.empty(size, dtype=kind, device="meta") for size, kind in sizes]

    weight, gradient = made([(num_elements, dtype), (num_elements, torch.bfloat16)])
    beside = made(
        (num_elements, kind)
        for kind in master_format("fp32" if master == "weight" else master, dtype).tensors.values()
    )
    averages = [
        made(state_format(state, signed=number == 0).tensors("average", num_elements).values())
        for number, state in enumerate(states[: AVERAGES[rule]])
    ]
    cost = registered_cost(torch.ops.lowmem_ft.update_in_triton.default)
    assert cost is not None
    moved_bytes = cost.moved_bytes(
        weight,
        beside[0] if beside else None,
        [values for values, *_ in averages],
        [scale for _, *scales in averages for scale in scales],
        gradient,
        None,
        master,
    )
    return moved_bytes / num_elements


def usage(ptx: str, arch: int, *options: str) -> tuple[int, int]:
    """Return the registers of a thread and the bytes that it spills, as ptxas reports them.

    Args:
        ptx: a kernel's code.
        arch: compute capability without its point.
        options: more options of ptxas.
    """
    from triton.backends.nvidia.compiler import get_ptxas  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = _found(r"\.target (\w+)", ptx) or f"sm_{arch}"
        command = [
            get_ptxas(arch).path,
            "-v",
            *options,
            f"--gpu-name={target}",
            source,
            "-o",
            f"{folder}/kernel.cubin",
        ]
        child = subprocess.run(command, capture_output=True, text=True)
    if child.returncode != 0:
        raise RuntimeError(f"ptxas ended with {child.returncode}: {child.stderr.strip()}")
    report = child.stderr
    return int(_found(r"Used (\d+) registers", report)), int(_found(r"(\d+) bytes spill stores", report))


def _moved_bytes(ptx: str, rows: int, threads: int) -> float:
    """Return bytes of global loads and stores per element."""
    total = 0
    for vector, bits in re.findall(r"\b(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)\s", ptx):
        # A thread has 8 elements and reads them 8 bytes at a time or more; only 4 bytes are a scale, or the clip
        # factor.
        total += int(vector) * int(bits) // 8 * threads if vector else rows * 4
    return total / (rows * BLOCK)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"Nothing like {pattern} in what the compiler said: {text[:500]}")
    return match[1]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--archs", nargs="+", type=int, default=[75, 80, 89, 90, 100, 120])
    parser.add_argument("--rules", nargs="+", default=list(AVERAGES), choices=list(AVERAGES))
    given = parser.parse_args()
    print("arch rule  master              state     registers spills fma   bytes  least")
    for arch, rule, master, states in itertools.product(given.archs, given.rules, MASTERS, STATES):
        found = compiled(arch, rule, master, states)
        print(
            f"{arch:4} {rule:5} {master:19} {'/'.join(states):9} {found.registers:9} {found.spilled_bytes:6} "
            f"{found.fused:3} {found.moved_bytes:7.2f} {found.least_bytes:6.2f}"
        )


if __name__ == "__main__":
    main()
