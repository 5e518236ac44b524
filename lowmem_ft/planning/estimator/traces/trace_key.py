"""The key of a trace: everything that could change it, and nothing that is known not to."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

import lowmem_ft
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys

FORMAT = 2
"""Version of kept files; raised when they change in a way that their source code does not show."""

NOT_TRACED = frozenset(
    {
        *("name", "description"),
        *("data.path", "data.name", "data.revision", "data.data_files", "data.split", "data.sample_by"),
        *("data.sources", "data.stopping_strategy"),
        *("data.streaming", "data.max_samples", "data.format", "data.messages_column", "data.prompt_column"),
        *("data.input_column", "data.completion_column", "data.text_column", "data.system_prompt"),
        *("data.chat_template", "data.loss_on", "data.group_by_length", "data.shuffle"),
        *("data.shuffle_buffer_size", "data.num_proc"),
        *("training.output_dir", "training.overwrite_output_dir", "training.learning_rate", "training.seed"),
        *("training.num_train_epochs", "training.max_steps", "training.logging_steps", "training.eval_steps"),
        *("training.eval_on_start", "training.save_steps", "training.save_total_limit", "training.report_to"),
        *("training.resume_from_checkpoint", "training.resume_with_other_kernels", "training.project"),
        *("training.resume_with_other_data", "training.profile_steps", "training.load_best_model_at_end"),
        *("training.metric_for_best_model", "training.greater_is_better", "training.early_stopping_patience"),
        *("training.early_stopping_threshold", "training.run_name", "training.push_to_hub"),
        *("training.hub_model_id", "training.hub_private_repo"),
        # The limits for an estimate's result, and the choices made before there is one.
        *("budget.device", "budget.host", "budget.enforce", "budget.preflight", "budget.retry"),
        *("plan.mode", "plan.allow", "plan.keep"),
    }
)
"""Recipe keys that no trace sees; all others are part of a trace's key, future ones included."""

BATCH_SHAPE = frozenset(
    {
        "data.max_length",
        "training.per_device_train_batch_size",
        "training.per_device_eval_batch_size",
        "training.gradient_accumulation_steps",
    }
)
"""Recipe keys that change the shapes of batches and no layer."""

_VARIABLES = (
    *("CUBLAS", "CUDNN", "PYTORCH_", "TORCH_", "NVIDIA_", "TRANSFORMERS_", "BNB_", "FLASH", "LIGER_"),
    *("CAUSAL_CONV1D_", "FLA_", "MAMBA_"),
)
_METADATA = (".dist-info", ".egg-info")
"""The end of folders that name a package and its version."""


class TraceKey(NamedTuple):
    """Digests of the program, of its batches' shape with the machine that runs it, and of its model alone."""

    family: str
    shape: str
    architecture: str = ""


def trace_key(recipe: Recipe, hf_config: PretrainedConfig, machine: object) -> TraceKey | None:
    """Return the key of a recipe's trace on a machine.

    Args:
        recipe: the recipe to train.
        hf_config: the architecture.
        machine: the properties of the machine that decide which kernels run and what they take.

    Returns:
        The key; None where code that came with the model takes part, which the key cannot compare.
    """
    if recipe.model.trust_remote_code:
        return None
    values = {path: key.value_in(recipe) for path, key in recipe_keys().items() if path not in NOT_TRACED}
    shape = {path: values.pop(path) for path in BATCH_SHAPE}
    architecture = (type(hf_config).__qualname__, hf_config.to_dict(), _surroundings())
    return TraceKey(_digest(values, *architecture), _digest(shape, machine), _digest(*architecture))


def _digest(*values: Any) -> str:
    text = json.dumps(values, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _surroundings() -> dict[str, Any]:
    """Return what a trace depends on in addition to recipe, model and machine."""
    backends = torch.backends.cuda
    return {
        "format": FORMAT,
        "source": _digest_of_source(),
        "versions": _versions(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "torch": [
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            str(torch.get_default_dtype()),
            torch.cuda.is_available(),
            backends.flash_sdp_enabled(),
            backends.mem_efficient_sdp_enabled(),
            backends.cudnn_sdp_enabled(),
            backends.math_sdp_enabled(),
            backends.matmul.fp32_precision,
            getattr(torch.backends.cudnn, "conv").fp32_precision,  # noqa: B009 - no attribute to type checkers
            str(torch.backends.cuda.preferred_blas_library()),
        ],
    }


@functools.cache
def _versions() -> dict[str, object]:
    """Return the versions of Python and of all that is installed: libraries take up what they find.

    Names of folders tell them, in a millisecond; reading the metadata of a hundred packages takes a hundred times that.
    """
    folders = [folder for folder in map(Path, sys.path) if folder.is_dir() and os.access(folder, os.R_OK)]
    installed = {name for folder in folders for name in os.listdir(folder) if name.endswith(_METADATA)}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "installed": sorted(installed),
    }


@functools.cache
def _digest_of_source() -> str:
    """Return the digest of this package's own files, which determine a trace."""
    folder = Path(lowmem_ft.__file__).parent
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()
