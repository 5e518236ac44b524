"""A trained model in the forms that other programs load: 4 bits for transformers, GGUF for llama.cpp and Ollama."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.foundation.errors import CheckpointError, ModelError
from lowmem_ft.foundation.system.atomic_write import (
    abandon_folder,
    begin_folder,
    incomplete_name,
    whole_folder,
)
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import INDEX_FILE, WEIGHTS_FILE, packed_format_of
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.models.quantizing.quantization import check_quantization, keep_one_layout, quantization_config
from lowmem_ft.models.saving import quiet_transformers, save_model, save_tokenizer
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.training.checkpoints.checkpoint import explaining_write_errors
from lowmem_ft.training.export.disk_room import (
    FREE_SPACE_AND_REPEAT,
    gguf_bytes,
    nf4_bytes,
    plain_bytes,
    require_room,
)
from lowmem_ft.training.export.exported_answers import Answer, Comparison, greedy_answer
from lowmem_ft.training.export.llama_cpp import convert_to_gguf, refuse_own_code
from lowmem_ft.training.export.merging import load_merged
from lowmem_ft.training.export.model_card import merged_model_card
from lowmem_ft.training.export.model_source import ModelSource
from lowmem_ft.training.folder.own_files import replace_saved

logger = logging.getLogger(__name__)

MODELFILE = "Modelfile"
_CARD = "README.md"

_KEEPS = {
    "f32": (torch.float32, torch.bfloat16, torch.float16),
    "bf16": (torch.bfloat16,),
    "f16": (torch.float16,),
}
"""Types of weights that a type of GGUF holds without rounding."""

_SAME = 1e-3
"""Largest relative error of logits whose weights are the same."""

Track = Callable[[list[Any]], Iterable[Any]]


def export_quantized(
    source: ModelSource, target: Path, *, dtype: str = "auto", track: Track = iter
) -> Comparison:
    """Write a folder that vanilla ``from_pretrained`` loads in 4 bits (NF4, double quantisation), by bitsandbytes.

    Linear layers are packed; embeddings, head, norms and fused experts keep their type, as in any such folder.

    Args:
        source: the model; an adapter is merged into it first.
        target: the new folder; absent, or empty.
        dtype: type of what is not packed, and of the products; ``auto``: the model's own.
        track: wraps the list of layers, to show progress while an adapter is merged.

    Returns:
        The answers of the source and of the folder, read again.

    Raises:
        ModelError: if the model cannot be read, or has several parts.
        UserError: if the disk has too little room.
        CheckpointError: if the folder cannot be written, or answers like another model.
    """
    staged = {} if _is_plain(source, dtype) else {"the model before": plain_bytes(source.model, dtype)}
    require_room(target, {**staged, "the model in 4 bits": nf4_bytes(source.model, dtype)})
    model, tokenizer = load_merged(source.model, source.adapter, dtype=dtype, track=track)
    if (parts := other_parts(model)) is not None:
        raise ModelError(
            f"--quantized needs a text-only model, but {source.model.name_or_path} has several parts "
            f"({parts.fields.get('model_type')}). Export it with --merged or --gguf."
        )
    answer, weights_dtype = greedy_answer(model, tokenizer), model.dtype
    bits = ModelConfig(quantization="nf4", quantize_partly=True)
    loader: Any = AutoModelForCausalLM
    with (
        explaining_write_errors(target, FREE_SPACE_AND_REPEAT),
        _plain_folder(source, model, tokenizer, target, dtype) as folder,
        whole_folder(target, replace_saved) as partial,
    ):
        del model
        gc.collect()
        with quiet_transformers():
            packed = loader.from_pretrained(
                folder,
                quantization_config=quantization_config(bits, weights_dtype),
                dtype=weights_dtype,
                device_map={"": "cpu"},
            )
            check_quantization(packed, bits)
            packed.save_pretrained(partial)
        save_tokenizer(tokenizer, partial)
        _write_card(source, target, partial, "Linear layers are in 4 bits (NF4), by bitsandbytes.")
        del packed
        gc.collect()
        with quiet_transformers():
            read = loader.from_pretrained(partial, device_map={"": "cpu"})
        _avoid_layout_for_cpus(read)
        comparison = Comparison(answer, greedy_answer(read, tokenizer, answer.prompt_ids))
        _refuse_another_model(comparison, partial)
    return comparison


def _avoid_layout_for_cpus(model: PreTrainedModel) -> None:
    """Compute without bitsandbytes' layout for CPUs where it fails: it needs rows of whole blocks (0.50.2)."""
    layers: list[tuple[str, Any]] = [
        (name, layer) for name, layer in model.named_modules() if hasattr(layer, "support_avx512bf16_for_cpu")
    ]
    odd = next((one for one in layers if one[1].in_features % one[1].weight.blocksize), None)
    if odd is not None:
        logger.warning(
            "bitsandbytes packs blocks of %d weights, and %s has %d inputs: on CPUs with AVX512-BF16 transformers "
            "cannot compute with such layers in 4 bits, on GPUs it can. For those CPUs export with --gguf.",
            odd[1].weight.blocksize,
            odd[0],
            odd[1].in_features,
        )
        keep_one_layout(model)


def export_gguf(
    source: ModelSource, target: Path, *, gguf_type: str, converter: Path, track: Track = iter
) -> tuple[Path, Comparison | None]:
    """Write a folder with a GGUF file, made by llama.cpp's converter, and a Modelfile for Ollama.

    Args:
        source: the model; an adapter is merged into it first.
        target: the new folder; absent, or empty.
        gguf_type: type of the file's weights, by the converter's name.
        converter: path of ``convert_hf_to_gguf.py``.
        track: wraps the list of layers, to show progress while an adapter is merged.

    Returns:
        The file, and the answers of the source and of the file as transformers reads it; None in place of these if
        transformers reads no GGUF file of this architecture.

    Raises:
        ModelError: if the model cannot be read, brings code of its own, or the converter does not know it.
        UserError: if the disk has too little room.
        CheckpointError: if the folder cannot be written, or the file answers like another model.
    """
    name = f"{target.name}-{gguf_type}.gguf"
    staged = {} if _is_plain(source) else {"the model before": plain_bytes(source.model, "auto")}
    require_room(target, {**staged, "the GGUF file": gguf_bytes(source.model, gguf_type)})
    model, tokenizer = load_merged(source.model, source.adapter, track=track)
    answer, weights_dtype = greedy_answer(model, tokenizer), model.dtype
    _remove_interrupted(target)
    with (
        explaining_write_errors(target, FREE_SPACE_AND_REPEAT),
        _plain_folder(source, model, tokenizer, target) as folder,
        whole_folder(target, replace_saved) as partial,
    ):
        del model
        gc.collect()
        refuse_own_code(folder, source.model.name_or_path or "")
        convert_to_gguf(converter, folder, partial / name, gguf_type)
        (partial / MODELFILE).write_text(f"FROM ./{name}\n", "utf-8")
        _write_card(source, target, partial, f"Converted to GGUF ({gguf_type}) by llama.cpp.")
        read = _answer_of_gguf(partial / name, weights_dtype, answer)
        comparison = None if read is None else Comparison(answer, read)
        if comparison is not None:
            _refuse_another_model(comparison, partial)
            _warn_of_changes(comparison, gguf_type, weights_dtype)
    return target / name, comparison


def _answer_of_gguf(file: Path, dtype: torch.dtype, source: Answer) -> Answer | None:
    """Return the answer of a GGUF file as transformers reads it; None: it does not read this architecture's."""
    config = ModelConfig(name_or_path=str(file), dtype=str(dtype).removeprefix("torch."))  # type: ignore[arg-type]
    try:
        hf_config, tokenizer = load_model_config(config), load_tokenizer(config)
    except ModelError as error:
        if "is not supported yet" not in str(error.__cause__):
            raise
        logger.warning(
            "Not compared: transformers reads no GGUF file of this architecture (%s). Try it with llama.cpp.",
            str(error.__cause__).rstrip("."),
        )
        return None
    cpu = torch.device("cpu")
    with quiet_transformers():
        model = load_model(config, hf_config, attn_implementation="eager", device=cpu, seed=0)
    answer = greedy_answer(model, tokenizer)
    if answer.prompt_ids == source.prompt_ids:
        return answer
    logger.warning(
        "The tokenizer of the GGUF file encodes the prompt as %s, that of the source as %s. The answers are compared "
        "with the source's tokens. Check them with llama.cpp's own tokenizer (llama-tokenize).",
        answer.prompt_ids,
        source.prompt_ids,
    )
    return greedy_answer(model, tokenizer, source.prompt_ids)


def _refuse_another_model(comparison: Comparison, folder: Path) -> None:
    if not comparison.relative_error < 1:
        raise CheckpointError(
            f"The exported model is not the source's model: the logits after the prompt differ by "
            f"{comparison.relative_error:.0%} of their standard deviation ({folder.name} is removed). Compare the "
            "versions of transformers, bitsandbytes or llama.cpp with a newer one."
        )


def _warn_of_changes(comparison: Comparison, gguf_type: str, dtype: torch.dtype) -> None:
    if dtype in _KEEPS.get(gguf_type, ()) and comparison.relative_error > _SAME:
        logger.warning(
            "%s holds %s weights exactly, and transformers computes other logits from the file (%.2g of their standard "
            "deviation): the converter, or transformers' reader, takes a setting of this architecture otherwise. "
            "Compare an answer with llama.cpp's.",
            gguf_type,
            str(dtype).removeprefix("torch."),
            comparison.relative_error,
        )


@contextlib.contextmanager
def _plain_folder(
    source: ModelSource,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    dtype: str = "auto",
) -> Iterator[Path]:
    """Yield a folder of the plain model: the source itself if it is one, else a temporary one next to the target."""
    if _is_plain(source, dtype):
        yield expand_user(source.model.name_or_path or "")
        return
    staged = target.with_name(f"{target.name}.staged")
    try:
        partial = begin_folder(staged, replace_saved)
        save_model(model, tokenizer, partial)
        yield partial
    finally:
        abandon_folder(staged)


def _is_plain(source: ModelSource, dtype: str = "auto") -> bool:
    """Return whether a source is a folder that vanilla ``from_pretrained`` loads as it is to be exported."""
    folder = expand_user(source.model.name_or_path or "")
    return (
        source.adapter is None
        and dtype == "auto"
        and any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE))
        and packed_format_of(source.model) is None
    )


def _remove_interrupted(target: Path) -> None:
    """Remove what a killed export has left: other files in its folder would be kept as the user's own."""
    for file in incomplete_name(target).glob("*"):
        if file.name == MODELFILE or file.suffix == ".gguf":
            file.unlink()


def _write_card(source: ModelSource, target: Path, folder: Path, what: str) -> None:
    """Write a model card: that of a merged model, or the source's own, with a line on what was done."""
    name = source.model.name_or_path or ""
    card = expand_user(name) / _CARD
    if source.adapter is not None:
        (folder / _CARD).write_text(merged_model_card(target.name, source.adapter, name), "utf-8")
    elif card.is_file():
        shutil.copyfile(card, folder / _CARD)
    with (folder / _CARD).open("a", encoding="utf-8") as lines:
        lines.write(f"\n{what}\n")
