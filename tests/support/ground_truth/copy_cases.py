"""Runs that make every kind of copy: each rung of the memory ladder, on a model that reuses each slot."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ladder_rungs import RUNGS, settings_of
from transformers import AutoConfig

from lowmem_ft.foundation.host import copy_engine
from lowmem_ft.optimizers.chunked import chunked_optimizer
from lowmem_ft.techniques import optimizer_in_backward
from lowmem_ft.techniques.offload import activation_offload
from lowmem_ft.techniques.streaming import embedding as streamed_embedding


@dataclass(frozen=True, kw_only=True)
class CopyCase:
    """A run.

    Args:
        settings: settings of its recipe.
        pins: whether the driver pins memory.
        in_files: whether offloaded tensors are stored in files.
        is_tied: whether the head's weight is the embedding's.
        num_layers: number of the model's layers. Two would each have a slot to themselves.
    """

    settings: tuple[str, ...]
    pins: bool = True
    in_files: bool = False
    is_tied: bool = True
    num_layers: int = 7


CLIPPED, NOT_CLIPPED = "training.max_grad_norm=1.0", "training.max_grad_norm=null"
_ON_HOST, _STREAMED, _TILED = (settings_of(rung) for rung in RUNGS[-3:])
_LORA = (*settings_of(RUNGS[1]), "adapter.name=lora", "adapter.r=4", "offload.parameters=stream")

CASES = (
    {rung.name: CopyCase(settings=(*settings_of(rung), CLIPPED)) for rung in RUNGS}
    | {
        f"{rung.name}, not clipped": CopyCase(settings=(*settings_of(rung), NOT_CLIPPED), is_tied=False)
        for rung in RUNGS[-4:]
    }
    | {
        "tied, not clipped": CopyCase(settings=(*_TILED, NOT_CLIPPED)),
        "untied, clipped": CopyCase(settings=(*_TILED, CLIPPED), is_tied=False),
        "own head, clipped": CopyCase(settings=(*_ON_HOST, CLIPPED), is_tied=False),
        "lost updates are counted": CopyCase(settings=(*_ON_HOST, CLIPPED, "optimizer.master=none")),
        "all logits": CopyCase(settings=(*_STREAMED, NOT_CLIPPED, "loss.chunk_tokens=null"), is_tied=False),
        "two layers stay": CopyCase(settings=(*_STREAMED, NOT_CLIPPED, "offload.resident_layers=2")),
        "all activations": CopyCase(settings=(*_ON_HOST, CLIPPED, "offload.activations=all")),
        "all activations of stored layers": CopyCase(
            settings=(*settings_of(RUNGS[0]), "offload.activations=all", "offload.optimizer=host")
        ),
        "horizontal": CopyCase(
            settings=(*settings_of(RUNGS[3]), "offload.optimizer=host", "offload.activations=inputs")
        ),
        "pageable, clipped": CopyCase(settings=(*_TILED, CLIPPED), pins=False),
        "pageable, not clipped": CopyCase(settings=(*_TILED, NOT_CLIPPED), pins=False, is_tied=False),
        "in files": CopyCase(settings=(*_STREAMED, CLIPPED), in_files=True),
        "adapters": CopyCase(settings=(*_LORA, "offload.activations=inputs")),
        "adapters over 4 bits": CopyCase(
            settings=(*_LORA, "model.quantization=nf4", "offload.optimizer=host")
        ),
    }
)


_BY_TWO = ("distributed.strategy=fsdp2", "distributed.num_processes=2", "checkpointing.mode=full")
_IN_BACKWARD = ("optimizer.in_backward=true", "accumulation.order=vertical")

SHARED_CASES = {
    f"fsdp2{name}": CopyCase(settings=(*_BY_TWO, *settings), is_tied=False, num_layers=3)
    for name, settings in {
        "": (CLIPPED,),
        ", weights on the host": (CLIPPED, "distributed.cpu_offload=true"),
        ", in backward, clipped": (*_IN_BACKWARD, CLIPPED),
        ", in backward, not clipped": (*_IN_BACKWARD, NOT_CLIPPED),
        ", in backward, state on the host, clipped": (*_IN_BACKWARD, CLIPPED, "offload.optimizer=host"),
        ", in backward, state on the host, not clipped": (
            *_IN_BACKWARD,
            NOT_CLIPPED,
            "offload.optimizer=host",
        ),
    }.items()
}
"""Cases for virtual GPUs only: one of two processes, whose updates in backward are on FSDP2's reduction stream."""


def make_model(folder: Path, case: CopyCase) -> Path:
    """Write a Llama's config; return its folder."""
    path = folder / f"model-{case.num_layers}-{'tied' if case.is_tied else 'untied'}"
    AutoConfig.for_model(
        "llama",
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=case.num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=case.is_tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ).save_pretrained(path)
    return path


@contextlib.contextmanager
def in_small_pieces() -> Iterator[None]:
    """Split tensors as small as these like large ones."""
    with (
        mock.patch.object(copy_engine, "STAGING_BYTES", 1024),
        mock.patch.object(chunked_optimizer, "CPU_CHUNK_ELEMENTS", 2048),
        mock.patch.object(streamed_embedding, "_CHUNK_ELEMENTS", 2048),
        mock.patch.object(optimizer_in_backward, "_ELEMENTS_AT_ONCE", 1024),
        mock.patch.object(activation_offload, "SMALLEST_OFFLOADED_BYTES", 256),
    ):
        yield


def steady(case: CopyCase) -> CopyCase:
    """Return the case with the fewest operators that show each ordering: two layers for each slot, and few tiles."""
    fewer = {"tiling.mlp=8": "tiling.mlp=2", "tiling.head=8": "tiling.head=4"}
    settings = tuple(fewer.get(setting, setting) for setting in case.settings)
    return dataclasses.replace(case, settings=settings, num_layers=4)
