"""What a recipe asks for that works in one process only."""

from __future__ import annotations

from lowmem_ft.recipe import Recipe


def problems_with_processes(recipe: Recipe, num_processes: int, *, bytes_per_weight: int) -> list[str]:
    """What reads a gradient before it has been summed over all processes, or in another type than it was.

    Args:
        recipe: what is to be trained.
        num_processes: in how many.
        bytes_per_weight: of a trained weight, without its master.

    Returns:
        For each such setting the rule, the values seen and the way out; nothing for one process.
    """
    if num_processes == 1:
        return []
    problems = [
        f"{key}={value} works in one process, got {num_processes}. Set {key}={instead}, or start one process."
        for key, value, instead, is_set in (
            ("optimizer.in_backward", "true", "false", recipe.optimizer.in_backward),
            ("offload.optimizer", "host", "device", recipe.offload.optimizer == "host"),
            ("offload.parameters", "stream", "device", recipe.offload.parameters == "stream"),
        )
        if is_set
    ]
    accumulates = recipe.training.gradient_accumulation_steps > 1 and recipe.accumulation.dtype == "float32"
    if accumulates and bytes_per_weight < 4 and recipe.adapter.name == "none":
        problems.append(
            "accumulation.dtype=float32 works in one process where weights are bfloat16, for DDP sums gradients in the "
            f"weights' type, got {num_processes} processes. Set accumulation.dtype=weights or model.dtype=float32."
        )
    return problems
