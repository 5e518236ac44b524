"""Refusal of what a processor, or a GPU of the catalogue, cannot run, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.foundation.wsl import is_wsl
from lowmem_ft.models.files.model_files import architecture_fields, limit_of_positions, text_fields
from lowmem_ft.recipe.command_lines import command_line, quoted
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.recipe.rules.budget_limits import above_device
from lowmem_ft.recipe.rules.run_rules import oversized_steps
from lowmem_ft.recipe.shipped.recipes_by_gpu import made_for
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.techniques.device_rules import attention_problems, float16_problems, precision_problems

_COMPUTE_TYPES = {"bf16": "bfloat16", "fp16": "float16"}


def check_device_of_estimate(recipe: Recipe, gpu: Gpu | None) -> None:
    """Refuse what a device cannot run or offer, or what is too large to trace.

    Args:
        recipe: the recipe to estimate.
        gpu: the GPU; None: a processor.

    Raises:
        UserError: lists all problems.
    """
    above = above_device(recipe.budget, gpu) if gpu is not None else ()
    problems = [*_problems_on(recipe, gpu)]
    if problems:
        problems[-1] += _made_for(gpu, recipe)
    raise_problems((*above, *problems))
    length = recipe.data.max_length or limit_of_positions(text_fields(recipe.model).get)
    if length is not None:
        raise_problems(oversized_steps(recipe, length), DataError)


def _made_for(gpu: Gpu | None, recipe: Recipe) -> str:
    """Return a suffix for what a GPU cannot run: the recipe that is made for such GPUs; may be empty."""
    found = [] if gpu is None else made_for(gpu, recipe)
    if not found or gpu is None:
        return ""
    shipped = found[0]
    trains = f" and trains {shipped.trains}" if shipped.trains else ""
    if shipped.is_own_model and shipped.needs.gpu == gpu.name:
        return (
            f" An estimate shows whether that fits; {shipped.settings[0]} is made for {gpu.name}{trains}, and does: "
            f"{shipped.needs.memory_words}."
        )
    estimate = quoted(command_line("estimate", *shipped.settings, gpu=gpu.name))
    return f" A recipe is made for such GPUs{trains}: {estimate}."


def check_device_of_run(recipe: Recipe) -> None:
    """Refuse what no device can train, or the processor cannot if the recipe names it: only torch knows other devices.

    Raises:
        UserError: lists all problems.
    """
    raise_problems(_problems_on(recipe, None) if recipe.training.use_cpu else _problems_on_any_gpu(recipe))


def _problems_on_any_gpu(recipe: Recipe) -> Iterator[str]:
    if recipe.adapter.trains_model_weights and (dtype := _dtype(recipe)) is not None:
        yield from float16_problems(dtype, recipe.training.mixed_precision)
    if is_wsl():
        yield from recipe.optimizer.problems_on_wsl()


def _problems_on(recipe: Recipe, gpu: Gpu | None) -> Iterator[str]:
    device_type, kernels = ("cpu", "cpu") if gpu is None else ("vgpu", "cuda")
    yield from recipe.optimizer.problems_on(device_type, kernels)
    dtype, mixed_precision = _dtype(recipe), recipe.training.mixed_precision
    if dtype is None:
        return
    yield from precision_problems(
        dtype,
        mixed_precision,
        is_cpu=gpu is None,
        has_bfloat16=gpu is None or gpu.has_bfloat16,
        device_name="cpu" if gpu is None else gpu.full_name,
        frozen=not recipe.adapter.trains_model_weights,
        scales_loss=key_with(recipe, "no loss scale") is None,
    )
    yield from attention_problems(
        recipe.model.attn_implementation,
        device_type=device_type,
        kernels=kernels,
        compute_type=_COMPUTE_TYPES.get(mixed_precision, dtype),
        compute_capability=None if gpu is None else gpu.compute_capability,
        needs_kernel=recipe.data.packing,
    )


def _dtype(recipe: Recipe) -> str | None:
    """Return the type of the weights; None if it is the checkpoint's own and its files do not name it."""
    if recipe.model.dtype != "auto":
        return recipe.model.dtype
    fields = architecture_fields(recipe.model)
    return fields.get("dtype") or fields.get("torch_dtype")
