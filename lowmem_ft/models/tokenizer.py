"""Read a tokenizer, and what a model's small files say; without the modules that build and quantise models."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from lowmem_ft.foundation.errors import ModelError, is_panic
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.local_paths import check_tokenizer_path, not_a_tokenizer
from lowmem_ft.models.files.model_files import text_fields
from lowmem_ft.models.files.sources import BY_WHAT_IS_WRITTEN, first_line, source_of, tokenizer_source

logger = logging.getLogger(__name__)


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer that belongs to the model, or the one from ``model.tokenizer_name_or_path``; add new tokens.

    Raises:
        ModelError: if no tokenizer can be read there, or one without a vocabulary.
    """
    check_tokenizer_path(config)
    named = config.tokenizer_name_or_path
    source = tokenizer_source(named) if named else source_of(config)
    path = source.pop("path")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **source)
    except (OSError, ValueError, *BY_WHAT_IS_WRITTEN) as error:
        lacks_files = "Couldn't instantiate the backend tokenizer" in str(error)
        reason = "it has no tokenizer.json." if lacks_files else first_line(error)
        if isinstance(error, KeyError):  # whose text is the key alone
            reason = f"its files lack the field {error}."
        raise not_a_tokenizer(path, reason) from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise not_a_tokenizer(path, f"its tokenizer.json is damaged: {first_line(error)}") from error
    # If there are no files, transformers makes up one that knows only its special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"A tokenizer needs a vocabulary, but {path} has none: every text would be unknown or empty to the model. "
            "Set model.tokenizer_name_or_path to a folder or hub id that has one."
        )
    _add_new_tokens(tokenizer, config)
    return tokenizer


def new_token_ids(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> range:
    """Return the ids at the end of a vocabulary that are the recipe's new tokens, at a run's start and when it resumes.

    Those that the tokenizer had before are not among them, unless they were its last.
    """
    vocabulary = tokenizer.get_vocab()
    named = {vocabulary[token] for token in config.new_tokens}
    first = stop = max(vocabulary.values()) + 1
    while first - 1 in named:
        first -= 1
    return range(first, stop)


def _add_new_tokens(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Add the recipe's new tokens that a tokenizer does not have yet."""
    if not config.new_tokens:
        return
    known = set(tokenizer.get_vocab())
    tokenizer.add_tokens(list(config.add_tokens))
    tokenizer.add_tokens(list(config.add_special_tokens), special_tokens=True)
    added = [token for token in config.new_tokens if token not in known]
    logger.info(
        "New tokens: %s added to the tokenizer, which has %d now%s.",
        ", ".join(added) or "none",
        len(tokenizer),
        "" if len(added) == len(config.new_tokens) else "; it had the others",
    )


def end_token_ids(config: ModelConfig) -> frozenset[int] | None:
    """Return the ids of the tokens at which the model's generation stops, by its files; None: they do not say.

    Raises:
        ModelError: if the model is named by a path and nothing is there, or the file is damaged.
    """
    for name in ("generation_config.json", "config.json"):  # as generation itself looks for them
        ends = _written(config, name).get("eos_token_id")
        if ends is not None:
            return frozenset(ends if isinstance(ends, list) else [ends])
    return None


def written_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model's config as its file, or the catalogue, has them, those of its text part in place.

    Returns:
        The fields; empty if the file is neither on this machine nor within reach.

    Raises:
        ModelError: as :func:`end_token_ids`.
    """
    fields = text_fields(config) or _written(config, "config.json")
    text = fields.get("text_config")
    return {**fields, **(text if isinstance(text, dict) else {})}


def _written(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return the fields of one of a model's JSON files; none if it is not within reach, as of a GGUF file."""
    source = source_of(config)
    path = source.pop("path")
    if "gguf_file" in source:
        return {}
    try:
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **source)
        fields = json.loads(Path(file).read_text("utf-8")) if file else {}
    except OSError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} has a damaged {name}: {error}. Copy it from the model again.") from error
    return fields if isinstance(fields, dict) else {}
