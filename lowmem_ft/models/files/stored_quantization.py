"""Formats of weights that a checkpoint's files hold in fewer bits, by its ``config.json``: which are trained upon.

Nothing here imports torch, so that a checkpoint is refused before anything of it is downloaded or read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lowmem_ft.foundation.errors import ModelError

FORMATS: Mapping[str, str] = {"mxfp4": "MXFP4", "fp8": "FP8 with block scales"}
"""Formats whose weights may stay packed under adapters, by their ``quant_method``, in words."""

BYTES_OF_LEAST = {"mxfp4": 0.5, "fp8": 1.0}
"""Bytes of a packed weight without its scales."""

_OF_FP8 = {"activation_scheme": "dynamic", "expert_dtype": "fp8"}
"""Fields of blockwise FP8, with the only value that is supported, which is the default, too."""


def method_of(quantization: Any) -> str | None:
    """Return the ``quant_method`` of a ``quantization_config``, a dictionary or transformers' object; None has none.

    It is a key of :data:`FORMATS`, or the name of another format, which :func:`refuse_other_formats` refuses.
    """
    if quantization is None:
        return None
    named = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    named = getattr(named, "quant_method", named)
    return str(getattr(named, "value", named))


def refuse_other_formats(name: str, quantization: object) -> None:
    """Reject a checkpoint whose weights are packed in a format that adapters are not trained upon.

    Args:
        name: name of the model, for the message.
        quantization: the ``quantization_config`` of its config.json; None: it has none.

    Raises:
        ModelError: if the format is another one than MXFP4 and FP8 with scales of blocks.
    """
    method = method_of(quantization)
    if method is None:
        return
    if method not in FORMATS:
        raise ModelError(
            f"{name} holds weights that are quantised already (quantization_config in its config.json: {method}), and "
            f"a base may be in {' or '.join(FORMATS.values())}, not in {method}. Name the model that it was made from; "
            "to train adapters on 4-bit weights, also set model.quantization=nf4 adapter.name=lora."
        )
    if method != "fp8" or not isinstance(quantization, dict):
        return
    block = quantization.get("weight_block_size", (128, 128))
    is_block = (
        isinstance(block, (list, tuple)) and [type(one) for one in block] == [int, int] and min(block) > 0
    )
    problems = [] if is_block else [f"weight_block_size={block!r}"]
    problems += [
        f"{field}={value!r}"
        for field, supported in _OF_FP8.items()
        if (value := quantization.get(field, supported)) != supported
    ]
    if problems:
        raise ModelError(
            f"A base in FP8 needs weight_block_size of two numbers, and "
            f"{' and '.join(f'{field}={value}' for field, value in _OF_FP8.items())}; the quantization_config of "
            f"{name} has {', '.join(problems)}. Name the model that it was made from."
        )


def packing_problem(stored: str | None, quantization: str, name: str) -> str | None:
    """Return what is wrong with a value of ``model.quantization`` for a checkpoint; None: they go together.

    Args:
        stored: the format of its files; None: plain weights.
        quantization: the value.
        name: name of the model, for the message.
    """
    if stored is None:
        return (
            f"model.quantization=dequantize unpacks weights that files hold in {' or '.join(FORMATS.values())}, and "
            f"those of {name} are plain. Set model.quantization=none."
            if quantization == "dequantize"
            else None
        )
    if quantization not in ("none", "dequantize"):
        return (
            f"model.quantization={quantization} rounds plain weights, and the files of {name} hold them in "
            f"{FORMATS[stored]}: a second rounding would add its error to theirs. Set model.quantization=none, which "
            "keeps them as they are, or name the model that it was made from."
        )
    return None


def problems_of_training(stored: str, name: str, adapter: str, strategy: str | None) -> Iterator[str]:
    """Yield what training on weights that stay packed does not go with.

    Args:
        stored: the format of the files.
        name: name of the model, for the message.
        adapter: the value of ``adapter.name``.
        strategy: the value of ``distributed.strategy``.
    """
    if adapter == "none":
        yield (
            f"A base in {FORMATS[stored]} is frozen and needs adapter.name=lora to train, got none with {name}. Set "
            "adapter.name=lora, or model.quantization=dequantize, which unpacks it to model.dtype."
        )
    if strategy not in (None, "none", "ddp"):
        yield (
            f"A base in {FORMATS[stored]} is whole in each process, and distributed.strategy={strategy} would cut that "
            f"of {name}. Set distributed.strategy=ddp, or model.quantization=dequantize."
        )
