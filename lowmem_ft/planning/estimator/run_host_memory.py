"""Host memory of a run that its trace does not show: the interpreter, weights in transit, files being written."""

from __future__ import annotations

import torch

from lowmem_ft.foundation.system.process_size import (
    CUDA_BUILD_BYTES,
    HOST_BYTES_WITH_CUDA,
    LIBRARIES_BYTES,
    TOKEN_BYTES,
)
from lowmem_ft.models.saving import MAX_SHARD_BYTES
from lowmem_ft.planning.estimator.traces.traced_recipe import TracedRecipe
from lowmem_ft.recipe import Recipe
from lowmem_ft.virtual_gpu.replay.host_peak import HostOutside

ADAPTER_BYTES = 4
"""Bytes per parameter of an adapter, which is float32."""

TENSORS_IN_FLIGHT = 2
"""Tensors on the host at once while weights load: the next is read while the one before is still being copied."""


def build_bytes() -> int:
    """Return the bytes that this machine's build of torch adds to a process without a GPU."""
    return 0 if torch.version.cuda is None else CUDA_BUILD_BYTES


def process_bytes_on_cpu(vocabulary_size: int = 0) -> int:
    """Return the bytes that a process without a GPU holds apart from tensors, with this machine's build of torch.

    Args:
        vocabulary_size: tokens of its tokenizer.
    """
    return LIBRARIES_BYTES + build_bytes() + TOKEN_BYTES * vocabulary_size


def host_outside(traced: TracedRecipe, recipe: Recipe, *, on_gpu: bool) -> HostOutside:
    """Return host memory outside the trace: the process throughout, and weights in transit during loading and saving.

    Args:
        traced: the trace, for the sizes of the weights.
        recipe: the recipe; with adapters, only these are saved.
        on_gpu: whether the weights live on a GPU; on a CPU they are part of the trace, and files are written from them.

    Returns:
        Bytes of each.
    """
    if not on_gpu:
        return HostOutside(process_bytes=process_bytes_on_cpu(traced.vocabulary_size))
    weights = [
        allocation for allocation in traced.trace.timeline.allocations if allocation.category == "parameter"
    ]
    largest = max((weight.size_bytes for weight in weights), default=0)
    # Weights are written from where they are stored, not from where they are streamed to.
    on_device = [weight.size_bytes for weight in weights if weight.place == "device"]
    saved = sum(on_device) - traced.copied_weight_bytes
    if recipe.adapter.name != "none":
        saved = min(saved, traced.trace.model.trainable_parameters * ADAPTER_BYTES)
    # A file's tensors are copied to the host together.
    in_a_file = max(MAX_SHARD_BYTES, max(on_device, default=0))
    return HostOutside(
        process_bytes=HOST_BYTES_WITH_CUDA,
        loading_bytes=TENSORS_IN_FLIGHT * largest,
        saving_bytes=min(saved, in_a_file),
    )
