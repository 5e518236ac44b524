"""Rows of single kernels that are drawn from clones of public tables."""

from __future__ import annotations

import subprocess

from measuring import kernel_tables
from pyarrow import Table, parquet

REPOSITORY, FOLDER = "ai-dynamo/aiconfigurator", "aic-core/src/aiconfigurator_core/systems/data"


def test_products_are_drawn_from_a_clone_whatever_else_lies_there(tmp_path, monkeypatch):
    clone = tmp_path / REPOSITORY.replace("/", "+")
    tables = clone / FOLDER / "h200_sxm" / "vllm" / "0.10"
    tables.mkdir(parents=True)
    (clone / FOLDER / "README.md").write_text("beside the systems' folders")
    timed = {"gemm_dtype": "bfloat16", "m": 4096, "n": 4096, "k": 4096, "latency": 0.2}
    small = {**timed, "m": 128}
    parquet.write_table(Table.from_pylist([timed, small]), tables / "gemm_perf.parquet")
    (tables / "context_attention_perf.parquet").write_text("version https://git-lfs.github.com/spec/v1")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "tables"],
    ):
        subprocess.run(["git", "-C", clone, *words], check=True)
    monkeypatch.setitem(kernel_tables.TABLES, REPOSITORY, "HEAD")
    (row,) = kernel_tables._aiconfigurator(kernel_tables._Reader(tmp_path))
    assert (row["gpu"], row["source"], row["seconds"]) == ("h200", "aiconfigurator, vLLM", 0.2e-3)
    assert (row["shape"], row["flops"]) == ([1, 4096, 4096, 4096], 2 * 4096**3)
