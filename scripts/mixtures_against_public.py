"""Compare estimates of mixtures with published peaks of runs with their settings, and write the table into a page.

    python scripts/mixtures_against_public.py

The runs are those of experts4bit-qlora (github.com/pjordanandrsn/experts4bit-qlora: docs/OLMOE_EXPERTSNBIT_GRID.md, and
the description of its release 0.58.1). Their training loop is their own, so that a recipe has their settings and not
their layout; each row says what they store otherwise. It takes a minute without a GPU, and writes into
``docs/estimating.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from command_line import parser_of
from marked_table import put_table, table_of

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe

PAGE = Path(__file__).parent.parent / "docs" / "estimating.md"

EXPERTS = "adapter.target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]"
COMMON = (
    "model.dtype=bfloat16",
    "adapter.name=lora",
    "adapter.target_modules=[q_proj, k_proj, v_proj, o_proj]",
    EXPERTS,
    "data=any",
    "data.packing=false",
    "training.mixed_precision=bf16",
    "training.per_device_train_batch_size=1",
    "optimizer.name=adamw",
    "checkpointing.mode=full",
)
OLMOE = (
    "model=olmoe-1b-7b",
    "adapter.r=8",
    "adapter.lora_alpha=16",
    "data.max_length=256",
    "training.gradient_accumulation_steps=4",
    "loss.chunk_tokens=null",
)
QWEN = (
    "model=qwen3-30b-a3b",
    "model.quantization=nf4",
    "adapter.r=16",
    "data.max_length=2048",
    "training.gradient_accumulation_steps=8",
    "offload.parameters=stream",
    "optimizer.state=8bit",
    "loss.chunk_tokens=1024",
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published run.

    Args:
        name: what it trained.
        gpu: a GPU of the catalogue with the memory and architecture of theirs.
        settings: a recipe with its settings.
        gigabytes: the most that it allocated, in units of 10^9 bytes.
        otherwise: what it stores otherwise.
    """

    name: str
    gpu: str
    settings: Sequence[str]
    gigabytes: float
    otherwise: str


_BFLOAT16 = "adapters and AdamW's state in bfloat16 (-0.49 GB)"

RUNS = [
    Published(
        name=f"OLMoE-1B-7B, {name}",
        gpu="rtx-a5000",
        settings=(*OLMOE, f"model.quantization={quantization}"),
        gigabytes=gigabytes,
        otherwise=otherwise,
    )
    for name, quantization, gigabytes, otherwise in (
        ("nf4", "nf4", 5.28, f"{_BFLOAT16}; attention in bfloat16 (+0.40), float32 scales (+0.30)"),
        ("int8", "int8", 8.50, f"{_BFLOAT16}; attention in bfloat16 (+0.27), scales of 64 weights (+0.39)"),
        ("bfloat16", "none", 14.54, _BFLOAT16),
    )
]
RUNS.append(
    Published(
        name="Qwen3-30B-A3B, nf4, weights on the host",
        gpu="rtx-3060",
        settings=QWEN,
        gigabytes=10.463,
        otherwise="only experts on the host: attention, embedding and head stay on the GPU in bfloat16 (+3.06); its "
        "optimizer and the chunks of its loss are not stated",
    )
)


def row(run: Published) -> tuple[str, ...]:
    """Return the cells of the table for a run."""
    recipe = load_recipe(None, [*COMMON, *run.settings])
    gigabytes = estimate_memory(recipe, find_gpu(run.gpu)).allocated_peak_bytes / 1e9
    difference = gigabytes / run.gigabytes - 1
    return run.name, f"{run.gigabytes:.2f}", f"{gigabytes:.2f}", f"{difference:+.1%}", run.otherwise


def main() -> None:
    """Write the table."""
    parser_of(__doc__).parse_args()
    heads = ("run", "published, GB", "estimated, GB", "difference", "what it stores otherwise")
    table = table_of(heads, map(row, RUNS)) + "\n"
    put_table(PAGE, Path(__file__).name, table)
    print(table)


if __name__ == "__main__":
    main()
