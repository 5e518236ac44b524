"""Checks of a model's local files before torch and transformers are imported, which takes seconds.

They read ``config.json`` and the headers of the weights; ``causality.py`` and ``loading.py`` check more, later.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.catalog.model_architectures import find_architecture
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.shard_files import MODEL, shard_files
from lowmem_ft.models.files.stored_quantization import BYTES_OF_LEAST, method_of, refuse_other_formats

INDEX_FILE, WEIGHTS_FILE = "model.safetensors.index.json", "model.safetensors"

_MOST_HEADER_BYTES = 100_000_000
"""Limit of safetensors itself for a header, in bytes."""

# fmt: off
ENCODERS = frozenset((
    "albert", "bert", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2", "distilbert",
    "electra", "ernie", "megatron-bert", "mobilebert", "modernbert", "mpnet", "nystromformer", "rembert", "roberta",
    "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "xlm-roberta-xl", "xmod",
))
# fmt: on
"""Model types that are encoders unless their config says ``is_decoder``: the most common ones."""

_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
}
"""Sizes beyond any real model: building a larger one would run out of memory before it ended."""


def architecture_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a local ``config.json``, or of the catalogue's; empty if neither can be read."""
    name = config.name_or_path or ""
    folder = expand_user(name)
    if config.gguf_file or folder.suffix == ".gguf":
        return {}
    if not folder.is_dir():
        found = None if config.revision else find_architecture(name)
        return {} if found is None else dict(found.config_of(name))
    try:
        fields = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # transformers reports what is wrong with it
    return fields if isinstance(fields, dict) else {}


def text_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the same fields, with those of a model's text part, if it has one, in place of the outer ones."""
    fields = architecture_fields(config)
    text = fields.get("text_config")
    return {**fields, **(text if isinstance(text, dict) else {})}


def least_weights(config: ModelConfig) -> tuple[int, int]:
    """Return lower bounds on a model's elements: of its embedding, and of its layers; 0 for what its config omits.

    A layer counts as only one matrix of its MLP: whatever the architecture, it has more.
    """
    fields = text_fields(config)
    rows, width, depth, inner = (
        value if isinstance(value := fields.get(name), int) and value > 0 else 0
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size")
    )
    return rows * width, depth * width * inner


def packed_format_of(config: ModelConfig) -> str | None:
    """Return the format in which a model's weights stay packed, by its ``quant_method``.

    None: they are plain, unpacked or initialised at random, or neither a local file nor the catalogue tells.
    """
    if config.weights == "random" or config.quantization == "dequantize":
        return None
    method = method_of(architecture_fields(config).get("quantization_config"))
    return method if method in BYTES_OF_LEAST else None


_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_NO_LIMIT = -1
"""XLNet's word for a model without a limit of positions."""

_DROPOUTS = ("dropout", "pdrop", "dropout_prob")
"""Ends of the names of probabilities."""


def limit_of_positions(value_of: Callable[[str], Any]) -> int | None:
    """Return the longest sequence that an architecture was made for, in tokens; None if its config names no limit.

    Args:
        value_of: returns a field of the text model's config by name, None if it has none.
    """
    for name in _POSITIONS:
        limit = value_of(name)
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def num_layers_of(value_of: Callable[[str], Any]) -> int | None:
    """Return the number of decoder layers; None if the config does not name it.

    Args:
        value_of: as for :func:`limit_of_positions`.
    """
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        number = value_of(name)
        if isinstance(number, int) and number > 0:
            return number
    return None


def refuse_unfit(config: ModelConfig) -> None:
    """Reject a model whose ``config.json`` shows that it cannot be trained here.

    Raises:
        ModelError: if the file is not JSON, the model is or has an encoder, training does not support the format of its
            weights, or its sizes are invalid.
    """
    fields, name = architecture_fields(config), config.name_or_path or ""
    _refuse_unreadable(config)
    _refuse_encoder(name, fields)
    refuse_other_formats(name, fields.get("quantization_config"))
    wrong = [
        f"{field} from 1 to {largest:,}, got {size!r}"
        for field, largest in _LARGEST.items()
        if isinstance(size := fields.get(field), str) or (isinstance(size, int) and not 1 <= size <= largest)
    ]
    wrong += [
        f"{field} of at least 1, got {limit}"
        for field in _POSITIONS
        if isinstance(limit := fields.get(field), int) and limit < 1 and limit != _NO_LIMIT
    ]
    wrong += [
        f"{field} from 0 to 1, got {share}"
        for field, share in fields.items()
        if field.endswith(_DROPOUTS) and isinstance(share, (int, float)) and not 0 <= share <= 1
    ]
    wrong += _odd_heads(fields)
    if wrong:
        raise ModelError(
            f"The config.json of {name} must have {' and '.join(wrong)}. Correct it, or copy config.json from the "
            "model's original repository."
        )


def _odd_heads(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield sizes of attention that do not go together: the forward of the model would fail with them."""
    names = ("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")
    heads, key_heads, hidden, size = (
        value if isinstance(value := fields.get(name), int) and value > 0 else None for name in names
    )
    if heads and key_heads and heads % key_heads:
        yield f"num_key_value_heads that divides num_attention_heads={heads}, got {key_heads}"
    turns_whole_heads = any(field.startswith("rope_") for field in fields) and not (
        fields.keys() & {"partial_rotary_factor", "rotary_pct", "rotary_dim", "qk_rope_head_dim"}
    )
    if size is None and hidden and heads and hidden % heads == 0:
        size = hidden // heads
    if turns_whole_heads and size and size % 2:
        source = "" if "head_dim" in fields else f" (hidden_size={hidden} / num_attention_heads={heads})"
        yield f"an even head_dim, which rotary positions turn in pairs, got {size}{source}"


def _refuse_unreadable(config: ModelConfig) -> None:
    """Reject an unreadable local config.json; transformers reports what is wrong with one on the hub."""
    file = expand_user(config.name_or_path or "") / "config.json"
    if config.is_gguf or not file.is_file():
        return
    way_out = "copy config.json from the model's original repository."
    try:
        fields = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} is not a valid JSON file: {error}. Fix it, or {way_out}") from error
    if not isinstance(fields, dict) or not {"model_type", "auto_map"} & fields.keys():
        raise ModelError(
            f"A config.json must give model_type; that of {config.name_or_path} lacks it. Add the field, or {way_out}"
        )


def _refuse_encoder(name: str, fields: dict[str, Any]) -> None:
    kind = fields.get("model_type")
    if fields.get("is_encoder_decoder") is True:
        what = "an encoder-decoder (is_encoder_decoder=true in its config.json)"
    elif kind in ENCODERS and fields.get("is_decoder") is not True:
        what = "an encoder (a model that was trained as a decoder says is_decoder=true in its config.json)"
    else:
        return
    raise ModelError(not_causal(name, kind, what))


def not_causal(name: str, model_type: object, reason: str) -> str:
    """Return the sentence about a model that is not causal."""
    return (
        f"model.name_or_path needs a causal language model, whose tokens see only earlier ones; {name} is of type "
        f"{model_type!r}, {reason}. Choose a decoder, such as one of `lowmem-ft models`."
    )


def check_weight_files(config: ModelConfig) -> None:
    """Reject a local folder whose weights are missing or incomplete.

    Raises:
        ModelError: if a file is missing, truncated or not safetensors.
    """
    folder = expand_user(config.name_or_path or "")
    if config.weights == "random" or config.gguf_file or not folder.is_dir():
        return
    names = _weight_files(folder)
    if not names:
        raise ModelError(
            f"{config.name_or_path} cannot be read as a causal language model: it has neither {WEIGHTS_FILE} nor "
            f"{INDEX_FILE}. A model folder holds config.json and *.safetensors; convert older .bin files with "
            "from_pretrained(...).save_pretrained(...)."
        )
    for name in names:
        if problem := damage(folder / name):
            raise ModelError(
                f"The weights of {config.name_or_path} are damaged: {name} {problem}. Download the model again."
            )


def damage(file: Path) -> str | None:
    """Return what is wrong with a safetensors file by its header and size; None if they agree.

    Args:
        file: may be missing.

    Returns:
        The end of a sentence about the file.
    """
    if not file.is_file():
        return "is missing"
    size = file.stat().st_size
    with file.open("rb") as raw:
        begin = raw.read(8)
        header_bytes = struct.unpack("<Q", begin)[0] if len(begin) == 8 else _MOST_HEADER_BYTES + 1
        if header_bytes > _MOST_HEADER_BYTES:
            return f"is not a safetensors file: it begins with {begin!r}"
        try:
            tensors = json.loads(raw.read(header_bytes))
            ends = [tensor["data_offsets"][1] for name, tensor in tensors.items() if name != "__metadata__"]
            expected = 8 + header_bytes + max(ends, default=0)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            return (
                "ends within its header"
                if size < 8 + header_bytes
                else "has a header that is not JSON of tensors"
            )
    return None if size == expected else f"has {size:,} bytes of {expected:,}"


def _weight_files(folder: Path) -> list[str]:
    cut = [file.name for file in shard_files(folder, MODEL)]
    if not (folder / INDEX_FILE).is_file():
        return cut or ([WEIGHTS_FILE] if (folder / WEIGHTS_FILE).is_file() else [])
    try:
        return cut + sorted(set(json.loads((folder / INDEX_FILE).read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder / INDEX_FILE} does not say which file holds which weight: {error!r}. Download the model again."
        ) from error
