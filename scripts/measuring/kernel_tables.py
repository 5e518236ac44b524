"""Draw rows of single kernels from public tables: the same files give the same rows.

Each table is read from a clone of its repository at one commit (:data:`TABLES`). Of long tables a sample is drawn, by
GPU and sizes, with a seed; of short ones all rows that are large enough to time are taken. No row is changed: bytes and
operations follow from the sizes that the table gives.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu

Row = dict[str, Any]
T = TypeVar("T")

TABLES = {
    "ai-dynamo/aiconfigurator": "095f58a51c",
    "sitar-lab/NeuSight": "6945927d9a",
    "microsoft/vidur": "7d47513363",
    "linkedin/Liger-Kernel": "ead96b618e",
    "NVIDIA/cudnn-frontend": "3929da2ef4",
    "zzc0721/torch-performance-test-data": "9d82827637",
    "mag-/gpu_benchmark": "93322b7f22",
    "chsasank/device-benchmarks": "7ccc88389b",
    "mli/transformers-benchmarks": "3370b2b3a0",
}
"""Repositories, and the commit of each."""

_SEED = 1
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
_SYSTEMS = {
    "a100_sxm": "a100-80gb",
    "h100_sxm": "h100-80gb",
    "h200_sxm": "h200",
    "b200_sxm": "b200",
    "l40s": "l40s",
    "rtx_pro_6000_server": "rtx-pro-6000-blackwell",
}
_CACHES = {
    "a100-80gb": 40e6,
    "h100-80gb": 50e6,
    "h200": 50e6,
    "b200": 126e6,
    "l40s": 96e6,
    "rtx-pro-6000-blackwell": 128e6,
}
"""Bytes of the L2 cache of the boards whose rows may be of operands in it."""
_DEVICES = {
    "NVIDIA A100 80GB PCIe": "a100-80gb-pcie",
    "NVIDIA A100-PCIE-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA L4": "l4",
    "Tesla T4": "t4",
    "Tesla V100-PCIE-32GB": "v100-32gb",
}
_LEAST_SECONDS = 15e-6
_OF_A_FILE = 2000


def drawn_rows(clones: Path) -> Iterator[Row]:
    """Yield the rows of every table.

    Args:
        clones: folder with a clone of each repository of :data:`TABLES`, bare or not, as ``owner+name``.
    """
    read = _Reader(clones)
    yield from _aiconfigurator(read)
    yield from _neusight(read)
    yield from _vidur(read)
    yield from _liger(read)
    yield from _cudnn(read)
    yield from _largest_products(read)


class _Reader:
    """Reads files of the clones at their commits."""

    def __init__(self, clones: Path) -> None:
        self._clones = clones

    def _git(self, repository: str, *words: str) -> bytes:
        clone = self._clones / repository.replace("/", "+")
        return subprocess.run(["git", "-C", clone, *words], check=True, capture_output=True).stdout

    def bytes_of(self, repository: str, path: str) -> bytes:
        """Return a file."""
        return self._git(repository, "show", f"{TABLES[repository]}:{path}")

    def csv_of(self, repository: str, path: str) -> list[dict[str, str]]:
        """Return the rows of a table."""
        return list(csv.DictReader(io.StringIO(self.bytes_of(repository, path).decode())))

    def markdown_of(self, repository: str, path: str) -> Iterator[list[str]]:
        """Yield the cells of each line of a page's tables."""
        for line in self.bytes_of(repository, path).decode().splitlines():
            if line.startswith("|"):
                yield [cell.strip() for cell in line.split("|")[1:-1]]

    def paths_of(self, repository: str, folder: str) -> list[str]:
        """Return the files in a folder, in order."""
        listed = self._git(repository, "ls-tree", "-r", "--name-only", TABLES[repository], folder)
        return sorted(listed.decode().splitlines())


def _sample(rows: Iterable[T], number: int) -> list[T]:
    """Return that many of some rows, whatever order they have."""
    ordered = sorted(rows, key=repr)
    return random.Random(_SEED).sample(ordered, min(number, len(ordered)))


def _grouped(rows: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(sorted(groups.items()))


def _product(
    source: str, gpu: str, dtype: str, shape: Sequence[int], seconds: float, op: str = "linear"
) -> Row:
    number, rows, columns, inner = shape
    size = {"float8_e4m3fn": 1, "float32": 4, "tf32": 4}.get(dtype, 2)
    written = max(2, size)
    moved = number * (size * (rows * inner + inner * columns) + written * rows * columns)
    flops = 2 * number * rows * columns * inner
    return {**_row("products", op, source, gpu, dtype, shape, moved, seconds), "flops": flops}


def _row(
    kind: str, op: str, source: str, gpu: str, dtype: str, shape: Sequence[int], moved: float, seconds: float
) -> Row:
    return {
        "kind": kind,
        "op": op,
        "source": source,
        "gpu": gpu,
        "dtype": dtype,
        "shape": list(shape),
        "flops": 0,
        "bytes": round(moved),
        "seconds": float(f"{seconds:.5g}"),
    }


def _attention(
    source: str, gpu: str, op: str, sizes: tuple[int, int, int, int, int], *, causal: bool, seconds: float
) -> Row:
    """Return a row of attention by batch, heads, heads of keys, length and size of a head."""
    batch, heads, key_heads, length, size = sizes
    backward = op == "backward"
    keys = length // 2 if causal else length
    moved = 2 * batch * length * size * (2 if backward else 1) * (2 * heads + 2 * key_heads)
    row = _row(
        "attention backward" if backward else "attention",
        op + ", causal" * causal,
        source,
        gpu,
        "bfloat16",
        (batch * heads, length, keys, size),
        moved,
        seconds,
    )
    return {**row, "flops": 2 * (5 if backward else 2) * batch * heads * length * keys * size}


def _aiconfigurator(read: _Reader) -> Iterator[Row]:
    """Serving engines' products and forward attention; what fits into the L2 cache is left out."""
    from pyarrow import parquet  # comes with datasets

    repository, folder = "ai-dynamo/aiconfigurator", "aic-core/src/aiconfigurator_core/systems/data"
    products: list[Row] = []
    attentions: list[tuple[int, Row]] = []
    for path in read.paths_of(repository, folder):
        parts = path.removeprefix(folder + "/").split("/")
        system, name = parts[0], parts[-1].removesuffix(".parquet")
        if system not in _SYSTEMS or name not in ("gemm_perf", "context_attention_perf"):
            continue
        engine = parts[-3]  # its version follows
        gpu, source = _SYSTEMS[system], f"aiconfigurator, {_ENGINES[engine]}"
        content = read.bytes_of(repository, path)
        if content.startswith(b"version "):  # a pointer to a large file
            continue
        timed = parquet.read_table(io.BytesIO(content)).to_pylist()
        for row in _sample(
            (row for row in timed if (row["latency"] or 0.0) / 1e3 > _LEAST_SECONDS), _OF_A_FILE
        ):
            seconds = row["latency"] / 1e3
            if name == "gemm_perf":
                products += _engine_product(source, gpu, row, seconds)
            else:
                attentions += _engine_attention(source, gpu, row, seconds)
    for (_, _, dtype), rows in _grouped(
        products, lambda row: (row["gpu"], row["source"], row["dtype"])
    ).items():
        yield from _sampled_products(rows, few=dtype != "bfloat16")
    for group in _grouped(attentions, lambda pair: (pair[1]["gpu"], pair[1]["source"], pair[0])).values():
        yield from _sample([row for _, row in group], 2)


def _engine_product(source: str, gpu: str, row: Row, seconds: float) -> Iterator[Row]:
    dtype = {"bfloat16": "bfloat16", "fp8": "float8_e4m3fn"}.get(row["gemm_dtype"])
    if dtype is None or row["m"] < 256 or row["m"] % 2:
        return
    found = _product(source, gpu, dtype, (1, row["m"], row["n"], row["k"]), seconds)
    spec = find_gpu(gpu)
    peak = spec.dense_flops["bfloat16"] * (2 if dtype.startswith("float8") else 1)
    is_warm = found["bytes"] < _CACHES[gpu] and found["bytes"] / spec.bandwidth > found["flops"] / peak
    if not is_warm:
        yield found


def _sampled_products(rows: list[Row], *, few: bool) -> Iterator[Row]:
    """Draw from products of ordinary sizes, and if there are more to draw, from those with a short side."""
    short = 256
    classes: dict[str, list[Row]] = {"ordinary": [], "columns": [], "inner": []}
    for row in rows:
        _, _, columns, inner = row["shape"]
        if inner <= short:
            classes["inner"].append(row)
        elif columns <= short:
            classes["columns"].append(row)
        elif inner <= 16384 and columns <= 65536:
            classes["ordinary"].append(row)
    yield from _sample(classes["ordinary"], 4 if few else 8)
    if not few:
        yield from _sample(classes["columns"], 2)
        yield from _sample(classes["inner"], 2)


def _engine_attention(source: str, gpu: str, row: Row, seconds: float) -> Iterator[tuple[int, Row]]:
    """Yield the row with the class of its length."""
    is_plain = (row["attn_dtype"], row["kv_cache_dtype"], row["step"]) == ("bfloat16", "bfloat16", 0)
    batch, heads, length = row["batch_size"], row["num_heads"], row["isl"]
    if not is_plain or row.get("window_size") or row["head_dim"] not in (64, 128):
        return
    if heads < 8 or length < 128 or batch * length > 65536:
        return
    sizes = batch, heads, row["num_key_value_heads"], length, row["head_dim"]
    found = _attention(source, gpu, "forward", sizes, causal=True, seconds=seconds)
    if found["flops"] / seconds < find_gpu(gpu).dense_flops["bfloat16"]:  # a window is not always named
        yield sum(length > bound for bound in (300, 700, 1500, 3000, 6000)), found


def _neusight(read: _Reader) -> Iterator[Row]:
    """Products in float32 without TF32, element-wise kernels and reductions."""
    wanted = {
        "linear": (6, 50e-6),
        "bmm": (4, 50e-6),
        "elem": (8, 20e-6),
        "softmax": (4, 20e-6),
        "ln": (4, 20e-6),
    }
    names = {
        "ln": "layer norm",
        "addu": "add a number",
        "mulu": "multiply by a number",
        "divu": "divide by a number",
    }
    for table, (number, least) in wanted.items():
        rows = read.csv_of("sitar-lab/NeuSight", f"scripts/asplos/data/dataset/test/{table}.csv")
        kept = [
            row
            for row in rows
            if row["Device"] in _DEVICES
            and float(row["Latency"] or 0) / 1e3 > least
            and row["OPName"] not in ("pow", "powu")
        ]
        for device, of_device in _grouped(kept, lambda row: row["Device"]).items():
            for row in _sample(of_device, number):
                seconds, gpu = float(row["Latency"]) / 1e3, _DEVICES[device]
                if table in ("linear", "bmm"):
                    shape = [int(float(row[side])) for side in "BMNK"]
                    yield _product("NeuSight", gpu, "float32", shape, seconds, op=table)
                    continue
                kind = "element-wise" if table == "elem" else "reductions"
                shape = [int(float(row[side])) for side in "BH"]
                tensors = 3 if row["OPName"] in ("add", "mul", "div") else 2
                op = names.get(row["OPName"], row["OPName"])
                moved = 4 * tensors * shape[0] * shape[1]
                yield _row(kind, op, "NeuSight", gpu, "float32", shape, moved, seconds)


def _vidur(read: _Reader) -> Iterator[Row]:
    """Products of a layer by the columns of its model."""
    models = ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-70b-hf", "microsoft/phi-2")
    for folder, gpu in (("a100", "a100-80gb"), ("a40", "a40"), ("h100", "h100-80gb")):
        for model in models:
            rows = read.csv_of("microsoft/vidur", f"data/profiling/compute/{folder}/{model}/mlp.csv")
            whole = {int(row["num_tokens"]): row for row in rows if row["num_tensor_parallel_workers"] == "1"}
            for tokens, op in ((512, "attn_pre_proj"), (2048, "mlp_up_proj"), (4096, "mlp_down_proj")):
                row = whole[tokens]
                hidden, inner = int(row["n_embd"]), int(row["n_expanded_embd"])
                keys = hidden * int(row["n_kv_head"]) // int(row["n_head"])
                up = inner * (2 if row["use_gated_mlp"] == "True" else 1)
                sides = {
                    "attn_pre_proj": (hidden + 2 * keys, hidden),
                    "mlp_up_proj": (up, hidden),
                    "mlp_down_proj": (hidden, inner),
                }
                seconds = float(row[f"time_stats.{op}.median"]) / 1e3
                yield _product("Vidur", gpu, "float16", (1, tokens, *sides[op]), seconds, op=op)


def _liger(read: _Reader) -> Iterator[Row]:
    """Liger's kernels alone: not with their launch, which decides short backward passes, nor both passes at once."""
    for row in read.csv_of("linkedin/Liger-Kernel", "benchmark/data/all_benchmark_data.csv"):
        mode, kernel, number = (
            row["kernel_operation_mode"],
            row["kernel_name"],
            row["x_value"].replace(".", ""),
        )
        is_timed = row["metric_name"] == "speed" and row["gpu_name"] in _DEVICES and row["y_value_50"]
        if not is_timed or mode == "full" or row["kernel_provider"] not in ("liger", f"liger_{kernel}"):
            continue
        seconds, backward = float(row["y_value_50"]) / 1e3, mode == "backward"
        if seconds < (250e-6 if backward else 12e-6) or (backward and "megatron" in kernel):
            continue
        config = json.loads(row["extra_benchmark_config_str"])
        size = 4 if config.get("dtype") == "torch.float32" else 2
        x = int(float(row["x_value"])) if number.isdigit() else 0
        found = _liger_sizes(kernel, config, x, row["x_name"], backward=backward)
        if found is None:
            continue
        tensors, shape = found
        kind = "fused backward kernels" if backward else "fused kernels"
        if "cross_entropy" in kernel:
            kind, size = "cross entropy", 4 if kernel == "cross_entropy" else size
        moved = tensors * shape[0] * shape[1] * size
        dtype = {2: "bfloat16", 4: "float32"}[size]
        yield _row(
            kind, f"{kernel}, {mode}", "Liger", _DEVICES[row["gpu_name"]], dtype, shape, moved, seconds
        )


def _liger_sizes(
    kernel: str, config: Row, x: int, axis: str, *, backward: bool
) -> tuple[int, tuple[int, int]] | None:
    """Return tensors that a kernel reads and writes, and rows and columns of one."""
    norms = {"rms_norm", "layer_norm", "relu_squared"}
    if kernel in norms:
        return (3 if backward else 2), (config["M"], x)
    if kernel == "fused_add_rms_norm":
        return 4, (config["M"], x)
    if kernel == "softmax" and not backward:
        return 2, (config["M"], x)
    if kernel == "cross_entropy" and not backward:
        return 3, (config["B"] * config["T"], x)
    if kernel == "megatron_cross_entropy" and not backward and config["TP"] == 1:
        return 3, (config["S"] * config["B"], x)
    if kernel in ("megatron_rms_norm", "megatron_swiglu"):
        return (2 if "norm" in kernel else 3), (config["S"] * config["B"], x)
    if kernel == "rope":  # keys have a quarter of the queries' heads
        length, hidden = (x, config["hidden_size"]) if axis == "T" else (config["seq_len"], x)
        return 2, (length, hidden * 5 // 4)
    return None


def _cudnn(read: _Reader) -> Iterator[Row]:
    """CuDNN's attention, forward and backward, and torch's fused norms, of an H200."""
    repository, source = "NVIDIA/cudnn-frontend", "cuDNN frontend"
    (path,) = (
        path
        for path in read.paths_of(repository, "benchmark/sdpa_benchmark_training/results/h200_919_only_cudnn")
        if path.endswith(".csv") and "llama3.1" in path
    )
    for row in read.csv_of(repository, path):
        if row["data_type"] != "bfloat16" or row["success"] != "True":
            continue
        batch, heads, key_heads, length, size = (
            int(row[name])
            for name in ("batch_size", "num_q_heads", "num_kv_heads", "q_seqlen", "head_dim_qk")
        )
        for op, column in (("forward", "fwd_time_ms"), ("backward", "bwd_time_ms")):
            yield _attention(
                source,
                "h200",
                op,
                (batch, heads, key_heads, length, size),
                causal=row["attn_mask"] == "top_left",
                seconds=float(row[column]) / 1e3,
            )
    (path,) = (
        path for path in read.paths_of(repository, "benchmark/norms/results/h200") if path.endswith(".csv")
    )
    for row in read.csv_of(repository, path):
        if row["backend"] != "pytorch" or row["success"] != "True":
            continue
        shape = int(row["N"]), int(row["C"])
        for op, tensors, column in (("forward", 2, "fwd_time_ms"), ("backward", 3, "bwd_time_ms")):
            seconds = float(row[column]) / 1e3
            moved = 2 * tensors * shape[0] * shape[1]
            if moved > _CACHES["h200"]:
                op = f"{row['norm_type'].replace('_', ' ')}, {op}"
                yield _row("reductions", op, source, "h200", "bfloat16", shape, moved, seconds)


_BOARDS = {
    "b200 180gb": "b200",
    "tesla t4 16gb": "t4",
    "t4": "t4",
    "a100 40gb": "a100-40gb",
    "a100-pcie-40gb": "a100-40gb",
    "a100 sxm4 80gb": "a100-80gb",
    "a100 sxm": "a100-80gb",
    "a100 80gb": "a100-80gb",
    "a100 pcie": "a100-80gb-pcie",
    "a100": "a100-80gb",
    "rtx 3060 12 gb": "rtx-3060",
    "3060 12 gb": "rtx-3060",
    "rtx 3070 8gb": "rtx-3070",
    "rtx 3080 ti 12gb": "rtx-3080-ti",
    "rtx 3080 ti": "rtx-3080-ti",
    "rtx 3080 10gb": "rtx-3080",
    "rtx 3090 24gb": "rtx-3090",
    "rtx 3090": "rtx-3090",
    "3090": "rtx-3090",
    "rtx 3090 ti": "rtx-3090-ti",
    "3090 ti": "rtx-3090-ti",
    "rtx 4060": "rtx-4060",
    "rtx 4060 ti 16gb": "rtx-4060-ti-16gb",
    "rtx 4070 ti super": "rtx-4070-ti-super",
    "rtx 4070 ti super 16gb": "rtx-4070-ti-super",
    "4070 ti super": "rtx-4070-ti-super",
    "rtx 4090 24gb": "rtx-4090",
    "rtx 4090": "rtx-4090",
    "4090": "rtx-4090",
    "rtx 5060 ti": "rtx-5060-ti-16gb",
    "rtx 5070": "rtx-5070",
    "rtx 5070 ti": "rtx-5070-ti",
    "5070 ti": "rtx-5070-ti",
    "rtx 5080": "rtx-5080",
    "rtx 5090 32gb": "rtx-5090",
    "rtx 5090": "rtx-5090",
    "rtx pro 6000 blackwell server edition": "rtx-pro-6000-blackwell",
    "rtx pro 6000 workstation 96g": "rtx-pro-6000-blackwell",
    "h100 80gb hbm3": "h100-80gb",
    "h100 sxm 80gb": "h100-80gb",
    "h100 pcie": "h100-pcie",
    "h100-pcie 80gb": "h100-pcie",
    "h200": "h200",
    "l4": "l4",
    "l4 24gb": "l4",
    "l40": "l40",
    "l40s": "l40s",
    "a10 24gb": "a10",
    "a10g": "a10g",
    "rtx a4000": "rtx-a4000",
    "rtx a5000": "rtx-a5000",
    "rtx a6000": "rtx-a6000",
    "a6000": "rtx-a6000",
    "rtx 6000 ada generation": "rtx-6000-ada",
    "tesla v100-sxm2-16gb": "v100-16gb",
    "v100-sxm2-16gb": "v100-16gb",
    "tesla v100-sxm2-32gb": "v100-32gb",
    "v100 32gb": "v100-32gb",
    "v100": "v100-32gb",
}
"""Boards of the catalogue by their names in tables, each on purpose: with more memory they are others' rebuilds."""


def _board(name: str) -> str | None:
    """Return a board's name in the catalogue; None if it is not there, or could be two."""
    plain = re.sub(r"nvidia|geforce|\*", "", name.lower())
    return _BOARDS.get(" ".join(plain.split()))


def _largest_products(read: _Reader) -> Iterator[Row]:
    """The fastest of some large products on each board, and copies of large tensors."""
    for cells in read.markdown_of("zzc0721/torch-performance-test-data", "database.md"):
        gpu = _board(cells[0])
        for column, dtype in ((1, "float32"), (3, "float16"), (4, "bfloat16")):
            yield from _largest("zzc0721", gpu, dtype, (8192, 8192, 8192), cells[column])
    for cells in read.markdown_of("mag-/gpu_benchmark", "README.md"):
        if re.fullmatch(r"\d+x\d+x\d+", cells[1]):
            sides = [int(side) for side in cells[1].split("x")]
            yield from _largest("mag-", _board(cells[0]), "bfloat16", sides, cells[2])
    for cells in read.markdown_of("chsasank/device-benchmarks", "README.md"):
        if len(cells) != 7:
            continue
        gpu, side = _board(cells[0]), 4096
        for column, dtype in ((2, "float32"), (3, "float16"), (4, "bfloat16")):
            yield from _largest("chsasank", gpu, dtype, (side, side, side), cells[column])
        if gpu is not None and cells[6]:
            moved = 2**28
            yield _row(
                "element-wise",
                "copy",
                "chsasank",
                gpu,
                "float32",
                (2**25,),
                moved,
                moved / float(cells[6]) / 1e9,
            )
    heads: list[str] = []
    for cells in read.markdown_of("mli/transformers-benchmarks", "README.md"):
        heads = heads or cells
        if cells[0].startswith("Matrix Multiplication"):
            for head, cell in zip(heads[1:], cells[1:], strict=True):
                yield from _largest("mli", _board(head), "float16", (8192, 8192, 8192), cell.split("/")[1])


def _largest(source: str, gpu: str | None, dtype: str, sides: Sequence[int], teraflops: str) -> Iterator[Row]:
    """Yield one product; a board without tensor cores for a type says nothing about those that have them."""
    if gpu is None or not re.fullmatch(r"\s*[\d.]+\s*", teraflops) or dtype not in find_gpu(gpu).dense_flops:
        return
    flops = 2 * sides[0] * sides[1] * sides[2]
    yield _product(source, gpu, dtype, (1, *sides), flops / float(teraflops) / 1e12, op="largest of a search")
