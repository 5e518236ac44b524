"""Errors of a model that cannot be loaded, with the way out of each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from lowmem_ft.foundation.errors import MissingPackageError, ModelError
from lowmem_ft.foundation.tensors.finiteness import some_of
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import hub_id_of, nearest_names, out_of_reach
from lowmem_ft.models.files.sources import BY_WHAT_IS_WRITTEN, DAMAGED_GGUF, first_line

_OTHER_HEADS = ("Classification", "ForQuestionAnswering", "ForMaskedLM", "RewardModel", "ForMultipleChoice")
"""Suffixes of the names of classes whose heads predict no next token."""


def refuse_missing_weights(config: ModelConfig, hf_config: PretrainedConfig, report: dict[str, Any]) -> None:
    """Reject a checkpoint that lacks weights, which would silently be trained from random values."""
    wrong = {
        kind: sorted(map(_weight_name, report.get(kind) or ()))
        for kind in ("missing_keys", "mismatched_keys")
    }
    problems = [
        f"{kind.removesuffix('_keys')}: {', '.join(keys[:5])}{f' and {len(keys) - 5} more' if len(keys) > 5 else ''}"
        for kind, keys in wrong.items()
        if keys
    ]
    other_heads = [name for name in hf_config.architectures or () if name.endswith(_OTHER_HEADS)]
    if problems and other_heads:
        raise ModelError(
            f"{config.name_or_path} is a {other_heads[0]}, a model with a head other than that of a causal language "
            f"model ({'; '.join(problems)}). Choose the language model that it was made from."
        )
    if problems:
        raise ModelError(
            f"The weights in {config.name_or_path} do not match its config.json ({'; '.join(problems)}). "
            "Download the model again, or point model.name_or_path at a complete checkpoint."
        )


_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")


def refuse_layers_beyond(config: ModelConfig, hf_config: PretrainedConfig, report: dict[str, Any]) -> None:
    """Reject a checkpoint with decoder layers that its config does not count: a stump would be trained.

    Layers after the last that predict further tokens (``num_nextn_predict_layers``) are no part of a causal LM.
    """
    text_config = hf_config.get_text_config()
    counted = getattr(text_config, "num_hidden_layers", None)
    if not isinstance(counted, int):
        return
    counted += getattr(text_config, "num_nextn_predict_layers", None) or 0
    numbers = [found for key in report.get("unexpected_keys") or () if (found := _LAYER.search(f".{key}"))]
    if (last := max((int(found[1]) for found in numbers), default=-1)) >= counted:
        raise ModelError(
            f"The weights in {config.name_or_path} have at least {last + 1} layers, and num_hidden_layers of its "
            f"config.json is {text_config.num_hidden_layers}: the others would be left out. Correct config.json, or "
            "save a model that has so many."
        )


def _weight_name(key: str | tuple[str, torch.Size, torch.Size]) -> str:
    """Return a weight's name: a missing one is reported by name, a mismatched one with its two shapes."""
    return key if isinstance(key, str) else f"{key[0]} {list(key[1])} instead of {list(key[2])}"


def explained(
    config: ModelConfig, error: Exception, unconverted: Sequence[str] = ()
) -> ModelError | MissingPackageError:
    """Return an error that tells users the way out of whatever transformers or the hub raised.

    Args:
        config: the recipe's model group.
        error: what was raised.
        unconverted: weights that transformers could not make from those in the files.
    """
    name = hub_id_of(config.name_or_path or "")
    causes = _cause_names(error)
    if isinstance(error, ImportError) and "gguf" in str(error).lower():
        return MissingPackageError("A GGUF model", "gguf", extra="gguf")
    if "GatedRepoError" in causes:
        return ModelError(
            f"{name} is gated: its authors require that you accept a licence. Open https://huggingface.co/{name}, "
            "accept it, run `hf auth login`, and try again."
        )
    if "RepositoryNotFoundError" in causes or "RevisionNotFoundError" in causes:
        return ModelError(
            f"The hub has no model {name} at revision {config.revision or 'main'} (or it is private and you are not "
            f"logged in: `hf auth login`). Check the spelling, or pass a local folder.{nearest_names(name)}"
        )
    if {"LocalEntryNotFoundError", "ConnectError", "OfflineModeIsEnabled"} & causes:
        return out_of_reach(name)
    if config.is_gguf and isinstance(error, (ValueError, OSError, RuntimeError, *DAMAGED_GGUF)):
        return ModelError(
            f"The GGUF file of {name} is damaged or truncated ({type(error).__name__}: {first_line(error)}) Download "
            "it again."
        )
    if "trust_remote_code" in str(error):
        return brings_code(name)
    if "does not recognize this architecture" in str(error):
        return ModelError(
            f"{name} is of a model type that transformers {transformers.__version__} does not know: "
            f"{first_line(error)} Upgrade it (pip install -U transformers), or choose another model."
        )
    if isinstance(error, BY_WHAT_IS_WRITTEN):
        kind = "" if isinstance(error, StrictDataclassError) else f"{type(error).__name__}: "
        return ModelError(
            f"The config.json of {name} is invalid: {kind}{' '.join(str(error).split())} Correct the field, or copy "
            "config.json from the model's original repository."
        )
    if "Should have a `model_type`" in str(error) and (expand_user(name) / "config.json").is_file():
        return ModelError(
            f"A config.json must give model_type; that of {name} lacks it. Add the field, or copy config.json from "
            "the model's original repository."
        )
    if "automatic conversion of the weights" in str(error):
        return ModelError(
            f"The files of {name} must hold all experts of each layer, with their scales if they have any, in the "
            f"shapes that its config.json gives; {some_of(list(unconverted)) or 'one tensor'} could not be put "
            "together from them. "
            "Download the model again."
        )
    if "SafetensorError" in causes:
        return ModelError(f"The weights of {name} are damaged: {first_line(error)} Download the model again.")
    return ModelError(
        f"{name} cannot be read as a causal language model: {first_line(error)} A model folder holds config.json and "
        "*.safetensors; convert older .bin files with from_pretrained(...).save_pretrained(...)."
    )


def brings_code(name: str) -> ModelError:
    """Return the error for a model with Python code of its own, which the recipe does not allow to run."""
    return ModelError(
        f"{name} brings its own Python code. Read it, then set model.trust_remote_code=true and pin it with "
        "model.revision=COMMIT."
    )


def _cause_names(error: BaseException | None) -> set[str]:
    names = set()
    while error is not None:
        names.add(type(error).__name__)
        error = error.__cause__ or error.__context__
    return names
