"""``from_pretrained`` without weights: upstream makes all of its own decisions, from the config alone.

The real function runs: it reads the config, chooses the type, quantises and places the model. Only where it would find
the weight files and read them does it get the shapes of the model that it has just built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported
from lowmem_ft.planning.script_runs.saved_shapes import is_saved_here
from lowmem_ft.virtual_gpu.values.questions import is_of_library, shown_line

_QUANTISES_ANYTHING = "bitsandbytes"
"""Prefix of the quantisation methods that can quantise any model; other methods quantise once, with data, and models
are published so.
"""

_HALF = ("bfloat16", "float16")
_DTYPE_KEYS = ("dtype", "torch_dtype")
_LOADERS = ("lowmem_ft", "transformers", "peft", "contextlib", "functools")


def weights_from_configs(
    undo: contextlib.ExitStack, say: Callable[[str], None], before_it: Callable[[str], None]
) -> None:
    """Let models and adapters be loaded without their weights until a stack is undone.

    Args:
        undo: puts the real functions back.
        say: called with each assumption that had to be made.
        before_it: called with what the script is about to do, where no more of it should be run if it has trained.
    """
    for owner, name, around in (
        ("", "_get_resolved_checkpoint_files", _local_files),
        ("", "_get_dtype", functools.partial(_dtype_without_files, say)),
        ("PreTrainedModel", "_load_pretrained_model", functools.partial(_load_shapes, say, before_it)),
    ):
        wrap_when_imported(undo, "transformers.modeling_utils", owner, name, around)
    wrap_when_imported(undo, "peft.peft_model", "", "load_peft_weights", _load_adapter)


def _local_files(find: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Find weight files only in a local folder, to read their type where the config has none; never on the hub.

    Those that the script itself has saved have the config's type.
    """
    name = kwargs.get("pretrained_model_name_or_path")
    if kwargs.get("gguf_file") is not None:
        raise UserError(
            f"A script is estimated without its weights, got gguf_file={kwargs['gguf_file']}, which comes without "
            "a config. Load the model that it was made from."
        )
    if (kwargs.get("transformers_explicit_filename") or "").startswith("adapter_model."):
        return [], None  # some list is asked for
    if name is None or not os.path.isdir(name):
        return None, None
    try:
        files, shards = find(*args, **kwargs)
    except OSError:  # the folder has the config alone
        return None, None
    return (None, None) if any(map(is_saved_here, files or ())) else (files, shards)


def _load_adapter(load: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
    """Load the weights of an adapter that the script has saved; another stays as it is made, at its size."""
    where = os.path.join(folder, kwargs.get("subfolder") or "")
    saved = (os.path.join(where, f"adapter_model.{kind}") for kind in ("safetensors", "bin"))
    return load(folder, *args, **kwargs) if any(map(is_saved_here, saved)) else {}


def _dtype_without_files(
    say: Callable[[str], None],
    choose: Callable[..., Any],
    dtype: Any,
    checkpoint_files: Any,
    config: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if dtype == "auto" and checkpoint_files is None and getattr(config, "dtype", None) is None:
        say("weights: float32, because the model's config names no type and its weights are not read")
        dtype = torch.float32
    published = _published_dtype(config)
    chosen = choose(dtype, checkpoint_files, config, *args, **kwargs)
    if chosen[1] == torch.float32 and published in _HALF:
        say(
            f"weights: float32, as {_who_loads()} asks for; the model is published in {published}, in which they take "
            'half (`dtype="auto"`, for TRL in model_init_kwargs)'
        )
    return chosen


def _published_dtype(config: Any) -> str | None:
    """Return the type that a model's own config names; None: it names none, or is not here."""
    from transformers import PreTrainedConfig

    values = config.to_dict()
    if config.name_or_path:  # an auto class has made this config, with the type that it was asked for
        with contextlib.suppress(OSError):
            values, _ = PreTrainedConfig.get_config_dict(config.name_or_path, local_files_only=True)
    of_text = values.get("text_config") or {}
    return next((part[key] for part in (values, of_text) for key in _DTYPE_KEYS if part.get(key)), None)


def _who_loads() -> str:
    """Return the place that calls ``from_pretrained``: a line of the script, or the library that does it for it."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LOADERS:
        frame = frame.f_back
    file = frame.f_code.co_filename
    if is_of_library(file):
        return frame.f_globals["__name__"].partition(".")[0]
    return shown_line(file, frame.f_lineno)


def _load_shapes(
    say: Callable[[str], None],
    before_it: Callable[[str], None],
    load: Callable[..., Any],
    model: Any,
    state_dict: Any,
    checkpoint_files: Any,
    load_config: Any,
    expected_keys: Collection[str] | None = None,
) -> Any:
    if state_dict is None:
        _quantise_as_loaded(load_config.hf_quantizer, say)
        _put_on_one_device(load_config.device_map, say, before_it)
        load_config = dataclasses.replace(load_config, weight_mapping=None)  # the names are the model's own
        state_dict, checkpoint_files = _shapes_of(model, load_config, say), None
        if expected_keys is not None:  # an adapter's, in a model that is there
            state_dict = {name: shape for name, shape in state_dict.items() if name in expected_keys}
    return load(model, state_dict, checkpoint_files, load_config, expected_keys)


def _put_on_one_device(
    device_map: dict[str, Any] | None, say: Callable[[str], None], before_it: Callable[[str], None]
) -> None:
    """Move what ``device_map="auto"`` leaves on the host: it has to train on the device too; then it does not fit.

    What a rank leaves on other GPUs comes here, too: as much of the other ranks' is on this one.
    """
    on_host = {"cpu", "disk"}
    places = {str(place): place for place in (device_map or {}).values()}
    devices = [place for name, place in places.items() if name not in on_host]
    if len(places) == 1 or not devices:
        return
    leaves_on_host = len(devices) < len(places)
    if leaves_on_host:
        before_it('loads a model of which device_map="auto" leaves a part on the host')
    assert device_map is not None
    device_map.update(dict.fromkeys(device_map, devices[0]))
    if not leaves_on_host:
        return
    say(
        "device_map: the whole model on the GPU, although its weights leave no room there; a run would keep some of "
        "it on the host, and trainers refuse to train that"
    )


def _quantise_as_loaded(quantizer: Any, say: Callable[[str], None]) -> None:
    """Mark a checkpoint that was saved quantised as not quantised yet: its shapes are those of its plain weights."""
    if quantizer is None or not quantizer.pre_quantized:
        return
    method = quantizer.quantization_config.quant_method
    method = str(getattr(method, "value", method))
    if getattr(quantizer.quantization_config, "dequantize", False):
        say(f"weights: unpacked from {method}, as the script asks or as transformers does on such a machine")
        return
    if not method.startswith(_QUANTISES_ANYTHING):
        raise UserError(
            "Weights that were published quantised are modelled for bitsandbytes, and where transformers unpacks them; "
            f"here it would multiply {method} by kernels of its own. Estimate the script with the model that they were "
            "made from, or a recipe: lowmem-ft keeps MXFP4 and FP8 packed."
        )
    quantizer.pre_quantized = False


class _Shape:
    """The part of a tensor in a file that upstream asks for: the shape and type that a slice of safetensors reports."""

    def __init__(self, shape: torch.Size, dtype_name: str) -> None:
        self._shape, self._dtype_name = list(shape), dtype_name

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype_name


def _shapes_of(model: Any, load_config: Any, say: Callable[[str], None]) -> dict[str, _Shape]:
    """Return what a checkpoint of the model would hold, in the type it is loaded in; a tied weight is in it once."""
    from transformers.modeling_utils import str_to_torch_dtype

    quantizer = load_config.hf_quantizer
    names = {dtype: name for name, dtype in str_to_torch_dtype.items()}
    shapes, experts_bytes = {}, 0
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            becomes_small = quantizer is not None and quantizer.param_needs_quantization(model, name)
            shapes[name] = _Shape(tensor.shape, names[load_config.dtype if becomes_small else tensor.dtype])
            if quantizer is not None and not becomes_small and "experts" in name and tensor.dim() == 3:
                experts_bytes += tensor.nbytes
    if experts_bytes:
        say(
            f"weights: the experts' {format_bytes(experts_bytes)} stay as they are, since bitsandbytes quantises "
            "linear layers and transformers keeps all experts of a layer in one tensor"
        )
    return shapes
