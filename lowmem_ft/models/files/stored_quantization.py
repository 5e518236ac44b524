"""Quantized formats of a checkpoint's files, as its ``config.json`` names them: which of them a run can train on.

Nothing here imports torch, so that a checkpoint is refused before anything of it is downloaded or read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.parallel_plan import plan_of

FORMATS: Mapping[str, str] = {"mxfp4": "MXFP4", "fp8": "FP8 with block scales"}
"""Formats whose weights may stay packed under adapters, by their ``quant_method``, in words."""

BYTES_OF_LEAST = {"mxfp4": 0.5, "fp8": 1.0}
"""Bytes of a packed weight without its scales."""

_OF_MXFP4 = ("blocks", "scales")
"""Last parts of the names of its tensors in files."""

_OF_FP8 = {"activation_scheme": "dynamic", "expert_dtype": "fp8"}
"""Fields of blockwise FP8, with the only value that is supported, which is the default, too."""

_NAMES_OF_E4M3 = ("e4m3", "float8_e4m3", "float8_e4m3fn")
"""Values of its ``fmt`` for numbers with 4 bits of exponent; transformers would read those with 5 as these."""


def method_of(quantization: Any) -> str | None:
    """Return the ``quant_method`` of a ``quantization_config``, which is a dictionary, transformers' object or None.

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
    if quantization is None:
        return
    if not isinstance(quantization, dict) or not isinstance(quantization.get("quant_method"), str):
        raise ModelError(
            f"A quantization_config must name the format of the weights in quant_method, such as fp8; that of {name} "
            f"is {quantization!r}. Take the config.json of the model's original repository, or name the model that it "
            "was made from."
        )
    method = quantization["quant_method"]
    if method not in FORMATS:
        raise ModelError(
            f"{name} holds weights that are quantised already (quantization_config in its config.json: {method}), and "
            f"a base may be in {' or '.join(FORMATS.values())}, not in {method}. Name the model that it was made from; "
            "to train adapters on 4-bit weights, also set model.quantization=nf4 adapter.name=lora."
        )
    if not _are_names(left := quantization.get("modules_to_not_convert")):
        raise ModelError(
            f"modules_to_not_convert of a quantization_config is a list of names or patterns of modules, got {left!r} "
            f"in the config.json of {name}. Take the config.json of the model's original repository."
        )
    if quantization.get("dequantize"):
        raise ModelError(
            "Whether packed weights are unpacked is the recipe's to say, got dequantize=true in the "
            f"quantization_config of {name}. Take it out of its config.json; model.quantization=dequantize does that."
        )
    if method != "fp8":
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
    if (numbers := quantization.get("fmt", "e4m3")) not in _NAMES_OF_E4M3:
        problems.append(f"fmt={numbers!r}")
    if problems:
        fields = _OF_FP8 | {"fmt": "e4m3"}
        raise ModelError(
            f"A base in FP8 needs weight_block_size of two numbers, and "
            f"{' and '.join(f'{field}={value}' for field, value in fields.items())}; the quantization_config of "
            f"{name} has {', '.join(problems)}. Name the model that it was made from."
        )


def _are_names(names: object) -> bool:
    if names is None:
        return True
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    try:
        for name in names:
            re.compile(name)  # transformers matches them as patterns
    except re.error:
        return False
    return True


def refuse_other_types(name: str, stored: str | None, types: Mapping[str, str]) -> None:
    """Reject files whose tensors are in other types than the config's format, of which transformers makes those types.

    Args:
        name: name of the model, for the message.
        stored: the format by its config; None: plain weights.
        types: the type of each tensor in the files, as safetensors names it, such as ``F8_E4M3``.

    Raises:
        ModelError: if weights have scales that a plain model would not read, or are in another type than the format's.
    """
    scaled = {one: kind for one, kind in types.items() if f"{one}_scale_inv" in types}
    if stored is None:
        wrong = {one: kind for one, kind in scaled.items() if kind.startswith("F8")}
        if wrong:
            raise ModelError(
                f"The config.json of {name} has no quantization_config, and its files hold weights in FP8 with scales "
                f"({next(iter(wrong))}), which would be left out. Take the config.json of the model's original "
                "repository."
            )
        return
    if stored == "fp8":
        needed, of_format = "F8_E4M3", scaled
    else:
        needed, of_format = "U8", {one: types[one] for one in types if one.rpartition("_")[2] in _OF_MXFP4}
    wrong = {one: kind for one, kind in of_format.items() if kind != needed}
    if wrong:
        first, kind = next(iter(wrong.items()))
        raise ModelError(
            f"Weights of a base in {FORMATS[stored]} are in type {needed}; {first} in the files of {name} is in {kind}"
            f"{f', and {len(wrong) - 1} more' if len(wrong) > 1 else ''}. Download the model again."
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


def problems_of_training(
    stored: str, name: str, adapter: str, strategy: str | None, *, use_dora: bool = False
) -> Iterator[str]:
    """Yield what training on weights that stay packed does not go with.

    Args:
        stored: the format of the files.
        name: name of the model, for the message.
        adapter: the value of ``adapter.name``.
        strategy: the value of ``distributed.strategy``.
        use_dora: the value of ``adapter.use_dora``.
    """
    if use_dora and stored == "fp8":
        yield (
            f"adapter.use_dora=true needs the lengths of a layer's weights, which PEFT takes without the scales of a "
            f"base in {FORMATS[stored]}, got {name}. Set adapter.use_dora=false, or model.quantization=dequantize."
        )
    if adapter == "none":
        yield (
            f"A base in {FORMATS[stored]} is frozen and needs adapter.name=lora to train, got none with {name}. Set "
            "adapter.name=lora, or model.quantization=dequantize, which unpacks it to model.dtype."
        )
    if plan_of(strategy).shares_state:
        yield (
            f"A base in {FORMATS[stored]} is whole in each process, and distributed.strategy={strategy} would cut that "
            f"of {name}. Set distributed.strategy=ddp, or model.quantization=dequantize."
        )
