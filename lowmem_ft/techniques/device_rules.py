"""Types and kernels that a device supports, from facts that are known for any GPU in the catalogue.

Nothing here imports torch, so that a recipe that the GPU cannot run is rejected before that import.
"""

from __future__ import annotations

from collections.abc import Iterator

_ATTENTION = "model.attn_implementation"
_AMPERE = (8, 0)
"""The first compute capability that flash-attn 2 has kernels for, both the package's and torch's own."""


def precision_problems(
    dtype: str,
    mixed_precision: str,
    *,
    is_cpu: bool,
    has_bfloat16: bool,
    device_name: str,
    frozen: bool,
    scales_loss: bool,
) -> Iterator[str]:
    """Yield the rules broken by weights and autocast that a device cannot compute with, or that would train wrongly.

    Args:
        dtype: ``model.dtype`` with ``auto`` resolved: ``float32``, ``bfloat16`` or ``float16``.
        mixed_precision: ``training.mixed_precision``: ``no``, ``bf16`` or ``fp16``.
        is_cpu: whether the device is the CPU.
        has_bfloat16: whether it computes with bfloat16.
        device_name: for messages.
        frozen: whether these weights are frozen, next to adapters in float32.
        scales_loss: whether a loss scale would reach the gradients of trained weights.

    Yields:
        A sentence for each broken rule.
    """
    if frozen:
        yield from _float16_base_problems(dtype, mixed_precision, has_bfloat16, is_cpu)
    else:
        yield from float16_problems(dtype, mixed_precision)
    if mixed_precision == "fp16" and is_cpu:
        yield (
            f"training.mixed_precision=fp16 needs a GPU, got device {device_name}. Set training.mixed_precision=bf16 "
            "or training.mixed_precision=no."
        )
    settings = {
        "model.dtype=bfloat16": dtype == "bfloat16",
        "training.mixed_precision=bf16": mixed_precision == "bf16",
    }
    asked = " and ".join(setting for setting, is_set in settings.items() if is_set)
    if asked and not has_bfloat16:
        yield (
            "bfloat16 needs a GPU that computes with it (NVIDIA: Ampere, 2020, or newer), got "
            f"{asked} on {device_name}. {_without_bfloat16(frozen, scales_loss)}"
        )


def attention_problems(
    implementation: str,
    *,
    device_type: str,
    kernels: str,
    compute_type: str,
    compute_capability: tuple[int, int] | None,
    needs_kernel: bool = True,
) -> Iterator[str]:
    """Yield the rules that a kernel requested by name breaks on a device, or on a virtual one.

    Args:
        implementation: ``model.attn_implementation``.
        device_type: torch's name for it.
        kernels: the device type whose kernels it runs: another one if the device is virtual.
        compute_type: the type that queries and keys will have, such as ``bfloat16``.
        compute_capability: that of a CUDA device.
        needs_kernel: for varlen_attn: whether rows are packed, or layers have windows. If not, it is sdpa without a
            mask.
    """
    if implementation == "flash_attention_2" or (implementation == "varlen_attn" and needs_kernel):
        obstacle = flash_attention_obstacle(
            device_type=device_type,
            kernels=kernels,
            compute_type=compute_type,
            compute_capability=compute_capability,
        )
        if obstacle:
            yield f"{_ATTENTION}={implementation} needs {obstacle}. Set {_ATTENTION}=sdpa, or auto."
    elif implementation == "flex_attention" and kernels != device_type:
        yield (
            f"{_ATTENTION}=flex_attention compiles a kernel on the GPU itself, whose memory cannot be estimated "
            f"without one. Set {_ATTENTION}=sdpa to estimate, or auto."
        )
    elif implementation == "flex_attention" and device_type == "cpu":
        yield (
            f"{_ATTENTION}=flex_attention needs an accelerator to train, because torch has no backward pass for it on "
            f"the CPU; got device cpu. Set {_ATTENTION}=sdpa, or auto."
        )


def varlen_attention_obstacle(
    *,
    device_type: str,
    kernels: str,
    compute_type: str,
    compute_capability: tuple[int, int] | None,
    needs_kernel: bool,
) -> str | None:
    """Return why ``auto`` does not take varlen_attn, as the end of a sentence: on a CPU, sdpa does as well."""
    if kernels != "cuda":
        return f"a CUDA device, got device {device_type}"
    if not needs_kernel:
        return None
    return flash_attention_obstacle(
        device_type=device_type,
        kernels=kernels,
        compute_type=compute_type,
        compute_capability=compute_capability,
    )


def flash_attention_obstacle(
    *, device_type: str, kernels: str, compute_type: str, compute_capability: tuple[int, int] | None
) -> str | None:
    """Return what flash-attn 2 (the package or torch's) needs and lacks, as a sentence's end; None if nothing."""
    if kernels != "cuda":
        return f"a CUDA device, got device {device_type}"
    if compute_type not in ("float16", "bfloat16"):
        return f"bfloat16 or float16 computation, got {compute_type}"
    assert compute_capability is not None
    major, minor = compute_capability
    if (major, minor) < _AMPERE:
        return f"compute capability 8.0 or later (Ampere), got {major}.{minor}"
    return None


def float16_problems(dtype: str, mixed_precision: str) -> Iterator[str]:
    """Yield the rules that the types of trained weights break on any device: float16 has too small a range."""
    if dtype == "float16":
        yield (
            "Weights to be trained are float32 or bfloat16, got model.dtype=float16: its range is too small for "
            "updates. Set model.dtype=float32, with training.mixed_precision=fp16 for speed."
        )
    if mixed_precision == "fp16" and dtype != "float32":
        yield (
            "training.mixed_precision=fp16 needs float32 weights, because the loss scaler unscales their gradients in "
            f"float32; got model.dtype={dtype}. Set model.dtype=float32."
        )


def _float16_base_problems(
    dtype: str, mixed_precision: str, may_bfloat16: bool, is_cpu: bool
) -> Iterator[str]:
    """Yield the rules broken. Frozen weights may be float16: a loss scale keeps gradients through them in range."""
    if dtype == "float16" and mixed_precision != "fp16":
        loss_scale = "Set training.mixed_precision=fp16"
        way_out = f"{loss_scale}, or model.dtype=bfloat16." if may_bfloat16 else f"{loss_scale}."
        yield (
            "Frozen weights in model.dtype=float16 need training.mixed_precision=fp16, whose loss scale keeps small "
            f"gradients from vanishing; got {mixed_precision}. "
            + ("That needs a GPU: set model.dtype=bfloat16." if is_cpu else way_out)
        )
    if dtype == "bfloat16" and mixed_precision == "fp16":
        yield (
            "training.mixed_precision=fp16 needs model.dtype=float16 or float32, got bfloat16, whose range float16 "
            f"does not have. Set model.dtype=float16{', or training.mixed_precision=bf16' if may_bfloat16 else ''}."
        )


def _without_bfloat16(frozen: bool, scales_loss: bool) -> str:
    """Return the way out for a device that has no bfloat16."""
    if frozen:
        return "Set model.dtype=float16 and training.mixed_precision=fp16."
    float32 = "Set model.dtype=float32, optimizer.master=fp32 and training.mixed_precision="
    return (
        f"{float32}fp16, or training.mixed_precision=no to train in float32."
        if scales_loss
        else f"{float32}no."
    )
