"""Rules across parts about rows whose tokens are spread over several processes. See ``conflicts.py``."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.foundation.parallel_plan import is_of_one_process
from lowmem_ft.foundation.upstream.tested import CONTEXT_PARALLEL_IN, unknown_context_parallel
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.tree import Recipe

_WHOLE_ROWS = "or distributed.context=1"


@reads("distributed.context", "distributed.strategy", "distributed.num_processes")
def context_is_of_several_processes(recipe: Recipe) -> Iterator[str]:
    """Torch's ring works with FSDP2 and with copies; DeepSpeed has a way of its own to spread rows."""
    config = recipe.distributed
    if config.context <= 1:
        return
    if config.plan().has_engine:
        yield (
            f"distributed.context={config.context} needs distributed.strategy=fsdp2 or ddp, got {config.strategy}. Set "
            f"distributed.strategy=fsdp2, {_WHOLE_ROWS}."
        )
    if is_of_one_process(config.strategy) or config.num_processes == 1:
        yield (
            f"distributed.context={config.context} spreads rows over several processes, got one. Start "
            f"{config.context}, `accelerate launch --num_processes {config.context} ...`, {_WHOLE_ROWS}."
        )
    if (version := unknown_context_parallel()) is not None:
        yield (
            f"distributed.context={config.context} needs torch {' or '.join(CONTEXT_PARALLEL_IN)}, whose "
            f"context_parallel is a prototype and was seen to train as one process does, got {version}. Install "
            f"torch {CONTEXT_PARALLEL_IN[-1]}, {_WHOLE_ROWS}."
        )


@reads("distributed.context", "data.packing", "model.attn_implementation")
def context_needs_one_document_a_row(recipe: Recipe) -> Iterator[str]:
    """The ring computes causal attention over whole rows, by kernels that it chooses."""
    context, attention = recipe.distributed.context, recipe.model.attn_implementation
    if context <= 1:
        return
    if recipe.data.packing:
        yield (
            f"distributed.context={context} needs rows of one document, got data.packing=true: torch's ring takes no "
            f"borders of packed documents. Set data.packing=false, {_WHOLE_ROWS}."
        )
    if attention not in ("auto", "sdpa"):
        yield (
            f"distributed.context={context} needs model.attn_implementation=sdpa, got {attention}. Set "
            f"model.attn_implementation=auto, {_WHOLE_ROWS}."
        )
