"""The parts of a checkpoint that are not its language model: towers for images and sound, projectors, further heads.

A run trains only the language model, as the causal LM that transformers has for it. The other parts take no memory:
they stay in their files, which are kept open, and are copied bit for bit into every model that is saved.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils.hub import cached_file

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.files.checkpoint_files import LazyWeight, lazy_weights
from lowmem_ft.models.files.model_files import INDEX_FILE
from lowmem_ft.models.files.shard_files import by_file

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
"""Files that a processor of images, video or sound is read from, apart from those of its tokenizer."""

_ATTRIBUTE = "lowmem_ft_other_parts"
_BODY, _HEAD, _EMBEDDING = "model.", "lm_head.", "embed_tokens.weight"


def language_config(hf_config: PretrainedConfig) -> PretrainedConfig:
    """Return the language model's config: a part of a multimodal config, or else the config itself."""
    text = hf_config.get_text_config(decoder=True)
    if text is hf_config or hf_config.is_encoder_decoder or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return hf_config
    kind = hf_config.model_type
    if kind not in CONFIG_MAPPING or type(hf_config) is not CONFIG_MAPPING[kind]:  # remote code
        return hf_config
    text = copy.deepcopy(text)
    # The whole model decides on these two, whatever the part's own config says.
    text.tie_word_embeddings = getattr(hf_config, "tie_word_embeddings", text.tie_word_embeddings)
    text.dtype = hf_config.dtype or text.dtype
    text.name_or_path = hf_config.name_or_path
    return text


@dataclass(frozen=True)
class LanguageNames:
    """Prefixes that the whole model's names have in place of the language model's ``model.`` and ``lm_head.``."""

    body: str
    head: str

    @classmethod
    def among(cls, names: Iterable[str]) -> LanguageNames | None:
        """Return the names of a whole model, found by its token embedding; None: it has no embedding of that name."""
        names = sorted(names, key=len)
        bodies = [name.removesuffix(_EMBEDDING) for name in names if name.endswith(_EMBEDDING)]
        if not bodies:
            return None
        heads = [name.removesuffix("weight") for name in names if name.endswith(f"{_HEAD}weight")]
        return cls(body=bodies[0], head=heads[0] if heads else _HEAD)

    def in_language_model(self, name: str) -> str | None:
        """Return a weight's or module's name in the language model; None: it belongs to another part."""
        for whole, own in ((self.body, _BODY), (self.head, _HEAD)):
            if name.startswith(whole):
                return own + name.removeprefix(whole)
        return None

    def in_whole(self, name: str) -> str:
        """Return the whole model's name for one of the language model."""
        for whole, own in ((self.body, _BODY), (self.head, _HEAD)):
            if name.startswith(own):
                return whole + name.removeprefix(own)
        return name

    @property
    def key_mapping(self) -> dict[str, str]:
        """The same for ``from_pretrained``, after which ``save_pretrained`` writes the names that were read."""
        pairs = ((self.body, _BODY), (self.head, _HEAD))
        return {f"^{re.escape(whole)}": re.escape(own) for whole, own in pairs if whole != own}


@dataclass(frozen=True)
class OtherParts:
    """The parts of a checkpoint that are not trained.

    Args:
        fields: the checkpoint's ``config.json``.
        weights: the parts' tensors by their names in its files, each read on access; empty in an estimate.
        files: the content of its processor's files, by their names.
        names_in_files: the language model's names in the checkpoint's files.
    """

    fields: Mapping[str, Any]
    weights: Mapping[str, LazyWeight] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    names_in_files: LanguageNames = LanguageNames(_BODY, _HEAD)

    @property
    def whole(self) -> PreTrainedModel:
        """The whole model on the meta device."""
        return _whole_on_meta(json.dumps(self.fields))

    @property
    def names(self) -> LanguageNames:
        """The names of the language model within :attr:`whole`."""
        names = LanguageNames.among(name for name, _ in self.whole.named_parameters())
        assert names is not None, "language_weights() has found it in the files, or an estimate has none"
        return names

    @property
    def num_parameters(self) -> int:
        """Elements of these parts."""
        names = self.names
        return sum(
            weight.numel()
            for name, weight in self.whole.named_parameters()
            if names.in_language_model(name) is None
        )

    @property
    def num_bytes(self) -> int:
        """Their bytes in files, in the type that the config names."""
        return self.num_parameters * getattr(self.whole.config.dtype, "itemsize", 4)

    def in_whole(self, name: str) -> str:
        """Return the name in :attr:`whole` of a module or weight of the language model."""
        return self.names.in_whole(name)

    def in_language_model(self, name: str) -> str | None:
        """Return the reverse of :meth:`in_whole`; None: it belongs to another part."""
        return self.names.in_language_model(name)

    def layers(self) -> list[str]:
        """Return the names of their linear layers."""
        return [
            name
            for name, module in self.whole.named_modules()
            if isinstance(module, nn.Linear) and self.names.in_language_model(name) is None
        ]

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """Make a folder that holds the language model one that holds the whole: weights, index, config, processor.

        Args:
            folder: holds the language model's weights, under the names of the whole's files.
            dtype: their type.

        Raises:
            OSError: if a file cannot be written.
        """
        self._write_weights(folder)
        fields = copy.deepcopy(dict(self.fields))
        text = fields.get("text_config", {})
        for part in (fields, text) if "dtype" in text or "torch_dtype" in text else (fields,):
            part.pop("torch_dtype", None)
            part["dtype"] = str(dtype).removeprefix("torch.")
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", "utf-8")
        for name, content in self.files.items():
            (folder / name).write_bytes(content)

    def _write_weights(self, folder: Path) -> None:
        if not self.weights:
            return
        files = sorted(folder.glob("model*.safetensors"))
        read = ((name, weight.values[...]) for name, weight in self.weights.items())
        for number, together in enumerate(by_file(read, lambda tensor: tensor.nbytes)):
            files.append(folder / f"other-{number}.safetensors")
            save_file(together, files[-1], {"format": "pt"})
        weight_map: dict[str, str] = {}
        total_bytes = 0
        for number, file in enumerate(files, 1):
            file = file.rename(folder / f"model-{number:05d}-of-{len(files):05d}.safetensors")
            for name, tensor in _header(file).items():
                weight_map[name] = file.name
                total_bytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", "utf-8")


@dataclass(frozen=True)
class LanguageWeights:
    """The weights of a checkpoint's language model, for ``from_pretrained``.

    Args:
        state_dict: its tensors by their names in the files, each read on access.
        other_parts: what else the checkpoint holds; None: it is a language model.
    """

    state_dict: dict[str, Any]
    other_parts: OtherParts | None = None

    @property
    def key_mapping(self) -> dict[str, str] | None:
        """Patterns that turn names in the files into the language model's; None: they are the same."""
        return None if self.other_parts is None else self.other_parts.names_in_files.key_mapping


def language_weights(
    hf_config: PretrainedConfig, path: str, *, backend: str = "pread", **source: Any
) -> LanguageWeights:
    """Open the weights of a checkpoint's language model, and find its other parts.

    Args:
        hf_config: from ``load_model_config``.
        path: local folder or hub id.
        backend: see :func:`lazy_weights`.
        **source: ``revision`` and ``local_files_only``, as ``from_pretrained`` takes them.

    Raises:
        ModelError: if the checkpoint has several parts, and no embedding of tokens by which to tell them apart.
        FileNotFoundError: if there are no safetensors.
    """
    weights = lazy_weights(path, backend=backend, **source)
    fields = json.loads(_read(path, "config.json", source) or "{}")
    if "text_config" not in fields or fields.get("model_type") == hf_config.model_type:
        return LanguageWeights(weights)
    names = LanguageNames.among(weights)
    if names is None:
        raise ModelError(
            f"The language model of a {fields.get('model_type')} checkpoint is found by its {_EMBEDDING}, and {path} "
            "has no such weight. Choose a checkpoint in the format of transformers."
        )
    of_language = {name: values for name, values in weights.items() if names.in_language_model(name)}
    others = {name: values for name, values in weights.items() if name not in of_language}
    contents = {name: _read(path, name, source) for name in PROCESSOR_FILES}
    files = {name: content for name, content in contents.items() if content is not None}
    return LanguageWeights(of_language, OtherParts(fields, others, files, names))


def set_other_parts(model: PreTrainedModel, parts: OtherParts | None) -> None:
    """Remember the other parts of a model's checkpoint with the model."""
    vars(model)[_ATTRIBUTE] = parts


def other_parts(model: nn.Module) -> OtherParts | None:
    """Return the other parts of the checkpoint that a model was read from; None: it is all of it."""
    return vars(model).get(_ATTRIBUTE)


def name_in_files(model: nn.Module, name: str) -> str:
    """Return the name under which a model's weight is saved, apart from conversions of transformers."""
    parts = other_parts(model)
    return name if parts is None else parts.names_in_files.in_whole(name)


def language_names_in(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return, by their names in the language model, the names of its weights in a folder's files."""
    names = list(names)
    try:
        is_whole = "text_config" in json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        is_whole = False
    found = LanguageNames.among(names) if is_whole else None
    if found is None:
        return dict(zip(names, names, strict=True))
    return {own: name for name in names if (own := found.in_language_model(name))}


@functools.lru_cache(maxsize=4)
def _whole_on_meta(fields: str) -> PreTrainedModel:
    written = json.loads(fields)
    config = CONFIG_MAPPING[written["model_type"]].from_dict(written)
    with _disable_current_modes(), torch.device("meta"):  # an estimate may ask while it traces
        return _whole_class(config)(config)


def _whole_class(config: PretrainedConfig) -> Any:
    """Return the class of a whole model: the one that its config names, or transformers' for images and text."""
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    is_own = named is not None and named.config_class is type(config)
    return named if is_own else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]


def _read(path: str, name: str, source: Mapping[str, Any]) -> bytes | None:
    """Return the content of a checkpoint's file; None: it has no such file."""
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **source)
    return None if file is None else Path(file).read_bytes()


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as raw:
        header = json.loads(raw.read(struct.unpack("<Q", raw.read(8))[0]))
    header.pop("__metadata__", None)
    return header
