"""The rungs of the memory ladder, each as the recipe settings that it adds to the one before.

python scripts/ladder_rungs.py    # needs of each for Llama 3.1 8B on an H200, with exact clipping; minutes
"""

from __future__ import annotations

from dataclasses import dataclass

from command_line import parser_of


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One rung.

    Args:
        name: the addition, for people.
        adds: settings that override those of the rung before.
        exact: whether it computes the same as the rung before, except for rounding of sums.
    """

    name: str
    adds: tuple[str, ...]
    exact: bool = True


RUNGS = (
    Rung(
        name="float32 weights, bf16 autocast",
        adds=(
            "model.dtype=float32",
            "training.mixed_precision=bf16",
            "checkpointing.mode=none",
            "loss.chunk_tokens=null",
            "optimizer.name=adamw",
            "optimizer.master=fp32",
            "optimizer.state=fp32",
        ),
    ),
    Rung(name="+ checkpointing, chunked loss", adds=("checkpointing.mode=full", "loss.chunk_tokens=256")),
    Rung(
        name="+ bf16 weights, split16 master",
        adds=("model.dtype=bfloat16", "training.mixed_precision=no", "optimizer.master=split16"),
        exact=False,  # activations between the layers are rounded to bf16
    ),
    Rung(
        name="+ split24 master, 8-bit state",
        adds=("optimizer.master=split24", "optimizer.state=8bit"),
        exact=False,
    ),
    Rung(name="+ step in backward", adds=("optimizer.in_backward=true", "accumulation.order=vertical")),
    Rung(name="+ state on the host", adds=("offload.optimizer=host",)),
    Rung(name="+ weights streamed", adds=("offload.parameters=stream", "offload.activations=inputs")),
    Rung(name="+ MLP and head in tiles", adds=("tiling.mlp=8", "tiling.head=8")),
)


def settings_of(rung: Rung) -> tuple[str, ...]:
    """Return the settings of a rung and of all below it; a later one wins."""
    below = RUNGS[: RUNGS.index(rung) + 1]
    settings = [setting.split("=", 1) for each in below for setting in each.adds]
    return tuple(f"{key}={value}" for key, value in dict(settings).items())


LLAMA_8B = ("model=llama-3.1-8b", "data=any", "data.max_length=2048")
"""Settings of one row of 2048 tokens; clipped to a global norm, which is the default."""


def main() -> None:
    """Print a Markdown table; GB = 10^9 bytes."""
    from lowmem_ft.planning.estimator import estimate_memory
    from lowmem_ft.recipe import load_recipe

    print("| rung | allocated on the GPU | host memory | pinned of it |\n|---|---|---|---|")
    for rung in RUNGS:
        estimate = estimate_memory(load_recipe(None, [*LLAMA_8B, *settings_of(rung)]), "h200")
        sizes = (estimate.allocated_peak_bytes, estimate.host_peak_bytes, estimate.host_pinned_bytes)
        cells = [f"{num_bytes / 1e9:.1f} GB" if num_bytes else "" for num_bytes in sizes]
        print(f"| {rung.name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    parser_of(__doc__).parse_args()
    main()
