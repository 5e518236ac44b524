"""What the Triton kernel is launched with: a chunk's tensors, its random keys, and the constants of its rule."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.optimizers.adamw import AdamW
from lowmem_ft.optimizers.counter_random import CounterRandom
from lowmem_ft.optimizers.lion import Lion
from lowmem_ft.optimizers.operators import BLOCK, SIGNED_OCTAVES, UNSIGNED_OCTAVES
from lowmem_ft.optimizers.sgd import SGD

_LARGEST_CHUNK = 2**31 - 1


@dataclass(frozen=True)
class RuleInKernel:
    """A rule as the kernel takes it.

    Args:
        name: of its branch.
        constants: in the branch's order.
        from_end: for each of its interpolations, whether it goes a half of the way or more.
    """

    name: str
    constants: tuple[float, ...]
    from_end: tuple[bool, bool] = (False, False)


def rule_in_kernel(rule: object, number: int, hyperparameters: Mapping[str, Any]) -> RuleInKernel | None:
    """The branch for a rule's step ``number``; None: the kernel has none, as for a class derived from these."""
    lr = hyperparameters["lr"]
    if type(rule) is AdamW:
        beta1, beta2 = hyperparameters["betas"]
        part = 1 - beta1
        constants = (
            1 - lr * hyperparameters["weight_decay"],
            part,
            _rest(part),
            beta2,
            1 - beta2,
            (1 - beta2**number) ** 0.5,
            hyperparameters["eps"],
            -(lr / (1 - beta1**number)),
        )
        return RuleInKernel("adamw", constants, (part >= 0.5, False))
    if type(rule) is Lion:
        of_step, of_momentum = hyperparameters["betas"]
        decay = 1 - lr * hyperparameters["weight_decay"]
        constants = (decay, of_step, _rest(of_step), of_momentum, _rest(of_momentum), lr)
        return RuleInKernel("lion", constants, (of_step >= 0.5, of_momentum >= 0.5))
    if type(rule) is SGD:
        return RuleInKernel("sgd", (hyperparameters["weight_decay"], hyperparameters["momentum"], -lr))
    return None


def launch(
    rule: RuleInKernel,
    *,
    master: str,
    state: str,
    averages: Sequence[str],
    weight: Tensor,
    gradient: Tensor,
    clip: Tensor | None,
    kept: Mapping[str, Tensor],
    random: CounterRandom,
) -> None:
    """Update a chunk in place, on its device's present stream; nothing waits on the host.

    Args:
        rule: the step.
        master: format of the weight's float32 value; ``fp32`` of a float32 weight is the weight.
        state: format of the averages.
        averages: their names, at most two; the second has no sign.
        weight: flat, float32 or bfloat16.
        gradient: flat, float32, bfloat16 or float16.
        clip: factor on the gradient, 0-d float32 on the device; None: 1.
        kept: what is kept of master and averages, on the device.
        random: of the chunk's first element.

    Raises:
        ValueError: if the chunk has 2**31 elements or more.
    """
    from lowmem_ft.optimizers.triton_kernel import ROWS, WARPS, update_chunk

    num_elements = weight.numel()
    if num_elements > _LARGEST_CHUNK:
        raise ValueError(
            f"The kernel takes chunks of up to {_LARGEST_CHUNK} elements, got {num_elements}. "
            "Lower the optimizer's chunk_elements."
        )
    # A tensor stands in for each pointer that the compiled kernel does not use.
    tensors = [_raw(kept[name]) for name in averages]
    scales = [kept.get(f"{name}_scale", weight) for name in averages]
    tensors += [weight] * (2 - len(tensors))
    scales += [weight] * (2 - len(scales))
    beside = kept.get("master", kept.get("low", weight))
    kernel: Any = update_chunk
    on_device = torch.cuda.device(weight.device) if weight.is_cuda else contextlib.nullcontext()
    with on_device:  # Triton launches on the current device's stream, whatever its tensors are on
        kernel[(-(-num_elements // (ROWS * BLOCK)),)](
            _raw(weight),
            _raw(beside),
            _raw(gradient),
            weight if clip is None else clip,
            *(tensor for pair in zip(map(_raw, tensors), map(_raw, scales), strict=True) for tensor in pair),
            num_elements,
            random.element,
            *(random.key(stream) for stream in range(3)),
            *(float(constant) for constant in (*rule.constants, *[0.0] * (8 - len(rule.constants)))),
            RULE=rule.name,
            MASTER="weight" if weight.dtype == torch.float32 else master,
            STATE=state,
            AVERAGES=len(averages),
            IS_HALF_GRADIENT=gradient.dtype == torch.bfloat16,
            HAS_CLIP=clip is not None,
            FROM_END_0=rule.from_end[0],
            FROM_END_1=rule.from_end[1],
            SIGNED_OCTAVES=SIGNED_OCTAVES,
            UNSIGNED_OCTAVES=UNSIGNED_OCTAVES,
            ROWS=ROWS,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _rest(part: float) -> float:
    """What is left to 1 of a share that torch has rounded to float32."""
    return 1 - torch.tensor(part, dtype=torch.float32, device="cpu").item()


def _raw(tensor: Tensor) -> Tensor:
    """Bfloat16 as int16, which the kernel works on."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
