"""Write a table into ``docs/several_gpus.md``: the techniques that work past one GPU, with evidence.

    python scripts/engine_table.py

The recipe's own rules decide whether a technique is refused. The evidence that it works is named here; a test compares
the page with this script, and the names with the tests that they refer to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import marked_table
from command_line import rewrite_page

from lowmem_ft.foundation.errors import RecipeError
from lowmem_ft.foundation.knob import ENGINES, Engine
from lowmem_ft.recipe import load_recipe

PAGE = Path(__file__).parents[1] / "docs" / "several_gpus.md"
TESTS: dict[Engine, str] = {
    "ddp": "tests/training/test_ddp.py",
    "fsdp2": "tests/training/test_fsdp2.py",
    "zero2": "tests/training/test_deepspeed.py",
    "zero3": "tests/training/test_deepspeed.py",
}
"""Tests that run each engine over gloo. A proof is a case of `CASES` there."""

HEADER = f"| technique | {' | '.join(ENGINES)} | why it is refused |\n|{'---|' * (len(ENGINES) + 2)}\n"
TRACE = "a trace, no GPU test run yet"
"""The proof of techniques that are estimated, and that neither a CPU nor a test so far could run."""

NOT_SHOWN = "allowed, not shown"
_NOT_WITH_DEEPSPEED = "has not been shown to work with DeepSpeed"


@dataclass(frozen=True)
class Row:
    """One technique.

    Args:
        name: its common name.
        settings: overrides of a recipe that switch it on; they work in one process.
        proofs: by engine, the case or test that shows it; an engine that is not named has no proof.
        why: the reason of the engines that refuse it, except for "not shown with DeepSpeed".
    """

    name: str
    settings: str
    proofs: Mapping[Engine, str] = field(default_factory=dict)
    why: str = ""

    def refusal(self, engine: Engine) -> str | None:
        """Return the message by which the recipe's rules refuse the technique with an engine, if they do.

        Raises:
            RecipeError: if they refuse it even in one process, which makes this row meaningless.
        """
        settings = self.settings.split()
        load_recipe("tiny", settings)
        try:
            load_recipe("tiny", [*settings, f"distributed.strategy={engine}"])
        except RecipeError as error:
            return str(error)
        return None


def _both(case: str) -> Mapping[Engine, str]:
    return {"ddp": case, "fsdp2": case}


def _all(case: str) -> Mapping[Engine, str]:
    return dict.fromkeys(ENGINES, case)


_OF_FSDP2 = "it is an option of fsdp2"
_SHARDS_ARE_PARTS = "bitsandbytes steps over whole parameters"
ROWS = (
    Row("checkpointing, every layer", "checkpointing.mode=full", _all("plain")),
    Row("checkpointing, selective", "checkpointing.mode=selective", _all("checkpointing.mode=selective")),
    Row("no checkpointing", "checkpointing.mode=none", _all("checkpointing.mode=none")),
    Row("chunked loss", "loss.chunk_tokens=64", _all("plain")),
    Row("all logits at once", "loss.chunk_tokens=null", _all("loss.chunk_tokens=null")),
    Row(
        "tiled MLP",
        "tiling.mlp=2",
        {**_both("tiling"), "zero2": "tiling"},
        "ZeRO-3 gathers a layer's weights for its own backward, and a tile's is another",
    ),
    Row("tiled head", "tiling.head=3", _all("tiling.head")),
    Row("activations on the host", "offload.activations=inputs", _all("offload.activations=inputs")),
    Row(
        "optimizer on the host",
        "offload.optimizer=host",
        _both("offload.optimizer=host"),
        "DeepSpeed has an optimizer of its own",
    ),
    Row(
        "update in backward",
        "accumulation.order=vertical optimizer.in_backward=true",
        {"fsdp2": "optimizer.in_backward"},
        "gradients of processes are averaged after backward",
    ),
    Row("vertical accumulation", "accumulation.order=vertical", _all("accumulation.order=vertical")),
    Row(
        "streamed frozen weights",
        "adapter.name=lora offload.parameters=stream",
        why="streaming is of one process, which has the whole model on its host",
    ),
    Row("optimizer state in bfloat16", "optimizer.state=bf16", _both("optimizer.state=bf16")),
    Row("optimizer state in 8 bits", "optimizer.state=8bit", _both("optimizer.state=8bit")),
    Row("bfloat16 weights, master fp32", "model.dtype=bfloat16", _all("optimizer.master=fp32")),
    *(
        Row(
            f"bfloat16 weights, master {master}",
            f"model.dtype=bfloat16 optimizer.master={master}",
            _both(f"optimizer.master={master}"),
        )
        for master in ("split16", "split24", "stochastic_rounding", "none")
    ),
    Row(
        "sums of gradients in bfloat16",
        "model.dtype=bfloat16 accumulation.dtype=weights",
        _both("accumulation.dtype=weights"),
    ),
    Row("mixed precision, bfloat16", "training.mixed_precision=bf16", _both("mixed_precision=bf16")),
    Row("Lion", "optimizer.name=lion", _both("optimizer.name=lion")),
    Row("SGD", "optimizer.name=sgd", _both("optimizer.name=sgd")),
    Row(
        "Adafactor",
        "optimizer.name=adafactor",
        {"ddp": "optimizer.name=adafactor"},
        "it measures whole parameters",
    ),
    Row(
        "bitsandbytes, 8-bit AdamW",
        "optimizer.name=adamw_bnb_8bit",
        {"ddp": "optimizer.name=adamw_bnb_8bit"},
        _SHARDS_ARE_PARTS,
    ),
    Row("bitsandbytes, paged", "optimizer.name=paged_adamw_8bit", {}, _SHARDS_ARE_PARTS),
    Row("Liger's operators", "model.kernels=liger", _both("model.kernels"), "DeepSpeed has not been tried"),
    Row("LoRA", "adapter.name=lora", _all("lora")),
    Row("QLoRA, NF4", "adapter.name=lora model.quantization=nf4", _all("qlora")),
    Row(
        "LoRA on int8",
        "adapter.name=lora model.quantization=int8",
        {"ddp": "model.quantization=int8"},
        "its weights were not shown cut by rows; NF4's were",
    ),
    Row(
        "weights and state on the host",
        "distributed.cpu_offload=true",
        {"fsdp2": TRACE, "zero2": "cpu_offload", "zero3": "cpu_offload"},
        "processes of ddp hold everything on their devices",
    ),
    Row(
        "weights kept gathered",
        "distributed.reshard_after_forward=false",
        {"fsdp2": "reshard_after_forward=false"},
        _OF_FSDP2,
    ),
    Row(
        "gradients cut once a step",
        "distributed.sync_each_batch=false",
        {"fsdp2": "sync_each_batch=false"},
        _OF_FSDP2,
    ),
)
"""The page's techniques, in its order."""


def with_table(page: str) -> str:
    """Return a page with the current table between its marks."""
    return marked_table.with_table(page, "engine_table.py", HEADER + "".join(map(_line, ROWS)))


def _line(row: Row) -> str:
    cells = (_cell(row, engine) for engine in ENGINES)
    return f"| {row.name}: {_code(row.settings)} | {' | '.join(cells)} | {row.why} |\n"


def _code(settings: str) -> str:
    return " ".join(f"`{setting}`" for setting in settings.split())


def _cell(row: Row, engine: Engine) -> str:
    refusal = row.refusal(engine)
    if refusal is None:
        proof = row.proofs.get(engine, NOT_SHOWN)
        return proof if proof in (TRACE, NOT_SHOWN) else f"`{proof}`"
    return "refused, not shown" if is_for_want_of_proof(refusal) else "refused"


def is_for_want_of_proof(refusal: str) -> bool:
    """Return whether a refusal says only that the technique was not shown to work with DeepSpeed."""
    problems = [line for line in refusal.splitlines() if ", got " in line]
    return all(_NOT_WITH_DEEPSPEED in problem for problem in problems)


if __name__ == "__main__":
    rewrite_page(__doc__, PAGE, with_table)
